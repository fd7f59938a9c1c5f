"""A notice that leaves no time to build the next world, end to end: real agents, and real ranks that train."""

from __future__ import annotations

from pathlib import Path

import pytest

from agent.protocol.values import HandoffState
from liver_core.handoff import Decision, Rung
from tests.agent.cluster import REAL_RANKS, cluster
from tests.agent.waiting import real_job
from tests.cluster.real_ranks_model import build_corpus

pytestmark = [pytest.mark.thorough, pytest.mark.real, pytest.mark.timeout(240)]

BUILD_S = 14.0
LONG_NOTICE_S, NOTICE_S = 60.0, 14.0
"""The first shows the agents how long a world takes to build, which the second has no time for."""


def test_the_ladder_rescues_what_leavers_hold_and_the_next_world_is_built_beyond_the_deadline(tmp_path: Path) -> None:
    args = {"data_prefix": build_corpus(tmp_path), "build_s": BUILD_S, "micro_batch_s": 0.05}
    job = real_job("slow", "SlowBuildJob", args, global_batch=8, micro_batch=1)
    with cluster("a", "b", "c", job=job, ranks=REAL_RANKS) as nodes:
        nodes.wait(lambda: (1, 2) in nodes.service.steps, "two steps", 120)
        nodes.announce("c", LONG_NOTICE_S)
        first = nodes.wait_handoff(HandoffState.ACTIVE)
        assert first.rung is not Rung.RESCUE and first.measures.phases_s["to_ready"] > BUILD_S
        nodes.wait(lambda: any(generation == 2 for generation, _ in nodes.service.steps), "steps of two nodes")
        nodes.wait(lambda: "ended active" in nodes.log_of("a"), "the end of the first handoff")
        nodes.announce("b", NOTICE_S)
        done = nodes.wait_retired(2)
        assert (done.rung, done.decision, done.target.node_ids()) == (Rung.RESCUE, Decision.GO_REDO, ("a",))
        said = done.measures
        assert said.notice_to_safe_s is not None and said.notice_to_safe_s < NOTICE_S
        assert said.phases_s["build_target"] > BUILD_S
        assert said.notice_to_active_s is not None and said.notice_to_active_s > NOTICE_S
        assert said.certificate, "the state was certified"
        assert said.extra["bytes_rescued"] > 0
        last = max(step for generation, step in nodes.service.steps if generation == 2)
        nodes.wait(lambda: (3, last + 1) in nodes.service.steps, "the batch of the boundary in the next world", 60)
        steps = [step for _, step in nodes.service.steps]
        assert sorted(steps) == list(range(1, max(steps) + 1)), "no step is missing and none is done twice"
        assert not nodes.service.failed
