"""The leading side of a job against the participants' own machines: what another notice does to an open handoff."""

import asyncio
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from uuid import UUID

import pytest

from agent.driver.planning import HANDOFF_DEADLINE_S, Learned
from agent.protocol.peer import RankMeasures
from agent.protocol.sync import HandoffOrder, JobOrder, LayoutByCount, LayoutForCount
from agent.protocol.values import HandoffCause, HandoffState, Placement
from agent.supervisor.records import StoreKey
from liver_core.handoff import Order, Phase, Reason, Rung, Stage, StoreAddress
from liver_core.handoff import Rung as CoreRung
from liver_core.handoff.participant_events import RankStage
from liver_core.handoff.proposer import ProposerState
from liver_core.layout import Member, ParallelLayout
from tests.agent.driver.lead_scene import FOUR, START_S, Scene
from tests.agent.stub_service import StubService, members_of
from tests.agent.waiting import fake_job


@pytest.fixture
def job(tmp_path: Path) -> JobOrder:
    return StubService(fake_job(tmp_path), FOUR).order()


def test_another_notice_amends_the_handoff_that_is_still_preparing(job: JobOrder) -> None:
    async def run() -> None:
        now = Scene(job)
        await now.notice(60.0, "d")
        await now.deliver(RankStage.PREPARING)
        opened = now.mirrors[-1]
        now.now += 1.0
        await now.notice(40.0, "c", "d")
        amended = now.mirrors[-1]
        assert (amended.handoff_id, amended.generation) == (opened.handoff_id, opened.generation)
        assert (opened.plan_revision, amended.plan_revision) == (1, 2)
        assert (opened.leaving, amended.leaving) == (("d",), ("c", "d"))
        assert str(amended.target.layout) == "TP1xPP2xDP1"
        assert amended.deadline_utc is not None and amended.deadline_utc.timestamp() == START_S + 40.0
        assert amended.reason is not None and "c will go too" in amended.reason.text
        assert not amended.superseded
        assert {order.deadline_utc for _, order in now.sent} == {START_S + 40.0}
        await now.deliver(RankStage.PREPARED)
        assert now.revisions() == {2}
        assert now.state is ProposerState.PERMITTED

    asyncio.run(run())


@pytest.mark.parametrize("leaving", [("c", "d"), ("d",)], ids=["more nodes", "a nearer deadline"])
def test_what_rungs_cost_is_estimated_anew_for_an_amended_plan(job: JobOrder, leaving: tuple[str, ...]) -> None:
    """Of a restart the steps since the last checkpoint: they were 10 of 0.5 s, and are 50 of 1 s now."""

    async def run() -> None:
        now = Scene(job)
        await now.notice(60.0, "d")
        assert now.lead.progress is not None
        opened, needed_s = now.mirrors[-1], now.lead.progress.estimate_s
        now.now, now.pulse = now.now + 20.0, replace(now.pulse, step=140, median_step_s=1.0)
        await now.notice(50.0, *leaving)
        amended = now.mirrors[-1]
        assert (opened.plan_revision, amended.plan_revision) == (1, 2)
        before, after = (mirror.measures.rung_costs[-1] for mirror in (opened, amended))
        assert before.rung is after.rung is Rung.CHECKPOINT
        assert after.total_s == pytest.approx(before.total_s - 5.0 + 50.0)
        assert needed_s is not None and now.lead.progress.estimate_s is not None
        assert now.lead.progress.estimate_s > needed_s + 0.4, "what streams takes a step more"

    asyncio.run(run())


def test_after_permission_another_notice_takes_it_back_and_amends_the_handoff(job: JobOrder) -> None:
    async def run() -> None:
        now = Scene(job)
        await now.notice(60.0, "d")
        await now.deliver(RankStage.PREPARED)
        assert now.state is ProposerState.PERMITTED
        await now.deliver(RankStage.READY)
        await now.notice(60.0, "c", "d")
        assert now.state is ProposerState.WITHDRAWING
        assert {order.phase for _, order in now.sent[-4:]} == {Phase.WITHDRAW}
        assert (now.mirrors[-1].plan_revision, now.mirrors[-1].state) == (1, HandoffState.READY)
        count = len(now.sent)
        await now.notice(60.0, "c", "d")
        assert len(now.sent) == count, "what is under way is not said again"
        await now.deliver(RankStage.PREPARED)
        assert (now.state, now.mirrors[-1].plan_revision) == (ProposerState.PREPARING, 2)
        await now.deliver(RankStage.PREPARED)
        assert now.state is ProposerState.PERMITTED
        assert (now.mirrors[-1].leaving, now.mirrors[-1].superseded) == (("c", "d"), False)

    asyncio.run(run())


