"""What one node tells its leader of the notices of a job, when, and how it carries out what that decides."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from uuid import UUID, uuid4

import pytest

from agent.driver.job_driver import TICK_S, JobDriver
from agent.driver.job_planner import JobPlanner
from agent.driver.lead import Lead
from agent.driver.node_context import Node
from agent.driver.notice_response import NoticeResponse
from agent.driver.pace import Pace
from agent.driver.participants import JobSlots
from agent.driver.planning import Pulse
from agent.link.lone_suspension import LoneSuspension
from agent.link.outbox import Outbox
from agent.notices.warning_budget import warning_budget
from agent.peer.peer_client import PeerUnreachable
from agent.protocol.notice_life import GOES_LATE
from agent.protocol.peer import Envelope, NoticeBody
from agent.protocol.sync import HandoffOrder, JobOrder, NoticeFact, NoticeKind, Provider
from agent.protocol.values import HandoffCause, Placement, utc
from liver_core.handoff.forwarding import FORWARD_AGAIN_S
from liver_core.handoff.leader import ASKS_PACE, Leader
from liver_core.handoff.leader_events import (
    AskedToLead,
    Decline,
    Forwarded,
    HandoffWanted,
    LeaderEvent,
    LossesKnown,
    NoPlan,
    NoticeEffect,
    OwnNoticeWithdrawn,
    Plan,
    Say,
    Wait,
    with_time_left,
)
from liver_core.handoff.suspending import EndTimes
from liver_core.layout import ParallelLayout, Roster
from tests.agent import virtual_time
from tests.agent.stub_service import JOB_ID, StubService, members_of, roster_of
from tests.agent.waiting import fake_job

FOUR = ("a", "b", "c", "d")
ACTIVE = roster_of(1, FOUR)
START_S = 1_700_000_000.0


class FoundPlan(JobPlanner):
    """`finds`: what stands in for the plan of a loss; None: nothing does."""

    finds: NoPlan | Wait | None = None

    def plan(
        self, source: Roster, leaving: frozenset[str], *, barred: frozenset[str], left_s: float, waited_s: float
    ) -> Plan | Wait | NoPlan:
        found = super().plan(source, leaving, barred=barred, left_s=left_s, waited_s=waited_s)
        return self.finds or found


class LeadRecord:
    """A leader of which only what it decides about notices is carried out. It notes what it is told."""

    def __init__(self, node_id: str, now: Callable[[], float]) -> None:
        self.planner = FoundPlan(
            pulse=lambda: Pulse(40, 0.0, 0.5, 30, 2.0), service_is_there=lambda: True, costs=lambda: ()
        )
        self.leader = Leader(
            job_id=JOB_ID, node_id=node_id, agent_incarnation=1, planner=self.planner, new_id=lambda: str(uuid4())
        )
        self.now = now
        self.known: list[tuple[float, LossesKnown]] = []
        self.wanted: list[HandoffWanted] = []
        self.said: list[str] = []
        self.declined: list[tuple[UUID, str]] = []
        self.told_late: set[str] = set()
        self.mirrors = SimpleNamespace(has_told_late=self.told_late.__contains__)

    @property
    def asked(self) -> list[tuple[float, dict[str, tuple[float, float]]]]:
        """When nodes of the world were to go, and each with when that was heard and by when it is safe."""
        found = []
        for at, known in self.known:
            losses = (loss for loss in known.losses if loss.node_id in known.world.node_ids())
            if left := with_time_left(losses, at):
                found.append((at, {name: (loss.heard_at, loss.safe_by) for name, loss in left.items()}))
        return found

    @property
    def is_idle(self) -> bool:
        return self.leader.own.is_idle

    async def hear(self, order: JobOrder, event: LossesKnown | HandoffWanted) -> tuple[NoticeEffect, ...]:
        self.planner.order = order
        if isinstance(event, LossesKnown):
            self.known.append((self.now(), event))
        else:
            self.wanted.append(event)
        return self._handle(event)

    def note(self, event: AskedToLead | OwnNoticeWithdrawn | Forwarded) -> tuple[NoticeEffect, ...]:
        return self._handle(event)

    def _handle(self, event: LeaderEvent) -> tuple[NoticeEffect, ...]:
        effects = self.leader.handle(event, self.now())
        self.said += [effect.text for effect in effects if isinstance(effect, Say)]
        self.declined += [(UUID(effect.handoff_id), effect.reason) for effect in effects if isinstance(effect, Decline)]
        return tuple(effect for effect in effects if isinstance(effect, NoticeEffect))

    async def tick(self, unreachable: dict[str, float]) -> None:
        """Nothing is led."""

    def newest_store(self, *, since: int) -> None:
        """Nothing was led."""

    async def close(self) -> None:
        """Nothing is being opened."""


class AloneRecord:
    """What agents would be told where the service is away: the nodes' ends, and why; None where it is called off."""

    def __init__(self) -> None:
        self.said: list[tuple[dict[str, datetime | None], str] | None] = []

    async def plan(self, world: Roster, going: dict[str, datetime | None], times: EndTimes, why: str) -> None:
        assert times == EndTimes(0.5, 2.0) and world.generation == 1
        self.said.append((going, why))

    async def call_off(self) -> None:
        self.said.append(None)


