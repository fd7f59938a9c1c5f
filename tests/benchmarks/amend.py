"""What another notice costs in the middle of a handoff: amended, or given up and opened again.

Three real ranks train on a, b and c. c goes and a newcomer n is to take its place; when all are prepared, b goes too,
so that the plan becomes TP2 on a and n. Both ways end when all are prepared for that plan; nobody cuts over. Beside it:
a nearer deadline, which keeps everything.

Run from the root of the tree: python -m tests.benchmarks.amend [--repeats 7]
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

from liver_core.handoff.messages import Reason, Rung
from tests.cluster.rank_cluster import Cluster, RankSetup
from tests.cluster.real_ranks_model import build_corpus, small_gpt

NODES = "abc"
WAIT_S = 60.0
PARTS = ("bring_up_groups_s", "build_model_s", "open_endpoint_s", "connect_to_sources_s", "stream_s")
"""What the slowest rank needed for each, in the amended plan."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=7)
    repeats = parser.parse_args().repeats
    parts: dict[str, list[float]] = {}
    ways: dict[str, Callable[[Cluster, str], float]] = {
        "amended": lambda cluster, newcomer: amended(cluster, newcomer, parts),
        "given up, opened again": opened_again,
        "nearer deadline only": hastened,
    }
    spent: dict[str, list[float]] = {way: [] for way in ways}
    with tempfile.TemporaryDirectory() as folder:
        arguments = small_gpt(build_corpus(Path(folder)), num_layers=12, hidden_size=128, ffn_hidden_size=384)
        with Cluster(RankSetup(arguments)) as cluster:
            cluster.launch("PP3", NODES)
            cluster.await_step(cluster.ranks[next(iter(cluster.ranks))].member, 10)
            for number in range(repeats):
                for index, (way, run) in enumerate(ways.items()):
                    spent[way].append(run(cluster, f"n{number}{index}"))
    print(f"seconds until all are prepared, median (least to most) of {repeats}; load {os.getloadavg()[0]:.1f}")
    for way, seconds in (spent | parts).items():
        print(f"{way:24} {median(seconds):6.2f} ({min(seconds):.2f} to {max(seconds):.2f})")


def amended(cluster: Cluster, newcomer: str, parts: dict[str, list[float]]) -> float:
    """The newcomer and the survivor take the newer revision."""
    first = _prepared(cluster, newcomer)
    started = time.monotonic()
    newer = cluster.amend(first, "TP2", ["a", newcomer])
    cluster.await_stage(cluster.members(newer), newer, "prepared", WAIT_S)
    seconds = time.monotonic() - started
    said = [cluster.stages(member, newer.handoff_id, 2)[-1][2] for member in cluster.members(newer)]
    for name in PARTS:
        parts.setdefault(f"  {name.removesuffix('_s')}", []).append(max(each.get(name, 0.0) for each in said))
    _give_up(cluster, newer)
    return seconds


def opened_again(cluster: Cluster, newcomer: str) -> float:
    """The first handoff is aborted; then another newcomer process, another store and another generation."""
    first = _prepared(cluster, newcomer)
    started = time.monotonic()
    _give_up(cluster, first)
    again = cluster.open("TP2", ["a", f"{newcomer}-again"], rung=Rung.LIVE)
    cluster.await_stage(cluster.members(again), again, "prepared", WAIT_S)
    seconds = time.monotonic() - started
    _give_up(cluster, again)
    return seconds


def hastened(cluster: Cluster, newcomer: str) -> float:
    """The same target until an earlier moment."""
    first = _prepared(cluster, newcomer)
    started = time.monotonic()
    newer = cluster.amend(first, "PP3", ["a", "b", newcomer], deadline_s=30)
    cluster.await_stage(cluster.members(newer), newer, "prepared", WAIT_S)
    seconds = time.monotonic() - started
    _give_up(cluster, newer)
    return seconds


def _prepared(cluster: Cluster, newcomer: str) -> Any:
    request = cluster.open("PP3", ["a", "b", newcomer], rung=Rung.LIVE)
    cluster.await_stage(cluster.members(request), request, "prepared", WAIT_S)
    return request


def _give_up(cluster: Cluster, request: Any) -> None:
    members = cluster.members(request)
    cluster.command(members, "abort", request.handoff_id, Reason("enough was seen", "abort"))
    cluster.await_stage(members, request, "aborted", WAIT_S)


if __name__ == "__main__":
    main()