def test_an_open_handoff_that_cannot_be_amended_is_given_up_for_all_notices(job: JobOrder) -> None:
    async def run() -> None:
        only_three = LayoutByCount(
            choices=(LayoutForCount(nodes=3, layout=ParallelLayout(pp=3), reason="three or nothing"),)
        )
        now = Scene(job.model_copy(update={"standing_plans": (), "layouts_by_count": only_three}))
        await now.notice(60.0, "d")
        await now.notice(60.0, "c", "d")
        assert now.mirrors[-1].superseded
        assert now.state is ProposerState.ABORTING

    asyncio.run(run())


def test_a_node_that_goes_too_soon_for_what_is_prepared_is_answered_by_a_rescue(job: JobOrder) -> None:
    async def run() -> None:
        now = Scene(job)
        now.lead.planner.learned = Learned(prepare_s=20.0)
        await now.notice(60.0, "d")
        before = now.lead._proposer.record
        now.now += 10.0
        await now.notice(40.0, "d")
        after = now.lead._proposer.record
        assert before.proposal is not None and after.proposal is not None
        assert (after.proposal.rung, after.target_revision) == (before.proposal.rung, 1), "half of it is prepared"
        await now.notice(20.0, "d")
        after, mirror = now.lead._proposer.record, now.mirrors[-1]
        assert after.proposal == replace(before.proposal, deadline_utc=START_S + 20.0, rung=CoreRung.RESCUE)
        assert (after.plan_revision, after.target_revision) == (3, 3)
        assert mirror.rung is Rung.RESCUE and mirror.reason is not None
        assert "d goes 20.0 s sooner than was known; live: needs" in mirror.reason.text
        assert "rescue: needs" in mirror.reason.text
        await now.notice(15.0, "d")
        after = now.lead._proposer.record
        assert after.proposal is not None
        assert (after.proposal.rung, after.target_revision) == (CoreRung.RESCUE, 3)

    asyncio.run(run())


def test_a_node_that_goes_sooner_brings_the_deadline_nearer_and_ranks_keep_what_they_have(job: JobOrder) -> None:
    async def run() -> None:
        now = Scene(job)
        await now.notice(60.0, "d")
        await now.deliver(RankStage.STREAMING)
        before = now.lead._proposer.record
        await now.notice(59.5, "d")
        assert now.lead._proposer.record == before, "half a second is not worth a revision"
        await now.notice(30.0, "d")
        after, mirror = now.lead._proposer.record, now.mirrors[-1]
        assert before.proposal is not None
        assert after.proposal == replace(before.proposal, deadline_utc=START_S + 30.0)
        assert (after.plan_revision, after.target_revision, mirror.plan_revision) == (2, 1, 2)
        assert mirror.reason is not None and "d goes 30.0 s sooner" in mirror.reason.text
        assert {(order.deadline_utc, order.target_revision) for _, order in now.sent} == {(START_S + 30.0, 1)}
        await now.deliver(RankStage.PREPARED)
        assert now.state is ProposerState.PERMITTED
        await now.notice(10.0, "d")
        assert now.state is ProposerState.PERMITTED, "what has permission is not taken back for that"

    asyncio.run(run())


def test_another_notice_that_leaves_the_target_as_it_is_lets_ranks_keep_what_they_have(job: JobOrder) -> None:
    """Three nodes are no use to this job, so that without d, and without c as well, it runs on a and b."""

    async def run() -> None:
        pairs = tuple(LayoutForCount(nodes=count, layout=ParallelLayout(pp=2), reason="pairs only") for count in (2, 3))
        of_pairs = job.model_copy(
            update={"standing_plans": (), "layouts_by_count": LayoutByCount(choices=pairs), "lead_order": FOUR}
        )
        now = Scene(of_pairs)
        await now.notice(60.0, "d")
        await now.deliver(RankStage.STREAMING)
        await now.notice(50.0, "c", "d")
        record = now.lead._proposer.record
        assert (record.plan_revision, record.target_revision) == (2, 1)
        assert (now.mirrors[-1].leaving, now.mirrors[-1].plan_revision) == (("c", "d"), 2)
        await now.deliver(RankStage.PREPARED)
        assert now.state is ProposerState.PERMITTED

    asyncio.run(run())