class PaceRecord:
    """The job's steps take half a second. `known`: whether that is known here."""

    def __init__(self) -> None:
        self.known = True
        self.asked = 0

    def pulse(self) -> Pulse:
        return Pulse(40, 0.0, 0.5 if self.known else 0.0, 30, 2.0)

    def knows(self, world: Roster) -> bool:
        assert world.generation
        return self.known

    def is_known(self, world: Roster) -> bool:
        self.asked += 1
        return self.knows(world)


class SlotsRecord:
    """The ranks of ACTIVE train; `promised` is the order that they are bound to."""

    def __init__(self) -> None:
        self.promised: Any = None
        self.ended: set[str] = set()
        self.world: Roster | None = ACTIVE
        self.starting = False
        self.newest = 0
        self.highest = 1

    def newest_world(self) -> int:
        return self.newest

    def highest_generation(self) -> int:
        return self.highest

    def is_starting(self) -> bool:
        return self.starting

    def active(self) -> Roster | None:
        return self.world

    def promised_order(self) -> Any:
        return self.promised

    def binding_order(self) -> Any:
        return self.promised

    def is_bound(self) -> bool:
        return self.promised is not None

    def has_ended(self, handoff_id: str) -> bool:
        return handoff_id in self.ended

    def memories(self) -> tuple[()]:
        return ()

    async def start(self) -> None:
        """They are there."""

    async def tick(self) -> None:
        """They need nothing."""


@dataclass
class Peers:
    """`away`: who does not answer."""

    sent: list[tuple[float, Envelope]] = field(default_factory=list)
    tried: list[str] = field(default_factory=list)
    away: set[str] = field(default_factory=set)
    clock: Callable[[], float] = lambda: 0.0

    async def send(self, envelope: Envelope) -> None:
        self.tried.append(envelope.receiver)
        if envelope.receiver in self.away:
            raise PeerUnreachable("away")
        self.sent.append((self.clock(), envelope))

    def send_newest(self, envelope: Envelope, subject: str, *, attempts: int) -> None:
        assert subject and attempts > 1, "nothing repeats it"
        self.sent.append((self.clock(), envelope))

    def unreachable_since(self, job_id: str) -> dict[str, float]:
        return {}


