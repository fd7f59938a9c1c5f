"""One loss that is told with several times, as where a service or a peer moves them by a clock that it knows badly.
It is answered by one handoff."""

import asyncio
from datetime import timedelta

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agent.protocol.notice_life import moved
from agent.protocol.sync import JobOrder
from liver_core.handoff.participant_events import RankStage
from liver_core.handoff.proposer import ProposerState
from tests.agent.driver import lead_scene, test_notice_response
from tests.agent.driver.lead_scene import START_S, TO_THE_END
from tests.agent.stub_service import StubService, roster_of
from tests.agent.waiting import fake_job

FOUR = lead_scene.FOUR
WITHIN_S = 15.0
"""An agent gives a report up after so long: no time can be moved by more for its being slow."""
shifts = st.lists(st.floats(-WITHIN_S, WITHIN_S), min_size=len(TO_THE_END), max_size=len(TO_THE_END))


@pytest.fixture(scope="module")
def order(tmp_path_factory: pytest.TempPathFactory) -> JobOrder:
    return StubService(fake_job(tmp_path_factory.mktemp("job")), FOUR).order()


@given(shifts)
@settings(deadline=None, max_examples=40)
def test_an_open_handoff_is_the_only_one_whatever_times_its_loss_is_told_with(order: JobOrder, by_s: list[float]):
    async def run() -> None:
        scene = lead_scene.Scene(order)
        await scene.notice(100.0, "d")
        await scene.deliver(RankStage.PREPARING)
        for stage, later_s in zip(TO_THE_END, by_s, strict=True):
            told = {"d": (START_S + later_s, START_S + 100.0 + later_s)}
            await scene.answer(told)
            assert not scene.lead.is_idle
            await scene.deliver(stage)
        assert scene.state is ProposerState.RETIRING, "the next world trains"
        assert len({mirror.handoff_id for mirror in scene.mirrors}) == 1
        assert {mirror.leaving for mirror in scene.mirrors} == {("d",)}
        assert not any(mirror.superseded for mirror in scene.mirrors)

    asyncio.run(run())


@given(st.lists(st.tuples(st.floats(-WITHIN_S, WITHIN_S), st.sampled_from(("aws-queue", "aws-imds"))), min_size=1,
                max_size=8))  # fmt: skip
@settings(deadline=None, max_examples=40)
def test_a_node_that_has_left_the_world_is_left_once_however_its_loss_is_told_afterwards(
    order: JobOrder, told: list[tuple[float, str]]
):
    async def run() -> None:
        scene = test_notice_response.Scene(order)
        for later_s, source in told:
            fact = test_notice_response.notice("d", 100.0, source=source)
            await scene.hear(moved(fact, timedelta(seconds=later_s)))
        assert await scene.leaving() == {"d"}, "it is told of one node, and no other"
        scene.slots.world = roster_of(2, FOUR[:3])
        asked = len(scene.lead.asked)
        for later_s, source in told:
            fact = test_notice_response.notice("d", 100.0, source=source)
            await scene.hear(moved(fact, timedelta(seconds=later_s + WITHIN_S)))
        assert len(scene.lead.asked) == asked

    asyncio.run(run())
