"""`python -m tests.benchmarks.policy --data FOLDER --report FILE [--only PART ...]`: parts that are not run again keep
what the report has of them."""

import argparse
import json
import platform
import time
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from statistics import median, quantiles
from typing import Any

from service.planner.change_cost import ChangeCost, cost_of_report, shipped_cost
from service.policy.choosing import decide
from service.policy.types import Candidate, Market, PolicyInputs, PoolView, StandingWorld
from service.server import without_looking_for_garbage_in_what_is_loaded
from tests.benchmarks.planner import measured, speed
from tests.benchmarks.policy.by_machines import machine_cases
from tests.benchmarks.policy.clusters import fixed_cases, notice_cases, release_cases
from tests.benchmarks.policy.places import deadline_cases, months, moving_cases, starts

CASES = {
    "fixed": fixed_cases,
    "notices": notice_cases,
    "machines": machine_cases,
    "release": release_cases,
    "deadline": deadline_cases,
    "moves": moving_cases,
}
PARTS = (*CASES, "months", "start", "decision", "step_time")
DECISIONS, LAYOUTS_PER_COUNT, NODES = 100, 8, 64
PLANNED_NODES, PLANNED_ROUNDS = 1_000, 5


def main() -> None:
    parser = argparse.ArgumentParser(description="The policy on public spot traces.")
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--report", type=Path, required=True)
    parser.add_argument("--handoffs", type=Path, help="report of make bench-handoff to fit the cost of a change on")
    parser.add_argument("--only", nargs="*", choices=PARTS, default=PARTS)
    given = parser.parse_args()
    if not given.data.is_dir():
        print(f"not run: there is no folder {given.data}; POLICY_DATA names the folder of spot traces")
        return
    cost = cost_of(given.handoffs)
    report = read_report(given.report)
    report["machine"] = f"{platform.machine()}, Python {platform.python_version()}"
    report["cost_of_change_model"] = asdict(cost)
    for part in given.only:
        begin = time.monotonic()
        run(part, given.data, cost, report)
        report.setdefault("took_s", {})[part] = round(time.monotonic() - begin, 1)
        given.report.parent.mkdir(parents=True, exist_ok=True)
        given.report.write_text(json.dumps(report, indent=1) + "\n")


def cost_of(path: Path | None) -> ChangeCost:
    if path is None or not path.is_file():
        return shipped_cost()
    return cost_of_report(json.loads(path.read_text()), str(path.name))


def read_report(path: Path) -> dict[str, Any]:
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError):
        return {"cases": []}


def run(part: str, folder: Path, cost: ChangeCost, report: dict[str, Any]) -> None:
    """One part; every case is printed as it is done."""
    if part in CASES:
        report["cases"] = [case for case in report["cases"] if case["part"] != part]
        for case in CASES[part](folder, cost):
            report["cases"].append(case | {"part": part})
            print(line_of(case), flush=True)
    elif part == "months":
        report["months"] = shown(months(folder))
    elif part == "start":
        report["start"] = starts(folder)
        print(report["start"], flush=True)
    elif part == "decision":
        # As in a service: full collections are most of what is above the median otherwise.
        with without_looking_for_garbage_in_what_is_loaded():
            report["decision_ms"] = decision_ms()
            report["standing_plans_ms"] = standing_plans_ms()
        print(report["decision_ms"], report["standing_plans_ms"], flush=True)
    else:
        report["step_time"] = shown(measured(folder / "parcae/measured_step_times.csv"))


def shown(rows: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    found = list(rows)
    for row in found:
        print(row, flush=True)
    return found


def line_of(case: dict[str, Any]) -> str:
    said = [f"{case['trace']} {case['model']} {case['mode']} lost {case['lost_s']:.1f} s"]
    said += [f"notice {case['notice_s']:g} s, {case['unannounced_share']:.0%} without"] if case["notice_s"] else []
    for name in ("deadline_ratio", "goodput", "goodput_at_once", "regret_count_oracle", "regret_victim_oracle",
                 "usd_vs_hold_all", "tokens_vs_hold_all", "usd_over_optimum", "worst_window", "deadline_missed",
                 "moves", "egress_usd"):  # fmt: skip
        if case.get(name) is not None:
            said.append(f"{name} {case[name]:.4f}")
    return ", ".join(said)


def decision_ms() -> dict[str, float]:
    """Processor time of a decision among layouts for every number of nodes, with two pools in each of four places."""
    layouts = tuple(
        Candidate(f"TP{tp}xDP{nodes}", nodes, 60.0 / nodes * (1 + 0.01 * tp), 1_000_000, change_s=5.0)
        for nodes in range(1, NODES + 1)
        for tp in range(1, LAYOUTS_PER_COUNT + 1)
    )
    took = []
    for round_ in range(DECISIONS):
        pools = tuple(
            PoolView(f"{place}-{market}", place, market, 1.0 + round_ % 7, held=NODES // 8 + round_ % 3, offered=NODES,
                     life_s=3_600.0 + round_, acquire_s=120.0, grows_in_s=600.0)
            for place in ("a", "b", "c", "d") for market in Market
        )  # fmt: skip
        standing = StandingWorld("TP1xDP8", 8, "a", (("a-spot", 8),))
        inputs = PolicyInputs(pools, layouts, 10.0, standing=standing)
        begin = time.process_time()
        decide(inputs)
        took.append((time.process_time() - begin) * 1e3)
    return {"p50": median(took), "p99": quantiles(took, n=100)[98], "layouts": len(layouts), "nodes": NODES}


def standing_plans_ms() -> dict[str, float]:
    """Processor time of a decision and of all plans for likely losses of a job on a thousand nodes of eight GPUs."""
    rounds = [speed(PLANNED_NODES) for _ in range(PLANNED_ROUNDS)]
    return {"nodes": PLANNED_NODES} | {name: 1e3 * median(each[name] for each in rounds) for name in rounds[0]}


if __name__ == "__main__":
    main()
