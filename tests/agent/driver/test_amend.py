"""A second notice in the middle of a handoff, end to end: real agents, and real ranks that train."""

from __future__ import annotations

from pathlib import Path

import pytest

from agent.protocol.jobfile import JobFile
from agent.protocol.values import HandoffState
from agent.supervisor.process import is_alive
from tests.agent.cluster import REAL_RANKS, cluster, identity_of
from tests.agent.waiting import real_job
from tests.cluster.real_ranks_model import build_corpus

pytestmark = [pytest.mark.thorough, pytest.mark.real, pytest.mark.timeout(240)]
THREE = ("a", "b", "c")


def test_a_second_notice_in_the_middle_of_a_handoff_amends_it_and_nobody_is_started_again(tmp_path: Path) -> None:
    """c goes, and e is to take its place; while both worlds are built, b goes too."""
    corpus, go_on = build_corpus(tmp_path), tmp_path / "go on"
    with cluster(*THREE, spares=("e",), job=held_job(corpus, go_on), ranks=REAL_RANKS) as nodes:
        nodes.service.spares = ("e",)
        nodes.wait_training(1, THREE)
        nodes.announce("c")
        first = nodes.wait_handoff(HandoffState.PREPARING)
        assert (first.target.node_ids(), first.plan_revision) == (("a", "b", "e"), 1)
        newcomer = identity_of(nodes.wait(lambda: nodes.rank("e"), "the newcomer"))
        survivor = identity_of(nodes.wait(lambda: nodes.rank("a"), "the survivor"))
        nodes.announce("b")
        amended = nodes.wait(
            lambda: next((m for m in nodes.service.mirrors.values() if m.plan_revision == 2), None), "the amended plan"
        )
        assert (amended.handoff_id, amended.generation) == (first.handoff_id, 2)
        go_on.touch()

        done = nodes.wait_handoff(HandoffState.ACTIVE)
        assert (done.handoff_id, done.generation, done.plan_revision) == (first.handoff_id, 2, 2)
        assert (done.target.node_ids(), done.leaving, done.superseded) == (("a", "e"), ("b", "c"), False)
        assert done.measures.certificate, "the state was certified"
        nodes.wait_training(2, ("a", "e"))
        assert identity_of(nodes.rank("a")) == survivor and identity_of(nodes.rank("e")) == newcomer  # type: ignore[arg-type]
        assert is_alive(newcomer), "the newcomer built again in the process that it was"
        nodes.wait(lambda: nodes.rank("b") is None and nodes.rank("c") is None, "the end of both leavers")
        assert len(nodes.service.mirrors) == 1 and not nodes.service.failed
        last = max(step for _, step in nodes.service.steps)
        assert {step for _, step in nodes.service.steps} == set(range(1, last + 1)), "no step is missing"


def held_job(corpus: str, held_until: Path) -> JobFile:
    args = {"data_prefix": corpus, "held_until": str(held_until), "micro_batch_s": 0.05}
    return real_job("held", "HeldJob", args, global_batch=8, micro_batch=2)
