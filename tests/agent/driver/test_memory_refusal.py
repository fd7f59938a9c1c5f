"""A next world that has no room beside the training one is refused at once: its time is needed for the next rung."""

from __future__ import annotations

from pathlib import Path

import pytest

from agent.protocol.values import HandoffState
from tests.agent.cluster import REAL_RANKS, cluster
from tests.agent.waiting import real_job
from tests.cluster.real_ranks_model import build_corpus

pytestmark = [pytest.mark.thorough, pytest.mark.real, pytest.mark.timeout(240)]

NOTICE_S = 60.0
MOST_S = 5.0
"""On a quiet machine it takes less than one; two cores that many tests share are not quiet."""


def test_a_handoff_without_room_is_aborted_at_once_also_with_a_newcomer_that_still_starts(tmp_path: Path) -> None:
    args = {"data_prefix": build_corpus(tmp_path), "micro_batch_s": 0.05}
    job = real_job("slow", "SlowJob", args, global_batch=8, micro_batch=1, extra_bytes_max=1)
    with cluster("a", "b", spares=("e",), job=job, ranks=REAL_RANKS) as nodes:
        nodes.service.spares = ("e",)
        nodes.wait(lambda: (1, 2) in nodes.service.steps, "two steps", 120)
        nodes.announce("b", NOTICE_S)
        aborted = nodes.wait_handoff(HandoffState.ABORTED)
        assert aborted.target.node_ids() == ("a", "e")
        assert aborted.reason is not None and "extra_bytes_max: the next world needs" in aborted.reason.text
        assert (aborted.changed_utc - aborted.opened_utc).total_seconds() < MOST_S
        steps = len(nodes.service.steps)
        nodes.wait(lambda: len(nodes.service.steps) > steps + 2, "further steps")
