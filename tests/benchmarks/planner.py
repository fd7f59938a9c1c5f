"""How well the step-time model fits measured tables: the error on what it has not seen, and what its choice costs.

`python -m tests.benchmarks.planner TABLE` prints one line for each model of the table (the form of Parcae's
measured step times: model, global_batch, micro_batch, seq_length, dp, pp, step_ms) and number of observations.
"""

import argparse
import csv
import random
import time
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from statistics import mean, median

from agent.protocol.jobfile import JobFile
from liver_core.layout import ParallelLayout
from service.planner.decision import decide
from service.planner.inputs import PlanInputs, PlanNode, PoolMarket, World
from service.planner.losses import layouts_by_count, loss_plans, standing_plans
from service.planner.step_time import DeviceRates, ObservedStep, StepShape, fitted

SIZES = {"gpt-1.5b": (48, 1600, 50304), "gpt-6.7b": (32, 4096, 50304), "bert": (24, 1024, 30592)}
"""Layers, hidden size and vocabulary of the models of the table."""
V100_10GBPS = DeviceRates(flops_per_s=30e12, bytes_per_s=1.2e9, near_bytes_per_s=100e9)
DRAWS, SEED = 100, 7


def tables(path: Path) -> dict[str, tuple[StepShape, list[ObservedStep]]]:
    """By model: its shape and every measured step."""
    found: dict[str, tuple[StepShape, list[ObservedStep]]] = {}
    with path.open(newline="") as file:
        for row in csv.DictReader(file):
            name = next((key for key in SIZES if row["model"].startswith(key)), "")
            if not name:
                continue
            layers, hidden, vocabulary = SIZES[name]
            sizes = layers, hidden, 8 * hidden // 3, vocabulary, int(row["seq_length"])
            shape = StepShape(*sizes, int(row["micro_batch"]), int(row["global_batch"]), cuts_head=True)
            layout = ParallelLayout(dp=int(row["dp"]), pp=int(row["pp"]))
            found.setdefault(row["model"], (shape, []))[1].append(ObservedStep(layout, float(row["step_ms"]) / 1000))
    return found


def regret(observed: list[ObservedStep], seen: set[ParallelLayout], predict) -> float:
    """Over every number of nodes: how much slower the chosen layout is than the best measured one."""
    losses = []
    for nodes in sorted({item.layout.world_size for item in observed}):
        possible = [item for item in observed if item.layout.world_size <= nodes]
        chosen = min(possible, key=lambda item: item.seconds if item.layout in seen else predict(item.layout))
        losses.append(chosen.seconds / min(item.seconds for item in possible) - 1)
    return mean(losses)


def measured(path: Path, *, draws: int = DRAWS, counts: tuple[int, ...] = (1, 2, 3, 5, 8)) -> list[dict]:
    """One record for each model and number of observations."""
    records = []
    for name, (shape, every) in tables(path).items():
        for count in counts:
            if count >= len(every):
                continue
            chance, sums = random.Random(SEED), defaultdict(list)
            for _ in range(draws):
                seen = tuple(chance.sample(every, count))
                model = fitted(shape, seen, V100_10GBPS)
                rest = [item for item in every if item not in seen]
                off = [abs(model.predict(item.layout) / item.seconds - 1) for item in rest]
                sums["error"].append(mean(off))
                sums["regret"].append(regret(every, {item.layout for item in seen}, model.predict))
                sums["claimed"].append(model.error)
            records.append({
                "model": name, "layouts": len(every), "observed": count, "draws": draws,
                "held_out_error": median(sums["error"]), "regret": mean(sums["regret"]),
                "claimed_error": median(sums["claimed"]),
            })  # fmt: skip
    return records


def speed(nodes: int) -> dict[str, float]:
    """Seconds of processor time for a job of 175 B parameters on so many nodes of 8 devices, by what is done."""
    model = {
        "num_layers": 96, "hidden_size": 12_288, "num_attention_heads": 96, "padded_vocab_size": 51_200,
        "seq_length": 2_048,
    }  # fmt: skip
    rules = {"name": "large", "model": model, "global_batch": 6_144, "stop": {"steps": 1}}
    job = JobFile.model_validate(rules | {"nodes": {"min": min(8, nodes // 2), "max": nodes}})
    # Of the sets that the pool may lose at once there are more than have a plan.
    market = PoolMarket("p", life_s=3_600.0, group_sizes=((1, 0.6), (2, 0.2), (4, 0.2)), ours=nodes)
    inputs = PlanInputs(job, tuple(PlanNode(f"n{at:04}", 8, pool="p") for at in range(nodes)), markets=(market,))
    begin = time.process_time()
    target = decide(inputs).target
    took = {"decide": time.process_time() - begin}
    assert target is not None
    inputs = replace(inputs, world=World(1, target.layout, target.members))
    for name, make in (("loss_plans", loss_plans), ("standing_plans", standing_plans), ("by_count", layouts_by_count)):
        begin = time.process_time()
        make(inputs)
        took[name] = time.process_time() - begin
    return took


def main() -> None:
    """Print the records of a table, or how long decisions take."""
    parser = argparse.ArgumentParser(description="Hold the step-time model against tables of measured steps.")
    parser.add_argument("table", type=Path, nargs="?")
    parser.add_argument("--speed", action="store_true", help="how long decisions take, for 8 to 1,000 nodes")
    given = parser.parse_args()
    for nodes in (8, 16, 32, 64, 1_000) if given.speed else ():
        print(f"{nodes:5} nodes: " + ", ".join(f"{name} {1e3 * took:.0f} ms" for name, took in speed(nodes).items()))
    for record in measured(given.table) if given.table else ():
        print(
            f"{record['model']:10} {record['layouts']:3} layouts, {record['observed']} observed: held-out error "
            f"{record['held_out_error']:.1%} (claimed {record['claimed_error']:.1%}), regret {record['regret']:.2%}"
        )


if __name__ == "__main__":
    main()