def growth_onto_e(proposed_utc: datetime) -> HandoffOrder:
    return HandoffOrder(
        handoff_id=UUID(int=1),
        parent=1,
        cause=HandoffCause.GROW,
        target=Placement(layout=ParallelLayout(pp=4), members=members_of(("a", "b", "c", "e"))),
        plan_digest="grow",
        reason="a node appeared",
        proposed_utc=proposed_utc,
    )


async def grown(now: Scene) -> None:
    """A handoff onto e is open, which a leads."""
    wanted = growth_onto_e(datetime.fromtimestamp(START_S, UTC))
    await now.propose(wanted)
    assert now.lead._leader.own.coming == {"e"}


def test_a_handoff_that_only_brings_in_a_node_that_goes_is_given_up_at_once(job: JobOrder) -> None:
    async def run() -> None:
        now = Scene(job)
        await grown(now)
        await now.notice(25.0, "e")
        assert now.state is ProposerState.ABORTING
        assert now.mirrors[-1].superseded and now.mirrors[-1].leaving == ()

    asyncio.run(run())


def test_a_handoff_is_live_and_its_streaming_and_its_fall_are_shown(job: JobOrder) -> None:
    async def run() -> None:
        now = Scene(job)
        await now.notice(60.0, "d")
        assert {order.rung for _, order in now.sent} == {"live"}
        assert now.mirrors[-1].rung is Rung.LIVE
        assert now.mirrors[-1].reason is not None and "live: needs" in now.mirrors[-1].reason.text
        await now.deliver(RankStage.STREAMING)
        assert now.mirrors[-1].state is HandoffState.STREAMING
        why = Reason("tile 7 fell out of the ring", "stream", 2, "7")
        await now.deliver(RankStage.PREPARED, reason=why)
        assert now.mirrors[-1].rung is Rung.STOP_AND_COPY
        await now.deliver(RankStage.READY, RankStage.CUTTING_OVER, reason=why)
        await now.deliver(RankStage.ACTIVE)
        done = now.mirrors[-1]
        assert (done.state, done.rung) == (HandoffState.ACTIVE, Rung.STOP_AND_COPY)
        assert done.reason is not None and done.reason.text.endswith(
            "fell to stop_and_copy: rank 2, stream, tile 7: tile 7 fell out of the ring"
        )

    asyncio.run(run())


def test_a_batch_that_is_done_again_is_shown_with_its_reason(job: JobOrder) -> None:
    async def run() -> None:
        now = Scene(job)
        await now.notice(60.0, "d")
        for stage in (RankStage.PREPARED, RankStage.READY, RankStage.CUTTING_OVER):
            await now.deliver(stage)
        why = Reason("no reads from rank 3, and every target holds the state", "barrier", 1)
        await now.deliver(RankStage.ACTIVE, reason=why)
        await now.deliver()
        done = now.mirrors[-1]
        assert (done.state, done.rung) == (HandoffState.ACTIVE, Rung.LIVE)
        assert done.reason is not None and done.reason.text.endswith(
            "a batch was done again: rank 1, barrier: no reads from rank 3, and every target holds the state"
        )

    asyncio.run(run())


def test_many_reports_of_one_state_make_one_mirror_which_says_all_that_was_measured(job: JobOrder) -> None:
    async def run() -> None:
        now = Scene(job)
        await now.notice(60.0, "d")
        opened = len(now.mirrors)
        await now.deliver(RankStage.PREPARING, measured=RankMeasures(measures={"build_model_s": 0.25}))
        assert len(now.mirrors) == opened, "nothing that is urgent was said"
        await now.lead.tick({})
        assert len(now.mirrors) == opened + 1
        assert now.mirrors[-1].measures.phases_s["build_model"] == 0.25
        await now.lead.tick({})
        assert len(now.mirrors) == opened + 1, "nothing new was said"
        measured = RankMeasures(measures={"build_model_s": 0.5, "bytes_moved": 8.0}, certificate="c0ffee")
        for stage in (RankStage.PREPARED, RankStage.READY, RankStage.CUTTING_OVER, RankStage.ACTIVE, RankStage.ACTIVE):
            await now.deliver(stage, measured=measured)
        ended = now.mirrors[-1]
        assert ended.state is HandoffState.ACTIVE
        assert ended.measures.phases_s["to_retired"] == 0.0, "the clock stands"
        assert ended.measures.phases_s["build_model"] == 0.5
        assert (ended.measures.bytes_moved, ended.measures.certificate) == (32, "c0ffee")

    asyncio.run(run())


