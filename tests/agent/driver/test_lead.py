"""The leading side of a job against the participants' own machines: what another notice does to an open handoff."""

import asyncio
import random
from collections.abc import Awaitable, Callable
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from uuid import UUID

import pytest

from agent.driver.lead import HANDOFF_DEADLINE_S, PEER_LOST_S, RETRY_MAX_S, Lead, Leaving
from agent.driver.node_context import Node
from agent.driver.planning import Learned, Pulse
from agent.protocol.peer import RankMeasures
from agent.protocol.sync import HandoffMirror, HandoffOrder, JobOrder, LayoutByCount, LayoutForCount
from agent.protocol.values import HandoffCause, HandoffState, Placement
from agent.supervisor.records import StoreKey
from agent.supervisor.stores import StoreError
from liver_core.handoff import Order, Participant, ParticipantRecord, Phase, Reason, Rung, Stage, StoreAddress
from liver_core.handoff import Rung as CoreRung
from liver_core.handoff.generations import next_start
from liver_core.handoff.participant_events import OrderReceived, RankReported, RankStage, SendReport
from liver_core.handoff.proposer import ProposerState
from liver_core.layout import Member, ParallelLayout
from tests.agent.stub_service import JOB_ID, StubService, members_of, roster_of
from tests.agent.waiting import fake_job

FOUR = ("a", "b", "c", "d")
ACTIVE = roster_of(1, FOUR)
START_S = 1_700_000_000.0


class Journal:
    """In memory."""

    def __init__(self) -> None:
        self.kept: dict[tuple[str, str], dict] = {}

    def put(self, table: str, key: str, data: dict) -> None:
        self.kept[table, key] = data

    def get(self, table: str, key: str) -> dict | None:
        return self.kept.get((table, key))

    def items(self, table: str) -> list[tuple[str, dict]]:
        return [(key, data) for (owner, key), data in self.kept.items() if owner == table]

    def delete(self, table: str, key: str) -> None:
        del self.kept[table, key]


class Stores:
    """Every store can be had, but for the next `dying`."""

    def __init__(self) -> None:
        self.dying = 0
        self.asked: list[StoreKey] = []

    async def host(self, key: StoreKey, address: str) -> StoreAddress:
        self.asked.append(key)
        if self.dying:
            self.dying -= 1
            raise StoreError("the store ended before it listened")
        return StoreAddress(host=address, port=4_000)


class Scene:
    """The lead on node a, and a participant per member; ranks do what the test says."""

    def __init__(self, order: JobOrder, journal: Journal | None = None) -> None:
        self.order = order
        self.now = START_S
        self.journal = journal or Journal()
        self.stores = Stores()
        self.mirrors: list[HandoffMirror] = []
        self.sent: list[tuple[Member, Order]] = []
        self.participants = {
            member: Participant(
                job_id=JOB_ID,
                member=member,
                agent_incarnation=1,
                record=ParticipantRecord(active=ACTIVE, highest_generation=1),
            )
            for member in ACTIVE.members
        }
        self.posted: asyncio.Queue[Callable[[], Awaitable[None]]] = asyncio.Queue()
        node = SimpleNamespace(
            node_id="a",
            incarnation=1,
            private_address="127.0.0.1",
            journal=self.journal,
            stores=self.stores,
            outbox=SimpleNamespace(put_handoff=self.mirrors.append),
            sync_soon=lambda: None,
            sync_with_progress=lambda: None,
            now=lambda: self.now,
            service_is_there=lambda: False,
        )
        self.lead = Lead(
            cast(Node, node),
            JOB_ID,
            send_order=self._send,
            post=self.posted.put_nowait,
            pulse=lambda: Pulse(100, 0.1, 0.5, 90),
        )

    async def _send(self, member: Member, order: Order) -> None:
        self.sent.append((member, order))

    async def notice(self, ends_in_s: float, *nodes: str) -> None:
        """These nodes will go."""
        leaving: Leaving = dict.fromkeys(nodes, (self.now, START_S + ends_in_s))
        await self.lead.answer_loss(self.order, ACTIVE, leaving)
        if self.lead.open_id and self.state is ProposerState.IDLE:
            opened = await asyncio.wait_for(self.posted.get(), timeout=10.0)
            await opened()

    @property
    def state(self) -> ProposerState:
        return self.lead._proposer.state

    async def deliver(
        self, *said: RankStage, reason: Reason | None = None, measured: RankMeasures | None = None
    ) -> None:
        """All orders that were sent, then what each rank of the newest revision says; reports go back shuffled."""
        sent, self.sent = self.sent, []
        reports = []
        for member, order in sent:
            reports += self._feed(member, OrderReceived(order))
        for member, participant in self.participants.items():
            for each in said:
                promise = participant.record.promise
                if promise is None:
                    continue
                order = participant.record.order
                leaves = each is RankStage.ACTIVE and order is not None and member not in order.target.members
                stage = RankStage.LEFT if leaves else each
                event = RankReported(promise.handoff_id, 1, stage, reason=reason, plan_revision=promise.plan_revision)
                reports += self._feed(member, event)
        random.Random(0).shuffle(reports)
        for report in reports:
            await self.lead.take_report(report, measured)

    def _feed(self, member: Member, event: Any) -> list[Any]:
        effects = self.participants[member].handle(event, self.now)
        return [effect.report for effect in effects if isinstance(effect, SendReport)]

    def revisions(self) -> set[int]:
        return {item.record.promise.plan_revision for item in self.participants.values() if item.record.promise}