class Scene:
    """One node of the job at a moment that the test moves; `job` runs in virtual time instead."""

    def __init__(self, order: JobOrder, node_id: str = "a") -> None:
        self.order = order
        self.now = START_S
        self.peers = Peers(clock=lambda: self.now)
        self.lead = LeadRecord(node_id, lambda: self.now)
        self.alone = AloneRecord()
        self.pace = PaceRecord()
        self.slots = SlotsRecord()
        self.outbox = Outbox()
        self.node = cast(
            Node,
            SimpleNamespace(
                node_id=node_id,
                slots=1,
                incarnation=1,
                incarnation_id=uuid4(),
                budget=warning_budget(Provider.AWS),
                peers=self.peers,
                supervisor=SimpleNamespace(states={}),
                stores=SimpleNamespace(hosted=()),
                outbox=self.outbox,
                journal=None,
                service_is_there=lambda: True,
                sync_soon=lambda: None,
                look_for_service=lambda: None,
                now=lambda: self.now,
                envelope=lambda job_id, receiver, body: Envelope(
                    sender=node_id,
                    receiver=receiver,
                    agent_incarnation=UUID(int=1),
                    job_id=job_id,
                    issued_utc=utc(self.now),
                    body=body,
                ),
            ),
        )
        self.response = self._response()

    def _response(self) -> NoticeResponse:
        parts = (cast(JobSlots, self.slots), cast(Lead, self.lead), cast(LoneSuspension, self.alone))
        return NoticeResponse(self.node, JOB_ID, *parts, cast(Pace, self.pace))

    def job(self) -> JobDriver:
        """The job's queue with its tick, started; the clock is the loop's."""
        loop = asyncio.get_running_loop()
        cast(Any, self.node).now = lambda: START_S + loop.time()
        self.peers.clock = loop.time
        self.lead.now = self.node.now
        job = JobDriver(self.node, JOB_ID)
        job.order = self.order
        job.slots, job.lead = cast(JobSlots, self.slots), cast(Lead, self.lead)
        wanted = {"consider": _nothing_to_do, "wanted": lambda order: order.desired}
        job.births = cast(Any, SimpleNamespace(**wanted))
        job.notices = self._response()
        job.start()
        return job

    async def hear(self, fact: NoticeFact, *, asked_to_lead: bool = False) -> None:
        self.response.take(fact, asked_to_lead=asked_to_lead)
        await self.response.consider(self.order)
        await asyncio.sleep(0)

    async def leaving(self) -> set[str]:
        """Whom the lead is asked to leave behind now."""
        before = len(self.lead.asked)
        await self.response.consider(self.order)
        return set(self.lead.asked[-1][1]) if len(self.lead.asked) > before else set()


async def _nothing_to_do(*_: object) -> None:
    """No world is to be started."""


def near(moment_s: float) -> Any:
    """A moment to the millisecond; a share of seconds since 1970 would be minutes."""
    return pytest.approx(moment_s, rel=0, abs=1e-3)


def notice(node_id: str, ends_in_s: float = 60.0, *, seen_s: float = 0.0, source: str = "aws-imds") -> NoticeFact:
    return NoticeFact(
        node_id=node_id,
        kind=NoticeKind.INTERRUPTION,
        source=source,
        deadline_utc=utc(START_S + ends_in_s),
        first_seen_utc=utc(START_S + seen_s),
    )


def withdrawn(fact: NoticeFact, after_s: float = 10.0) -> NoticeFact:
    return fact.model_copy(update={"withdrawn_utc": fact.first_seen_utc + timedelta(seconds=after_s)})


def test_what_a_peer_tells_of_its_end_reaches_the_service_from_here_too(tmp_path: Path) -> None:
    async def scenario() -> None:
        scene = Scene(StubService(fake_job(tmp_path), FOUR).order())
        heard = notice("d")
        await scene.hear(heard, asked_to_lead=True)
        await scene.hear(heard, asked_to_lead=True)
        # What the service told, its own node has reported; and a withdrawal is that node's to report.
        await scene.hear(notice("c"))
        await scene.hear(withdrawn(heard), asked_to_lead=True)
        assert scene.outbox.notices.batch(1) == (heard,)

    asyncio.run(scenario())


def proposal(cause: HandoffCause, *nodes: str, leaving: tuple[str, ...] = ()) -> HandoffOrder:
    return HandoffOrder(
        handoff_id=uuid4(),
        parent=1,
        cause=cause,
        target=Placement(layout=ParallelLayout(pp=len(nodes)), members=members_of(nodes)),
        leaving=leaving,
        proposed_utc=utc(START_S),
        reason="as planned",
    )


def test_a_notice_is_answered_when_it_is_heard_and_not_at_the_next_tick(order: JobOrder) -> None:
    async def run() -> None:
        scene = Scene(order)
        job = scene.job()
        await asyncio.sleep(TICK_S / 5)
        heard_at = asyncio.get_running_loop().time()
        job.take_notice(notice("d"))
        await asyncio.sleep(TICK_S / 100)
        assert [at for at, _ in scene.lead.asked] == [START_S + heard_at]
        await job.close()

    virtual_time.run(run())


