"""A node whose agent reports notices without end is left all the same once a real one comes."""

from datetime import timedelta

import pytest

from agent.protocol.sync import NOTICES_PER_REPORT_MAX, NoticeKind
from service.notices.rules import NOTICES_OF_LEASE_MAX
from tests.service.reconcilers.conftest import Fleet


def advice(fleet: Fleet, since: int) -> tuple:
    """As many notices as a report may have, each of a source of its own, that move nobody."""
    fact = fleet.agents["b"].notice(deadline_s=30, kind=NoticeKind.REBALANCE)
    assert fact.deadline_utc is not None
    later = fact.deadline_utc + timedelta(seconds=1)
    return tuple(
        fact.model_copy(update={"source": f"source-{number}", "deadline_utc": later})
        for number in range(since, since + NOTICES_PER_REPORT_MAX)
    )


@pytest.mark.thorough
def test_a_real_notice_after_a_flood_of_others_is_taken_and_moves_the_job(fleet: Fleet):
    fleet.run()
    for part in range(3):
        fleet.round(parts={"b": {"notices": advice(fleet, part * NOTICES_PER_REPORT_MAX)}})
    assert fleet.handoffs() == []
    assert len(fleet.agents["a"].job_order().notices) == NOTICES_OF_LEASE_MAX
    real = fleet.agents["b"].notice()
    fleet.round(parts={"b": {"notices": (real,)}})
    for _ in range(4):
        fleet.round()
    assert real in fleet.agents["a"].job_order().notices
    assert len(fleet.agents["a"].job_order().notices) == NOTICES_OF_LEASE_MAX
    (handoff,) = fleet.handoffs()
    assert (handoff["state"], handoff["cause"], handoff["leaving"]) == ("proposed", "notice", ["b"])
    order = fleet.agents["c"].job_order()
    assert order.handoff is not None and order.handoff.deadline_utc == real.deadline_utc
