"""By when the state of nodes that go must be elsewhere: before what is reserved for delays, or with it if need be."""

import asyncio
from uuid import uuid4

import pytest

from agent.driver.planning import wanted_of
from agent.notices.warning_budget import warning_budget
from agent.protocol.sync import HandoffOrder, JobOrder, Provider
from agent.protocol.values import HandoffCause, Placement, utc
from tests.agent.driver.test_notice_response import ACTIVE, START_S, Scene, near, notice


def test_a_node_whose_time_has_run_out_does_not_take_the_others_time(order: JobOrder) -> None:
    async def run() -> None:
        scene = Scene(order)
        await scene.hear(notice("d", 20))
        await scene.hear(notice("c", 120))
        scene.now += 19
        await scene.response.consider(order)
        leaving = scene.lead.asked[-1][1]
        assert {name: safe_by for name, (_, safe_by) in leaving.items()} == {
            "c": near(START_S + 105), "d": near(START_S + 105),
        }  # fmt: skip

    asyncio.run(run())


def test_where_all_have_only_what_is_reserved_for_delays_that_is_used(order: JobOrder) -> None:
    """Of 24 s an eighth is reserved. Whoever could lead may have stood still until then."""

    async def moments_at(after_s: float) -> dict[str, float]:
        scene = Scene(order)
        await scene.hear(notice("d", 24))
        await scene.hear(notice("c", 28, seen_s=4))
        scene.now += after_s
        await scene.response.consider(order)
        return {name: round(safe_by - START_S, 3) for name, (_, safe_by) in scene.lead.asked[-1][1].items()}

    async def run() -> None:
        assert await moments_at(20.9) == {"d": 21.0, "c": 25.0}
        assert await moments_at(21.5) == {"d": 25.0, "c": 25.0}, "c still has more than what is reserved"
        assert await moments_at(25.5) == {"d": 28.0, "c": 28.0}, "d has gone"
        assert await moments_at(28.5) == {"d": 34.0, "c": 34.0}, "both have, and machines go late"
        scene = Scene(order)
        await scene.hear(notice("d", 24))
        scene.now += 21.5
        await scene.response.consider(order)
        assert scene.lead.asked[-1][1]["d"] == (START_S, near(START_S + 24)), "it may be there until then"

    asyncio.run(run())


@pytest.mark.parametrize(("ends_in_s", "by_s"), [(-60.0, 10.0), (-5.0, 10.0), (0.0, 10.0), (None, 600.0)])
def test_a_notice_has_time_for_as_long_as_it_counts_as_heard(
    order: JobOrder, ends_in_s: float | None, by_s: float
) -> None:
    """Also where its deadline had passed when it was heard, or where it names none."""

    async def run() -> None:
        scene = Scene(order)
        said = notice("d", ends_in_s or 0.0)
        await scene.hear(said if ends_in_s is not None else said.model_copy(update={"deadline_utc": None}))
        for after_s in (by_s - 8.0, by_s - 0.1):
            scene.now = START_S + after_s
            assert await scene.leaving() == {"d"}
            assert scene.lead.asked[-1][1]["d"] == (START_S, near(START_S + by_s))
        scene.now = START_S + by_s
        assert await scene.leaving() == set()

    asyncio.run(run())


def test_a_proposal_of_the_service_may_use_what_is_reserved_for_delays_where_nothing_else_is_left(
    order: JobOrder,
) -> None:
    wanted = HandoffOrder(
        handoff_id=uuid4(),
        parent=1,
        cause=HandoffCause.NOTICE,
        leaving=("d",),
        target=Placement(layout=ACTIVE.layout, members=tuple(ACTIVE.members)),
        reason="without d",
        proposed_utc=utc(START_S),
        deadline_utc=utc(START_S + 24),
    )
    order = order.model_copy(update={"notices": (notice("d", 24),)})
    for after_s, expected_s in ((10, 21), (20.9, 21), (21.5, 24), (25, 34), (34, 24)):
        found = wanted_of(wanted, order.notices, now=START_S + after_s, budget=warning_budget(Provider.AWS))
        assert found.deadline_utc == near(START_S + expected_s), after_s


def test_the_time_of_a_proposal_is_counted_from_when_the_first_of_its_notices_was_heard(order: JobOrder) -> None:
    heard = tuple(notice(name, 120, seen_s=seen_s) for name, seen_s in (("c", 9), ("d", 4), ("a", 1)))
    wanted = HandoffOrder(
        handoff_id=uuid4(),
        parent=1,
        cause=HandoffCause.NOTICE,
        leaving=("c", "d"),
        target=Placement(layout=ACTIVE.layout, members=tuple(ACTIVE.members)),
        reason="without c and d",
        proposed_utc=utc(START_S + 10),
        deadline_utc=utc(START_S + 120),
    )
    order = order.model_copy(update={"notices": heard})
    found = wanted_of(wanted, order.notices, now=START_S + 10, budget=warning_budget(Provider.AWS))
    assert found.notice_at == near(START_S + 4), "a is not among those that it is for"