def test_a_notice_of_a_peer_is_answered_when_it_arrives(order: JobOrder) -> None:
    """By b, which is not first: the peer says that it is its turn."""

    async def run() -> None:
        scene = Scene(order, "b")
        job = scene.job()
        await asyncio.sleep(TICK_S / 5)
        heard_at = asyncio.get_running_loop().time()
        job.take_envelope(scene.node.envelope(JOB_ID, "b", NoticeBody(notice=notice("d"))))
        await asyncio.sleep(TICK_S / 100)
        assert [at for at, _ in scene.lead.asked] == [START_S + heard_at]
        await job.close()

    virtual_time.run(run())


def test_the_node_that_goes_tells_the_first_candidate_when_it_hears_of_it(order: JobOrder) -> None:
    async def run() -> None:
        scene = Scene(order, "d")
        job = scene.job()
        await asyncio.sleep(TICK_S / 5)
        heard_at = asyncio.get_running_loop().time()
        job.take_notice(notice("d"))
        await asyncio.sleep(TICK_S / 100)
        assert [(at, envelope.receiver) for at, envelope in scene.peers.sent] == [(heard_at, "a")]
        await job.close()

    virtual_time.run(run())


def test_a_withdrawn_notice_does_not_join_the_next_one(order: JobOrder) -> None:
    async def run() -> None:
        scene = Scene(order)
        await scene.hear(withdrawn(notice("d")))
        assert scene.lead.asked == []
        await scene.hear(notice("c"))
        assert await scene.leaving() == {"c"}

    asyncio.run(run())


def test_a_notice_that_is_withdrawn_later_stops_counting_and_a_stale_copy_does_not_bring_it_back(
    order: JobOrder,
) -> None:
    async def run() -> None:
        scene = Scene(order)
        await scene.hear(notice("d"))
        assert await scene.leaving() == {"d"}
        await scene.hear(withdrawn(notice("d")))
        assert await scene.leaving() == set()
        await scene.hear(notice("d"))
        assert await scene.leaving() == set()

    asyncio.run(run())


def test_a_node_that_survived_its_deadline_neither_moves_the_job_nor_joins_another_notice(order: JobOrder) -> None:
    async def run() -> None:
        scene = Scene(order)
        await scene.hear(notice("d", 60))
        scene.now += 60 + GOES_LATE.total_seconds()
        assert await scene.leaving() == set()
        await scene.hear(notice("c", 200, seen_s=100))
        assert await scene.leaving() == {"c"}

    asyncio.run(run())


def test_a_second_notice_of_a_node_that_survived_the_first_is_answered(order: JobOrder) -> None:
    async def run() -> None:
        for first in (withdrawn(notice("d")), notice("d")):
            scene = Scene(order)
            await scene.hear(first)
            scene.now += 300
            await scene.hear(notice("d", 420, seen_s=300))
            assert await scene.leaving() == {"d"}
            heard_at, safe_by = scene.lead.asked[-1][1]["d"]
            assert heard_at == START_S + 300 and safe_by == near(START_S + 405)

    asyncio.run(run())


def test_an_earlier_deadline_replaces_the_known_one_and_a_later_one_does_not(order: JobOrder) -> None:
    async def run() -> None:
        scene = Scene(order)
        for ends_in_s, expected in ((80, 70), (40, 35), (120, 35)):
            await scene.hear(notice("d", ends_in_s))
            assert scene.lead.asked[-1][1]["d"] == (START_S, near(START_S + expected))

    asyncio.run(run())


def test_of_two_sources_the_one_that_names_the_earlier_end_counts_until_it_is_withdrawn(order: JobOrder) -> None:
    async def run() -> None:
        scene = Scene(order)
        await scene.hear(notice("d", 80))
        drain = notice("d", 45, seen_s=5, source="drain")
        await scene.hear(drain)
        assert scene.lead.asked[-1][1]["d"] == (START_S, near(START_S + 40))
        await scene.hear(withdrawn(drain))
        assert scene.lead.asked[-1][1]["d"] == (START_S, near(START_S + 70))

    asyncio.run(run())


def test_a_node_that_goes_before_the_handoff_that_brings_it_in_has_ended_tells_its_lead_at_once(
    order: JobOrder,
) -> None:
    async def run() -> None:
        scene = Scene(order, "e")
        scene.slots.world = None
        scene.order = order.model_copy(update={"roster": ACTIVE})
        await scene.hear(notice("e"))
        assert scene.peers.sent == []
        scene.slots.promised = SimpleNamespace(proposer_id="b", target=roster_of(2, (*FOUR, "e")))
        await scene.hear(notice("e", 50.0))
        assert [
            (envelope.receiver, cast(NoticeBody, envelope.body).notice.node_id) for _, envelope in scene.peers.sent
        ] == [("b", "e")]

    asyncio.run(run())


