"""A notice that leaves no time for the end of the step, end to end: real agents, and real ranks that train."""

from __future__ import annotations

from pathlib import Path

import pytest

from agent.protocol.jobfile import JobFile
from liver_core.handoff import Decision, Rung
from tests.agent.cluster import REAL_RANKS, cluster
from tests.agent.waiting import real_job
from tests.cluster.real_ranks_model import build_corpus

pytestmark = [pytest.mark.thorough, pytest.mark.real, pytest.mark.timeout(360)]

MICRO_BATCHES, MICRO_BATCH_S = 72, 0.35
"""Some forty seconds a step: each of its parts fills and drains the pipeline of two."""
NOTICE_S = 38.0
"""Less than a step and what a live handoff needs besides, and five times what a drop needs here."""


def test_the_ladder_drops_a_long_step_and_the_next_world_does_its_batch(tmp_path: Path) -> None:
    with cluster("a", "b", job=slow_job(build_corpus(tmp_path)), spares=("c",), ranks=REAL_RANKS) as nodes:
        nodes.service.spares = ("c",)
        nodes.wait(lambda: (1, 1) in nodes.service.steps, "a step", 240)
        nodes.announce("b", NOTICE_S)
        done = nodes.wait_retired()
        assert (done.rung, done.decision) == (Rung.DROP_STEP, Decision.GO_REDO)
        assert done.target.node_ids() == ("a", "c")
        assert done.measures.phases_s["dropped"] > 0
        assert done.measures.notice_to_safe_s is not None and done.measures.notice_to_safe_s < NOTICE_S
        assert done.measures.certificate, "the state was certified"
        last = max(step for generation, step in nodes.service.steps if generation == 1)
        nodes.wait(lambda: (2, last + 1) in nodes.service.steps, "the batch of the dropped step in the next world", 120)
        steps = [step for _, step in nodes.service.steps]
        assert sorted(steps) == list(range(1, max(steps) + 1)), "no step is missing and none is done twice"
        assert not nodes.service.failed


def slow_job(corpus: str) -> JobFile:
    args = {"data_prefix": corpus, "micro_batch_s": MICRO_BATCH_S}
    rule = {"every_micro_batches": 2}
    return real_job("slow", "SlowJob", args, global_batch=MICRO_BATCHES, micro_batch=1, drop_step=rule)
