"""A handoff of ranks that are programs of their own, since something that they import starts CUDA: real agents, and
real ranks that train."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest

from agent.protocol.values import HandoffState
from agent.supervisor.child_entry import PROGRAM
from liver_core.handoff import Decision
from tests.agent.cluster import REAL_RANKS, cluster, identity_of
from tests.agent.waiting import real_job
from tests.cluster.real_ranks_model import build_corpus

pytestmark = [pytest.mark.thorough, pytest.mark.real, pytest.mark.timeout(240)]


def test_ranks_start_as_programs_where_a_zygote_has_started_cuda_and_hand_over_as_forks_do(tmp_path: Path) -> None:
    args = {"data_prefix": build_corpus(tmp_path), "micro_batch_s": 0.05}
    job = real_job("slow", "SlowJob", args, global_batch=4, micro_batch=1)
    preload, rank_entry, store_entry = REAL_RANKS
    ranks = (f"{preload},tests.agent.supervisor.starts_cuda", rank_entry, store_entry)
    with cluster("a", "b", job=job, ranks=ranks) as nodes:
        nodes.wait(lambda: (1, 4) in nodes.service.steps, "four steps", 120)
        survivor = identity_of(nodes.rank("a"))  # type: ignore[arg-type]
        assert PROGRAM in psutil.Process(survivor.pid).cmdline()
        nodes.announce("b")
        done = nodes.wait_handoff(HandoffState.ACTIVE)
        assert (done.decision, done.target.node_ids()) == (Decision.GO, ("a",))
        assert done.measures.bytes_moved is not None and done.measures.bytes_moved > 0
        nodes.wait(
            lambda: any(generation == 2 for generation, _ in nodes.service.steps), "a step of the next world", 60
        )
        assert identity_of(nodes.rank("a")) == survivor  # type: ignore[arg-type]
        assert "started CUDA in the zygote" in (nodes.directory / "a" / "zygote.log").read_text()
        assert not nodes.service.failed