def test_whoever_was_told_of_a_notice_is_told_that_it_is_withdrawn(order: JobOrder) -> None:
    async def run() -> None:
        scene = Scene(order, "d")
        scene.peers.away = {"a"}
        await scene.hear(notice("d"))
        await asyncio.sleep(0)
        await scene.hear(withdrawn(notice("d")))
        told = [(envelope.receiver, cast(NoticeBody, envelope.body).notice) for _, envelope in scene.peers.sent]
        assert told == [("b", notice("d")), ("b", withdrawn(notice("d")))]

    asyncio.run(run())


def test_the_end_of_advice_is_told_to_nobody(order: JobOrder) -> None:
    async def run() -> None:
        scene = Scene(order, "d")
        await scene.hear(notice("d"))
        advice = notice("d").model_copy(update={"kind": NoticeKind.REBALANCE})
        await scene.hear(withdrawn(advice))
        assert scene.peers.tried == ["a"] and len(scene.peers.sent) == 1

    asyncio.run(run())


def test_news_of_a_nearer_deadline_is_forwarded_at_once_and_what_is_no_news_is_not(order: JobOrder) -> None:
    async def run() -> None:
        scene = Scene(order, "d")
        await scene.hear(notice("d", 80))
        scene.now += FORWARD_AGAIN_S / 4
        await scene.hear(notice("d", 80))
        assert len(scene.peers.sent) == 1
        await scene.hear(notice("d", 40))
        assert [cast(NoticeBody, envelope.body).notice for _, envelope in scene.peers.sent] == [
            notice("d", 80), notice("d", 40),
        ]  # fmt: skip

    asyncio.run(run())


def test_where_nothing_fits_agents_are_told_to_end_the_ranks_before_the_first_node_goes(order: JobOrder) -> None:
    async def run() -> None:
        scene = Scene(order)
        scene.lead.planner.finds = NoPlan("standing plan: 3 nodes stay, it needs 4")
        await scene.hear(notice("d", 60.0))
        await scene.hear(notice("c", 30.0))
        assert scene.alone.said[-1] == (
            {"c": utc(START_S + 30.0), "d": utc(START_S + 60.0)},
            "c, d will go, and standing plan: 3 nodes stay, it needs 4",
        )
        await scene.hear(withdrawn(notice("d", 60.0), 1.0))
        assert scene.alone.said[-1] is not None, "c still goes"
        await scene.hear(withdrawn(notice("c", 30.0), 1.0))
        assert scene.alone.said[-1] is None

    asyncio.run(run())


def test_where_every_node_goes_and_none_comes_any_of_them_tells_the_others(order: JobOrder) -> None:
    async def run() -> None:
        scene = Scene(order, "d")
        for name in FOUR:
            await scene.hear(notice(name))
        found = scene.alone.said[-1]
        assert found is not None and found[1] == "a, b, c, d will go, and every node goes, and none comes"

    asyncio.run(run())


def test_a_proposal_is_told_with_what_is_known_of_its_notices_and_of_its_end(order: JobOrder) -> None:
    async def run() -> None:
        scene = Scene(order)
        wanted = proposal(HandoffCause.NOTICE, "a", "b", "c", leaving=("d",))
        scene.order = order.model_copy(update={"handoff": wanted})
        await scene.response.consider(scene.order)
        assert (scene.lead.wanted[-1].is_heard, scene.lead.wanted[-1].has_ended) == (False, False)
        assert scene.lead.declined == [] and scene.lead.is_idle, "its notice has not come yet"
        await scene.hear(withdrawn(notice("d")))
        assert scene.lead.wanted[-1].is_heard
        assert scene.lead.declined == [(wanted.handoff_id, "no notice moves the job away from d any more")]
        for ended in (scene.slots.ended, scene.lead.told_late):
            ended.add(str(wanted.handoff_id))
            await scene.response.consider(scene.order)
            assert scene.lead.wanted[-1].has_ended
            ended.clear()

    asyncio.run(run())