@pytest.fixture
def job(tmp_path: Path) -> JobOrder:
    return StubService(fake_job(tmp_path), FOUR).order()


def scene(job: JobOrder) -> Scene:
    return Scene(job)


def test_another_notice_amends_the_handoff_that_is_still_preparing(job: JobOrder) -> None:
    async def run() -> None:
        now = scene(job)
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


def test_a_deadline_that_lies_later_does_not_move_the_open_one(job: JobOrder) -> None:
    async def run() -> None:
        now = scene(job)
        await now.notice(40.0, "d")
        leaving: Leaving = {"d": (START_S, START_S + 90.0), "c": (START_S, START_S + 80.0)}
        await now.lead.answer_loss(job, ACTIVE, leaving)
        amended = now.mirrors[-1]
        assert amended.plan_revision == 2
        assert amended.deadline_utc is not None and amended.deadline_utc.timestamp() == START_S + 40.0

    asyncio.run(run())


def test_after_permission_another_notice_takes_it_back_and_amends_the_handoff(job: JobOrder) -> None:
    async def run() -> None:
        now = scene(job)
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


def test_a_boundary_that_comes_before_permission_is_taken_back_leaves_the_notice_to_the_next_handoff(
    job: JobOrder,
) -> None:
    async def run() -> None:
        now = scene(job)
        await now.notice(60.0, "d")
        await now.deliver(RankStage.PREPARED)
        await now.deliver(RankStage.READY)
        await now.notice(60.0, "c", "d")
        await now.deliver(RankStage.CUTTING_OVER)
        assert now.state is ProposerState.PERMITTED
        await now.notice(60.0, "c", "d")
        mirror = now.mirrors[-1]
        assert (now.state, mirror.leaving, mirror.superseded) == (ProposerState.PERMITTED, ("d",), False)
        assert "refused" not in now.lead.status, "nobody asks for what comes too late"

    asyncio.run(run())


def test_no_handoff_is_opened_from_a_world_that_a_newer_start_replaces(job: JobOrder) -> None:
    async def run() -> None:
        now = scene(job.model_copy(update={"next_generation": next_start(ACTIVE.generation) + 1}))
        await now.notice(60.0, "d")
        assert (now.mirrors, now.sent) == ([], [])
        assert "the service has started generation 100001" in now.lead.status

    asyncio.run(run())


def test_a_handoff_takes_the_number_after_the_highest_that_the_service_knows(job: JobOrder) -> None:
    async def run() -> None:
        now = scene(job.model_copy(update={"next_generation": 40}))
        await now.notice(60.0, "d")
        assert now.mirrors[-1].generation == 40

    asyncio.run(run())


def test_an_open_handoff_that_cannot_be_amended_is_given_up_for_all_notices(job: JobOrder) -> None:
    async def run() -> None:
        only_three = LayoutByCount(
            choices=(LayoutForCount(nodes=3, layout=ParallelLayout(pp=3), reason="three or nothing"),)
        )
        now = scene(job.model_copy(update={"standing_plans": (), "layouts_by_count": only_three}))
        await now.notice(60.0, "d")
        await now.notice(60.0, "c", "d")
        assert now.mirrors[-1].superseded
        assert now.state is ProposerState.ABORTING

    asyncio.run(run())


def test_a_node_that_goes_too_soon_for_what_is_prepared_is_answered_by_a_rescue(job: JobOrder) -> None:
    async def run() -> None:
        now = scene(job)
        now.lead._learned = Learned(prepare_s=20.0)
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
        now = scene(job)
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
        now = scene(of_pairs)
        await now.notice(60.0, "d")
        await now.deliver(RankStage.STREAMING)
        await now.notice(50.0, "c", "d")
        record = now.lead._proposer.record
        assert (record.plan_revision, record.target_revision) == (2, 1)
        assert (now.mirrors[-1].leaving, now.mirrors[-1].plan_revision) == (("c", "d"), 2)
        await now.deliver(RankStage.PREPARED)
        assert now.state is ProposerState.PERMITTED

    asyncio.run(run())


