"""What it costs that a next world waits in host memory: in the pause, and in each step that is replayed.

Two real ranks are handed over live from PP2 to TP2 and back, in turn with room for everything and with room for one
tile on the device. Then one process replays steps of the job's optimizer in place and through a stage.

Run from the root of the tree: python -m tests.benchmarks.host_memory [--repeats 7]
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from statistics import median

import torch

from agent.driver.handoff_measures import merge_measures
from agent.protocol.sync import HandoffMeasures
from liver_core.handoff.messages import Rung
from liver_core.streaming.header import StepHeader
from liver_core.streaming.window_step import GroupSpan, Replayer
from tests.cluster.rank_cluster import Cluster, RankSetup
from tests.cluster.real_ranks_model import build_corpus, small_gpt
from tests.liver_core.rank.support.tight import manifest_of, tight
from tests.liver_core.streaming.optimizers import Whole

BIG = {"hidden_size": 512, "ffn_hidden_size": 1024}
WORLDS = (("PP2", "ab"), ("TP2", "ba"))
TOLD = ("pause", "swap_in", "switch", "stream")
TILE = 1 << 20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=7)
    repeats = parser.parse_args().repeats
    with tempfile.TemporaryDirectory() as folder:
        setup = RankSetup(small_gpt(build_corpus(Path(folder)), **BIG))
        handed_over(setup, repeats)
    replayed(repeats)
    print(f"load {os.getloadavg()[0]:.1f}")


def handed_over(setup: RankSetup, repeats: int) -> None:
    """Seconds of the parts of a handoff, the slowest rank's."""
    manifest = manifest_of(setup)
    spent: dict[tuple[bool, str], list[float]] = defaultdict(list)
    waited: list[float] = []
    with Cluster(setup) as cluster:
        members = cluster.launch(*WORLDS[0]).members
        cluster.await_step(members[0], 5)
        for number in range(4 * repeats):
            # Both ways go in both directions, equally often.
            little = number % 4 in (1, 2)
            (held, _), (wanted, nodes) = WORLDS[number % 2], WORLDS[(number + 1) % 2]
            needs = [tight(manifest, (held, 1 - rank), (wanted, rank), streams=True) for rank in (0, 1)]
            budget = (max(device for device, _ in needs), max(host for _, host in needs)) if little else (None, 0)
            cluster.command(members, "set_budget", *budget)
            request = cluster.handoff(wanted, nodes, rung=Rung.LIVE)
            said = [cluster.stages(member, request.handoff_id)[-1][2] for member in members]
            merged = merge_measures(said, HandoffMeasures())
            assert merged.pause_s is not None
            waited += [each["host_bytes_peak"] for each in said if little]
            for name, seconds in {**merged.phases_s, "pause": merged.pause_s}.items():
                spent[little, name].append(seconds)
        cluster.stop()
    print(f"{2 * repeats} handoffs each, {median(waited) / 1e6:.0f} MB of each rank wait in host memory; milliseconds")
    for name in TOLD:
        print(f"  {name:10} room {_told(spent[False, name]):28} one tile {_told(spent[True, name])}")


def replayed(repeats: int) -> None:
    """Seconds of one replayed step of many elements."""
    numel = 16 * TILE
    for name in ("adamw for-loop", "adamw foreach"):
        spent: dict[str, list[float]] = {}
        for how, staged in (("in place", ()), ("through the stage", ("master", "exp_avg", "exp_avg_sq", "grad"))):
            source = Whole(name, torch.randn(numel), [numel])
            replayer = Replayer(
                source.rule, source.regions, [GroupSpan(0, numel, 0)], window_elements=TILE, staged=staged
            )
            spent[how] = list(_steps(source, replayer, numel, repeats))
        parts = ", ".join(f"{how} {_told(seconds)}" for how, seconds in spent.items())
        print(f"replay of {numel / 1e6:.0f} million elements, {name}, milliseconds: {parts}")


def _steps(source: Whole, replayer: Replayer, numel: int, repeats: int) -> Iterable[float]:
    for version in range(1, repeats + 2):
        source.regions["grad"].normal_()
        header: StepHeader = source.header(version, 2.5)
        header = StepHeader(version, 2.5, 1.0, header.groups, {"step": float(version - 1)}, stepped=version > 1)
        started = time.perf_counter()
        replayer.replay([(0, numel)], header)
        if version > 1:
            yield time.perf_counter() - started


def _told(seconds: list[float]) -> str:
    """Median (least to most), in milliseconds."""
    if not seconds:
        return "-"
    return f"{1e3 * median(seconds):.0f} ({1e3 * min(seconds):.0f} to {1e3 * max(seconds):.0f})"


if __name__ == "__main__":
    main()