def test_a_proposal_that_comes_after_the_last_moment_of_its_notice_is_declined(order: JobOrder) -> None:
    async def run() -> None:
        for after_s, is_declined in ((9.9, False), (10.1, True)):
            scene = Scene(order)
            scene.lead.planner.finds = Wait("the service is asked")
            await scene.hear(notice("d", -5.0))
            scene.now += after_s
            wanted = proposal(HandoffCause.NOTICE, "a", "b", "c", leaving=("d",))
            await scene.response.consider(order.model_copy(update={"handoff": wanted}))
            assert bool(scene.lead.declined) == is_declined

    asyncio.run(run())


def test_a_node_that_will_go_is_barred_until_its_notice_is_withdrawn(order: JobOrder) -> None:
    async def run() -> None:
        scene = Scene(order)
        await scene.hear(notice("e"))
        await scene.hear(notice("d"))
        _, known = scene.lead.known[-1]
        assert (known.barred, known.gets_no_rank) == ({"d", "e"}, {"e"})
        assert {loss.node_id for loss in known.losses} == {"d", "e"}, "the leader knows who is a member"
        await scene.hear(withdrawn(notice("e")))
        assert scene.lead.known[-1][1].barred == {"d"}

    asyncio.run(run())


def test_the_leader_hears_of_the_numbers_that_the_service_and_the_ranks_here_know_as_used(order: JobOrder) -> None:
    async def run() -> None:
        for next_generation, highest, used in ((2, 1, 1), (8, 1, 7), (2, 6, 6)):
            scene = Scene(order.model_copy(update={"next_generation": next_generation}))
            scene.slots.highest = highest
            await scene.hear(notice("d"))
            assert scene.lead.known[-1][1].used == used

    asyncio.run(run())


def test_who_is_told_of_a_withdrawal_is_not_asked_to_lead(order: JobOrder) -> None:
    async def run() -> None:
        scene = Scene(order, "b")
        await scene.hear(notice("c"))
        await scene.hear(withdrawn(notice("d")), asked_to_lead=True)
        assert scene.lead.is_idle, "a is first, and nobody said that it does not answer"
        await scene.hear(notice("c"), asked_to_lead=True)
        assert not scene.lead.is_idle

    asyncio.run(run())


def test_a_node_without_a_rank_knows_the_world_from_the_service_unless_its_own_newer_one_has_ended(
    order: JobOrder,
) -> None:
    """The service may be away and know nothing of generation 2, which agents suspended with a checkpoint."""

    async def scenario() -> None:
        for newest, knows in ((0, True), (1, True), (2, False)):
            scene = Scene(order, "e")
            scene.slots.world, scene.slots.newest = None, newest
            await scene.hear(notice("b"))
            assert bool(scene.lead.known) is knows, newest
        scene = Scene(order)
        scene.slots.world = None
        await scene.hear(notice("b"))
        assert scene.lead.known == [], "a has a rank in that world, and does not know yet where it stands"

    asyncio.run(scenario())


def test_the_pace_is_asked_for_where_the_leader_needs_it_and_only_there(order: JobOrder) -> None:
    async def scenario() -> None:
        scene = Scene(order)
        scene.pace.known = False
        await scene.response.consider(order)
        assert scene.pace.asked == 0
        await scene.hear(notice("d"))
        assert (scene.pace.asked, scene.lead.said, scene.lead.is_idle) == (1, [ASKS_PACE], True)
        scene.pace.known = True
        await scene.response.consider(order)
        assert not scene.lead.is_idle

    asyncio.run(scenario())


def test_agents_suspend_no_job_that_the_service_suspends_that_has_no_checkpoints_or_that_may_have_another_way(
    order: JobOrder,
) -> None:
    async def run() -> None:
        for changes, finds in (
            ({"suspends_utc": utc(START_S + 20.0)}, NoPlan("nothing fits")),
            ({"spec": order.spec.model_copy(update={"checkpoint": None})}, NoPlan("nothing fits")),
            ({}, Wait("the service is asked")),
        ):
            scene = Scene(order.model_copy(update=changes))
            scene.lead.planner.finds = finds
            await scene.hear(notice("d"))
            assert scene.lead.asked and scene.alone.said == [], (changes, finds)

    asyncio.run(run())