def test_capacity_that_appears_neither_amends_nor_delays_an_open_handoff(job: JobOrder) -> None:
    async def run() -> None:
        now = scene(job)
        await now.notice(60.0, "d")
        before, mirrors = now.lead._proposer.record, len(now.mirrors)
        wanted = HandoffOrder(
            handoff_id=UUID(int=1),
            parent=1,
            cause=HandoffCause.GROW,
            target=Placement(layout=ParallelLayout(pp=4), members=members_of(("a", "b", "c", "e"))),
            plan_digest="grow",
            reason="a node appeared",
            proposed_utc=now.mirrors[-1].opened_utc,
        )
        await now.lead.answer_proposal(job, ACTIVE, wanted)
        assert now.lead._proposer.record == before
        assert len(now.mirrors) == mirrors

    asyncio.run(run())


def test_a_handoff_is_live_and_its_streaming_and_its_fall_are_shown(job: JobOrder) -> None:
    async def run() -> None:
        now = scene(job)
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
        now = scene(job)
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
        now = scene(job)
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
        now = scene(job)
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
        now = scene(job)
        now.lead._learned = Learned(bandwidth_bytes_per_s=1_000.0)
        wanted = HandoffOrder(
            handoff_id=UUID(int=1),
            parent=1,
            cause=HandoffCause.GROW,
            target=Placement(layout=ParallelLayout(pp=4), members=members_of(FOUR)),
            plan_digest="grow",
            reason="a node appeared",
            proposed_utc=datetime.fromtimestamp(START_S, UTC),
        )
        await now.lead.answer_proposal(job, ACTIVE, wanted)
        opened = await asyncio.wait_for(now.posted.get(), timeout=10.0)
        await opened()
        order = now.sent[0][1]
        assert order.deadline_utc - START_S > 2 * HANDOFF_DEADLINE_S
        assert order.cutover.target_s == 120.0

    asyncio.run(run())


def test_after_streaming_has_failed_the_next_handoff_of_that_world_copies_in_the_pause(job: JobOrder) -> None:
    async def run() -> None:
        now = scene(job)
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


def test_nodes_that_are_noticed_at_once_are_answered_by_the_nearest_deadline_from_when_the_first_was_heard(
    job: JobOrder,
) -> None:
    async def run() -> None:
        now = scene(job)
        leaving: Leaving = {"c": (START_S - 5.0, START_S + 80.0), "d": (START_S - 2.0, START_S + 40.0)}
        await now.lead.answer_loss(job, ACTIVE, leaving)
        await (await asyncio.wait_for(now.posted.get(), timeout=10.0))()
        assert {order.deadline_utc for _, order in now.sent} == {START_S + 40.0}
        assert now.lead.progress is not None and now.lead.progress.notice_at == START_S - 5.0

    asyncio.run(run())


def test_the_number_of_a_store_that_died_is_not_used_again(job: JobOrder) -> None:
    """It may have been up for a moment, and a second record of one decision could be written there."""

    async def run() -> None:
        now = scene(job)
        now.stores.dying = 1
        await now.notice(60.0, "d")
        assert (now.lead.is_idle, now.lead.open_id, now.sent) == (True, "", [])
        assert now.lead.status == "no handoff could be opened: the store ended before it listened"
        await now.notice(60.0, "d")
        assert [key.generation for key in now.stores.asked] == [2, 3]
        assert {order.generation for _, order in now.sent} == {3}

    asyncio.run(run())


def test_an_agent_that_is_killed_before_its_first_order_still_tells_of_the_handoff_that_it_opened(
    job: JobOrder,
) -> None:
    async def run() -> None:
        now = scene(job)

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


async def all_say(now: Scene, *stages: RankStage, seconds: float = 0.0) -> None:
    """Every rank gets so far, each stage so many seconds after the last one."""
    for stage in stages:
        now.now += seconds
        await now.deliver(stage)


TO_THE_END = (RankStage.PREPARED, RankStage.READY, RankStage.CUTTING_OVER, RankStage.ACTIVE)


def test_the_phases_of_a_handoff_are_measured_from_its_opening_and_from_the_notice(job: JobOrder) -> None:
    async def run() -> None:
        now = scene(job)
        await now.notice(60.0, "d")
        await all_say(now, *TO_THE_END, seconds=2.0)
        await now.deliver()
        now.now += 3.0
        await now.deliver()
        measures = now.mirrors[-1].measures
        assert now.mirrors[-1].state is HandoffState.ACTIVE
        assert measures.phases_s == pytest.approx(
            {"to_ready": 2.0, "to_boundary": 4.0, "to_active": 2.0, "to_retired": 0.0}, abs=1e-3
        )
        assert measures.notice_to_active_s == pytest.approx(8.0, abs=1e-3)
        assert measures.notice_to_safe_s == pytest.approx(8.0, abs=1e-3)

    asyncio.run(run())


