"""A job that wants what costs least in all, end to end: real agents, and real ranks that train."""

from __future__ import annotations

from pathlib import Path

import pytest

from agent.protocol.sync import HandoffMirror
from agent.protocol.values import HandoffState
from liver_core.handoff import Decision, Rung
from tests.agent.cluster import REAL_RANKS, Cluster, cluster
from tests.agent.waiting import real_job
from tests.cluster.real_ranks_model import build_corpus

pytestmark = [pytest.mark.thorough, pytest.mark.real, pytest.mark.timeout(240)]

MICRO_BATCH_S, GLOBAL_BATCH = 0.1, 4
STEP_S = MICRO_BATCH_S * GLOBAL_BATCH
"""Nearly all of a step is waiting, so that other programs of the machine change little of its length."""


def test_once_a_live_handoff_was_measured_the_rung_is_taken_that_costs_less_in_all(tmp_path: Path) -> None:
    args = {"data_prefix": build_corpus(tmp_path), "micro_batch_s": MICRO_BATCH_S}
    job = real_job("slow", "SlowJob", args, global_batch=GLOBAL_BATCH, micro_batch=1, prefer="total")
    with cluster("a", "b", "c", job=job, ranks=REAL_RANKS) as nodes:
        nodes.wait(lambda: (1, 8) in nodes.service.steps, "eight steps", 120)
        nodes.announce("c")
        first = nodes.wait(lambda: measured(nodes, 1), "what the first handoff cost", 60)
        assert first.rung is Rung.LIVE and first.reason is not None
        assert [cost.measured for cost in first.measures.rung_costs] == [0, 0]
        nodes.announce("b")
        done = nodes.wait(lambda: measured(nodes, 2), "what the second handoff cost", 60)
        live, copied = done.measures.rung_costs
        assert live.parts == first.measures.lost_parts and (live.measured, copied.measured) == (1, 0)
        assert copied.guessed == ("pause",) and copied.parts.streaming_s == 0.0
        # The two differ by milliseconds here, so what a step is off by says which is less. It is the same either way.
        # Less by no more than noise, which is what steps differ by, counts as the same, and then the state is copied.
        assert done.decision is Decision.GO and done.rung in (Rung.LIVE, Rung.STOP_AND_COPY)
        if done.rung is Rung.LIVE:
            assert live.total_s < copied.total_s
        else:
            assert copied.total_s < live.total_s + STEP_S
        assert done.measures.lost_parts is not None
        assert (done.measures.lost_parts.streaming_s == 0.0) is (done.rung is Rung.STOP_AND_COPY)
        assert not nodes.service.failed


def measured(nodes: Cluster, number: int) -> HandoffMirror | None:
    """The newest of so many handoffs, once it is known what it cost."""
    found = nodes.service.handoffs(HandoffState.ACTIVE)
    return found[-1] if len(found) >= number and found[-1].measures.lost_parts is not None else None