def test_a_handoff_that_takes_long_is_told_of_again_before_the_service_gives_it_up(job: JobOrder) -> None:
    async def run() -> None:
        now = Scene(job)
        await now.notice(600.0, "d")
        await now.deliver(RankStage.PREPARING, RankStage.STREAMING)
        await now.lead.tick({})
        told = len(now.mirrors)
        for _ in range(10):
            now.now += 30.0
            await now.lead.tick({})
        assert len(now.mirrors) == told + 3, "every 90 s: the first tick more than a minute after the last word"
        assert now.mirrors[-1].state is HandoffState.STREAMING
        assert now.mirrors[-1].mirror_seq > now.mirrors[told - 1].mirror_seq

    asyncio.run(run())


def test_capacity_that_appears_gets_the_time_that_its_state_needs(job: JobOrder) -> None:
    async def run() -> None:
        now = Scene(job)
        now.lead.planner.learned = Learned(bandwidth_bytes_per_s=1_000.0, follow_s=0.0)
        wanted = HandoffOrder(
            handoff_id=UUID(int=1),
            parent=1,
            cause=HandoffCause.GROW,
            target=Placement(layout=ParallelLayout(pp=4), members=members_of(FOUR)),
            plan_digest="grow",
            reason="a node appeared",
            proposed_utc=datetime.fromtimestamp(START_S, UTC),
        )
        await now.propose(wanted)
        order = now.sent[0][1]
        assert order.deadline_utc - START_S > 2 * HANDOFF_DEADLINE_S
        assert order.cutover.target_s == 120.0

    asyncio.run(run())


def test_after_streaming_has_failed_the_next_handoff_of_that_world_copies_in_the_pause(job: JobOrder) -> None:
    async def run() -> None:
        now = Scene(job)
        await now.notice(60.0, "d")
        await now.deliver(RankStage.STREAMING)
        await now.deliver(RankStage.ABORTED, reason=Reason("the certificate differs", "stream", 0))
        assert (now.state, now.mirrors[-1].state) == (ProposerState.IDLE, HandoffState.ABORTED)
        now.now += 10.0
        await now.notice(60.0, "d")
        assert now.mirrors[-1].rung is Rung.STOP_AND_COPY
        assert now.mirrors[-1].reason is not None
        assert "live: it failed before in this world: the certificate differs" in now.mirrors[-1].reason.text
        assert now.lead._proposer.record.ended[-1].stage is Stage.ABORTED

    asyncio.run(run())


def test_the_number_of_a_store_that_died_is_not_used_again(job: JobOrder) -> None:
    """It may have been up for a moment, and a second record of one decision could be written there."""

    async def run() -> None:
        now = Scene(job)
        now.stores.dying = 1
        await now.notice(60.0, "d")
        assert (now.lead.is_idle, now.lead.open_id, now.sent) == (True, "", [])
        assert now.lead.status == "no handoff could be opened: the store ended before it listened"
        await now.notice(60.0, "d")
        assert [key.generation for key in now.stores.asked] == [2, 3]
        assert {order.generation for _, order in now.sent} == {3}

    asyncio.run(run())


def test_who_ends_while_a_store_is_coming_up_lets_go_of_it_and_opens_nothing(job: JobOrder) -> None:
    async def run() -> None:
        now, begun = Scene(job), asyncio.Event()
        cancelled: list[bool] = []

        async def never(key: StoreKey, address: str) -> StoreAddress:
            begun.set()
            try:
                await asyncio.Event().wait()
            finally:
                cancelled.append(True)
            raise AssertionError

        now.stores.host = never
        await now.answer({"d": (now.now, START_S + 60.0)}, in_touch=True)
        await asyncio.wait_for(begun.wait(), timeout=10.0)
        await now.lead.close()
        assert cancelled == [True] and now.sent == [] and now.mirrors == []

    asyncio.run(run())


def test_who_ends_with_nothing_opened_has_nothing_to_let_go(job: JobOrder) -> None:
    asyncio.run(Scene(job).lead.close())


def test_an_agent_that_is_killed_before_its_first_order_still_tells_of_the_handoff_that_it_opened(
    job: JobOrder,
) -> None:
    async def run() -> None:
        now = Scene(job)

        async def killed(member: Member, order: Order) -> None:
            raise InterruptedError

        now.lead._send_order = killed
        with pytest.raises(InterruptedError):
            await now.notice(60.0, "d")
        opened = now.lead._proposer.record.proposal
        assert opened is not None
        again = Scene(job, now.journal)
        again.lead.restore()
        assert [str(mirror.handoff_id) for mirror in again.mirrors] == [opened.handoff_id]
        assert again.lead.progress is not None and again.lead.progress.mirror.leaving == ("d",)
        assert again.lead.open_id == opened.handoff_id

    asyncio.run(run())
