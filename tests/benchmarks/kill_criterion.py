"""The first question of the product, asked in one script: `python -m tests.benchmarks.kill_criterion`.

Real processes take a Megatron GPT with its optimizer from TP2xPP2 to PP3 and back, in process, while it trains. Prints
what it cost; exits with 1 when anything is not exact by either oracle, or when the next world was built with memory.
"""

from __future__ import annotations

import sys
import tempfile
import time
from math import prod
from pathlib import Path

from tests.cluster.rank_cluster import Cluster, RankSetup
from tests.cluster.real_ranks_model import build_corpus, small_gpt
from tests.liver_core.rank.support.chain import Chain, World, load_with_megatron, run_chain
from tests.liver_core.rank.support.global_state import differences
from tests.liver_core.rank.support.undisturbed_runs import run_undisturbed
from tests.liver_core.worlds.memory import measured_handoff

WORLDS = (World("TP2xPP2", "abcd"), World("PP3", "abc"), World("TP2xPP2", "abce"))
HANDOFFS = range(2, len(WORLDS) + 1)
MIB = 1 << 20
BUILT_WITHOUT_MEMORY_MAX = 0.25
"""A survivor's growth while it builds, in parts of what the world will hold: modules, groups, allocator's slack."""


def main() -> int:
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        corpus = build_corpus(Path(folder))
        exact = check_exactness(corpus, Path(folder))
        cheap = show_costs(corpus)
    print(f"\n{'PASSED' if exact and cheap else 'FAILED'} in {time.monotonic() - started:.0f} s")
    return 0 if exact and cheap else 1


def check_exactness(corpus: str, folder: Path) -> bool:
    """State, weights and small state by global coordinates and by Megatron's loader; losses by an undisturbed run."""
    setup = RankSetup(small_gpt(corpus), record=True, checkpoint_at_boundary=str(folder))
    chain = run_chain(setup, WORLDS)
    checkpoints = [(str(folder / f"generation-{number - 1}"), WORLDS[number - 1].layout) for number in HANDOFFS]
    loaded = dict(zip(HANDOFFS, load_with_megatron(setup, checkpoints), strict=True))
    twin = run_undisturbed(setup, WORLDS[0].layout, chain.handed_step(2) + 1, record_steps=(chain.handed_step(2),))
    verdicts = [
        verdict
        for number in HANDOFFS
        for verdict in (
            _verdict(f"{name(number)}: global state", state_differences(chain, number)),
            _verdict(f"{name(number)}: Megatron's own loader", loader_differences(chain, loaded[number], number)),
        )
    ]
    step = chain.handed_step(2)
    verdicts.append(
        _verdict(
            f"step {step} applied in the new world, as by the old one",
            differences(twin.state("step", step), chain.state("stepped", 2)),
        )
    )
    apart = [f"step {at}" for at, loss in twin.losses().items() if chain.losses()[at] != loss]
    verdicts.append(_verdict(f"losses up to step {step}, as undisturbed", apart))
    return all(verdicts)


def state_differences(chain: Chain, generation: int) -> list[str]:
    """Masters, moments, gradients, weights and small state that are not bit for bit the same in both worlds."""
    before, after = chain.state("source", generation - 1), chain.state("target", generation)
    weights = differences(chain.weights("source", generation - 1), chain.weights("target", generation))
    expected = chain.records[("source", generation - 1)][0]["small"]
    switched = chain.records[("switched", generation)]
    small = [f"small state of rank {rank}" for rank, record in switched.items() if record["small"] != expected]
    return [*differences(before, after), *weights, *small]


def loader_differences(chain: Chain, loaded: dict, generation: int) -> list[str]:
    """Local tensors of the next world that differ from what Megatron's loader puts there."""
    found = []
    for rank, oracle in loaded.items():
        ours = chain.records[("switched", generation)][rank]["megatron"]
        for parameter, tensors in oracle["megatron"].items():
            found += [
                f"rank {rank}: {kind} of {parameter}"
                for kind, tensor in tensors.items()
                if tensor.tobytes() != ours[parameter][kind].tobytes()
            ]
        gathered = chain.records[("target", generation)][rank]["weights"]
        found += [
            f"rank {rank}: weight {parameter}"
            for parameter, bits in oracle["weights"].items()
            if (bits != gathered[parameter]).any()
        ]
    return found


def show_costs(corpus: str) -> bool:
    """A bigger model, nothing recorded: pause, bytes, and what the survivors' memory did meanwhile."""
    chain = run_chain(RankSetup(small_gpt(corpus, hidden_size=256, ffn_hidden_size=768)), WORLDS)
    parameters = sum(prod(spec.shape) for spec in chain.manifest.parameters)
    print(f"\n{parameters / 1e6:.1f}M parameters, fp32, {parameters * 16 / MIB:.0f} MiB of state with gradients")
    _row("handoff", "steps meanwhile", "pause s", "in steps", "moved MiB", "at least MiB", "extra MiB")
    for number in HANDOFFS:
        said = chain.measures[number]
        step_s = max(measures.get("median_step_s", 0.0) for measures in said)
        _row(
            name(number),
            chain.handed_step(number) - 1 - chain.opened_at[number],
            f"{chain.pause_s(number):.3f}",
            f"{chain.pause_s(number) / step_s:.2f}",
            f"{sum(measures.get('bytes_moved', 0.0) for measures in said) / MIB:.1f}",
            f"{sum(measures['bytes_lower_bound'] for measures in said) / MIB:.1f}",
            f"{max(measures['extra_bytes_peak'] for measures in said) / MIB:.1f}",
        )
    return show_memory(corpus)


def show_memory(corpus: str) -> bool:
    """Resident bytes of the survivors with the next world built but hollow, and once it has its memory."""
    arguments = small_gpt(corpus, hidden_size=512, ffn_hidden_size=1024)
    with Cluster(RankSetup(arguments, memory=True)) as cluster:
        cluster.launch(WORLDS[0].layout, WORLDS[0].nodes)
        _, growth = measured_handoff(cluster, WORLDS[1].layout, WORLDS[1].nodes)
    print("\nResident MiB that a survivor grew by, hidden size 512, while it trained")
    _row("survivor", "structure", "memory given", "reported")
    for node, grown in sorted(growth.items()):
        _row(node, *(f"{value / MIB:+.1f}" for value in (grown.build, grown.memory, grown.reported)))
    return all(grown.build <= BUILT_WITHOUT_MEMORY_MAX * grown.reported for grown in growth.values())


def name(generation: int) -> str:
    """Both layouts of a handoff."""
    return f"{WORLDS[generation - 2].layout}->{WORLDS[generation - 1].layout}"


def _verdict(what: str, wrong: list[str]) -> bool:
    print(
        f"{'exact' if not wrong else 'WRONG':>6}  {what}{f': {len(wrong)} differ, first {wrong[0]}' if wrong else ''}"
    )
    return not wrong


def _row(*cells: object) -> None:
    print("  ".join(f"{cell!s:>16}" for cell in cells))


if __name__ == "__main__":
    sys.exit(main())
