"""Agents and ranks on machines that have nothing but TCP between them: each node has a network and pids of its own."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from agent.protocol.values import HandoffState
from agent.protocol.wires import WireKind
from liver_core.handoff import Decision, Rung
from tests.agent.cluster import REAL_RANKS, Cluster, Start, cluster
from tests.agent.waiting import quick_directory, real_job
from tests.cluster.net_islands import Islands, why_not
from tests.cluster.real_ranks_model import build_corpus

NAMES = ("a", "b", "c")
pytestmark = [
    pytest.mark.real,
    pytest.mark.thorough,
    pytest.mark.timeout(400),
    pytest.mark.skipif(bool(why := why_not()), reason=why),
]


@pytest.fixture
def place() -> Iterator[Path]:
    """A folder that any user may read."""
    path = quick_directory()
    path.chmod(0o755)
    yield path
    shutil.rmtree(path)


@pytest.fixture
def islands() -> Iterator[Islands]:
    with Islands(NAMES) as made:
        yield made


def test_a_job_grows_onto_another_machine_live_and_knows_its_wires(islands: Islands, place: Path):
    watch(Start(islands=islands), place)


def test_so_does_one_whose_ranks_are_another_users(islands: Islands, place: Path, job_user, through):
    os.chown(place, job_user.pw_uid, job_user.pw_gid)
    watch(Start(through, ("--job-user", job_user.pw_name), islands=islands), place)


def watch(start: Start, place: Path) -> None:
    args = {"data_prefix": build_corpus(place), "micro_batch_s": 0.05}
    job = real_job("machines", "SlowJob", args, global_batch=8, micro_batch=2)
    with cluster("a", "b", spares=("c",), job=job, ranks=REAL_RANKS, start=start) as nodes:
        nodes.wait_training(1, ("a", "b"))
        for source, target in (("a", "b"), ("b", "a")):
            fact = nodes.wait(lambda s=source, t=target: wire(nodes, s, t), f"the wire from {source} to {target}")
            assert fact.speed is not None, fact.failed
            assert fact.speed.wire is WireKind.RELAY and fact.speed.refused, fact
            assert fact.speed.bytes_per_s > 1e6 and 0 < fact.speed.latency_s < 1.0
        nodes.service.propose(("a", "b", "c"))
        done = nodes.wait_handoff(HandoffState.ACTIVE)
        assert (done.rung, done.decision) == (Rung.LIVE, Decision.GO), done.model_dump_json()
        assert done.measures.extra["bytes_streamed"] > 0, done.measures
        nodes.wait_training(2, NAMES)


def wire(nodes: Cluster, source: str, target: str):
    return next((each for each in nodes.service.wires if (each.source, each.target) == (source, target)), None)