def test_what_the_steps_after_a_handoff_show_is_told_once_it_is_known(job: JobOrder) -> None:
    async def run() -> None:
        now = scene(job)
        await now.notice(60.0, "d")
        await all_say(now, *TO_THE_END)
        await now.deliver()
        told = len(now.mirrors)
        for step in range(101, 113):
            now.now += 0.5
            await now.lead.take_step(2, step)
        assert len(now.mirrors) == told, "soon, and not at each step"
        await now.lead.tick({})
        assert len(now.mirrors) == told + 1
        assert now.mirrors[-1].measures.cutover_step == 101
        assert now.mirrors[-1].measures.lost_s == pytest.approx(0.1, abs=1e-3)
        await now.lead.tick({})
        assert len(now.mirrors) == told + 1

    asyncio.run(run())


def test_an_agent_that_is_not_reached_for_long_ends_what_is_being_prepared_and_not_what_has_permission(
    job: JobOrder,
) -> None:
    async def run() -> None:
        now = scene(job)
        await now.notice(600.0, "d")
        away = {"c": START_S, "elsewhere": START_S - 1_000.0}
        now.now += PEER_LOST_S
        await now.lead.tick(away)
        assert now.state is ProposerState.PREPARING
        now.now += 1.0
        await now.lead.tick(away)
        assert now.state is ProposerState.ABORTING
        reason = now.mirrors[-1].reason
        assert reason is not None and reason.text == "the agent of c has not been reached for 21 s"
        permitted = scene(job)
        await permitted.notice(600.0, "d")
        await permitted.deliver(RankStage.PREPARED)
        permitted.now += 2 * PEER_LOST_S
        await permitted.lead.tick(away)
        assert permitted.state is ProposerState.PERMITTED

    asyncio.run(run())


def test_a_handoff_that_fails_is_tried_again_after_longer_and_longer_and_at_once_after_one_that_succeeds(
    job: JobOrder,
) -> None:
    async def run() -> None:
        now = scene(job)
        for pause_s in (1.0, 2.0, 4.0, 8.0, RETRY_MAX_S, RETRY_MAX_S):
            await now.notice(600.0, "d")
            await now.deliver(RankStage.PREPARING)
            await now.deliver(RankStage.ABORTED, reason=Reason("it broke", "prepare"))
            assert now.state is ProposerState.IDLE
            now.now += pause_s - 0.1
            await now.notice(600.0, "d")
            assert now.state is ProposerState.IDLE, f"a tenth of a second before {pause_s} s have passed"
            now.now += 0.2
        await now.notice(600.0, "d")
        await all_say(now, *TO_THE_END)
        await now.deliver()
        assert now.state is ProposerState.IDLE
        await now.notice(600.0, "d")
        assert now.lead.open_id

    asyncio.run(run())


def test_the_store_of_what_is_open_and_of_the_newest_world_that_was_made_here_are_kept(job: JobOrder) -> None:
    async def run() -> None:
        now = scene(job)
        assert now.lead.kept_stores() == set()
        await now.notice(60.0, "d")
        assert now.lead.kept_stores() == {("127.0.0.1", 4_000)}
        await now.deliver(RankStage.PREPARING)
        await now.deliver(RankStage.ABORTED, reason=Reason("it broke", "prepare"))
        assert now.lead.kept_stores() == set(), "nobody steps in a world that it made"
        now.now += 2 * RETRY_MAX_S
        await now.notice(60.0, "d")
        await all_say(now, *TO_THE_END)
        await now.deliver()
        assert now.lead.is_idle and now.lead.kept_stores() == {("127.0.0.1", 4_000)}

    asyncio.run(run())


def test_a_notice_that_no_live_plan_can_answer_in_time_ends_the_open_handoff(job: JobOrder) -> None:
    async def run() -> None:
        now = scene(job)
        await now.notice(60.0, "d")
        await now.notice(0.1, "c", "d")
        assert now.mirrors[-1].superseded and now.state is ProposerState.ABORTING
        assert now.lead._proposer.record.plan_revision == 1

    asyncio.run(run())


def test_a_cancel_after_the_boundary_is_refused_and_said(job: JobOrder) -> None:
    async def run() -> None:
        now = scene(job)
        await now.lead.cancel("nobody wants it")
        assert now.lead.status == "", "there is nothing to cancel"
        await now.notice(60.0, "d")
        await all_say(now, RankStage.PREPARED, RankStage.READY, RankStage.CUTTING_OVER)
        await now.lead.cancel("nobody wants it")
        assert now.state is ProposerState.PERMITTED
        assert now.lead.status.startswith("refused: ")

    asyncio.run(run())
