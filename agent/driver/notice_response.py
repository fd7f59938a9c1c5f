"""Notices about the nodes of one job: what is known of them goes to the leader, and what that decides is carried out.

The service learns of the notices of this node in parallel, through sync.
"""

import asyncio
import logging
from collections.abc import Iterable
from dataclasses import replace
from datetime import datetime
from typing import assert_never

from agent.driver.lead import Lead
from agent.driver.node_context import Node
from agent.driver.pace import Pace
from agent.driver.participants import JobSlots
from agent.driver.planning import lead_candidates, wanted_of
from agent.link.lone_suspension import LoneSuspension
from agent.peer.peer_client import PeerUnreachable
from agent.protocol.notice_life import TAKES_THE_NODE, Notices, heard_until, moves_jobs
from agent.protocol.peer import NoticeBody
from agent.protocol.sync import HandoffOrder, JobOrder, NoticeFact
from agent.protocol.values import utc
from liver_core.handoff.leader_events import (
    AskedToLead,
    AskPace,
    CallOffSuspension,
    Forwarded,
    ForwardNotices,
    HandoffWanted,
    Loss,
    LossesKnown,
    NoticeEffect,
    OwnNoticeWithdrawn,
    Promised,
    SuspendAlone,
    TellWithdrawal,
)
from liver_core.handoff.suspending import EndTimes
from liver_core.layout import Roster

TOLD_MAX = 64
WITHDRAWAL_ATTEMPTS = 3
_log = logging.getLogger(__name__)


class NoticeResponse:
    """Of one job. Which notices count, and until when, is decided in `agent.protocol.notice_life`. `pace`: how the job
    steps; `alone`: ends its ranks where nothing else is left and the service is away."""

    def __init__(self, node: Node, job_id: str, slots: JobSlots, lead: Lead, alone: LoneSuspension, pace: Pace) -> None:
        self._node = node
        self._job_id = job_id
        self._slots = slots
        self._lead = lead
        self._alone = alone
        self._pace = pace
        self._notices = Notices()
        self._is_news = False
        self._forwarding: asyncio.Task[None] | None = None
        self._newest: Roster | None = None

    def take(self, fact: NoticeFact, *, asked_to_lead: bool) -> None:
        """Remember it. `asked_to_lead`: a peer says so because it is this node's turn. Advice moves nobody."""
        if fact.kind not in TAKES_THE_NODE:
            return
        if asked_to_lead and fact.withdrawn_utc is None:
            self._lead.note(AskedToLead())
        notice = self._notices.take(fact)
        if notice is None:
            return
        if asked_to_lead and notice.withdrawn_utc is None and notice.node_id != self._node.node_id:
            # The agent that heard it may be gone before it reaches the service.
            self._node.outbox.put_notice(notice)
            self._node.sync_soon()
        self._is_news = True
        if notice.withdrawn_utc is not None:
            _log.info("job %s: %s stays, its notice by %s is withdrawn", self._job_id, fact.node_id, fact.source)
            if notice.node_id == self._node.node_id:
                self._tell_withdrawal(notice, self._lead.note(OwnNoticeWithdrawn()))
        elif moves_jobs(notice, utc(self._node.now())):
            when = "" if notice.deadline_utc is None else f" at {notice.deadline_utc:%H:%M:%S} UTC"
            _log.info("job %s: %s will go%s, heard by %s", self._job_id, fact.node_id, when, fact.source)

    async def consider(self, order: JobOrder) -> None:
        """What is due now, given what is known. Called after every notice and order, and about twice a second."""
        self._notices.drop_ended(utc(self._node.now()))
        active = self._world(order)
        if active is None:
            return
        known, self._is_news = self._known(order, active), False
        await self._carry_out(order, await self._lead.hear(order, known))
        if order.handoff is not None:
            await self._carry_out(order, await self._lead.hear(order, self._wanted(order, order.handoff)))

    def _world(self, order: JobOrder) -> Roster | None:
        """The job's world. A node without a rank in it knows it from the service: where every member goes, it leads.
        One whose own newer world has ended knows of none."""
        active, told = self._slots.active(), order.roster
        if active is None and told is not None and self._node.node_id not in told.node_ids():
            return told if self._slots.newest_world() <= told.generation else None
        return active

    def who_stays(self, order: JobOrder) -> tuple[tuple[str, ...], bool]:
        """The nodes of the newest world that is known here, but for those that will go, the first to lead first; and
        whether this node will go."""
        promised = self._slots.promised_order()
        self._newest = promised.target if promised is not None else self._slots.active() or self._newest or order.roster
        going = {fact.node_id for fact in self._notices.moving(utc(self._node.now()))}
        nodes = () if self._newest is None else lead_candidates(order, self._newest, going)
        return nodes, self._node.node_id in going

    async def close(self) -> None:
        """Stop telling others."""
        if self._forwarding is not None:
            self._forwarding.cancel()
            await asyncio.gather(self._forwarding, return_exceptions=True)

    def _known(self, order: JobOrder, active: Roster) -> LossesKnown:
        """All that the leader has to know now."""
        now, promised = utc(self._node.now()), self._slots.binding_order()
        moving: dict[str, list[NoticeFact]] = {}
        for fact in self._notices.moving(now):
            moving.setdefault(fact.node_id, []).append(fact)
        return LossesKnown(
            world=active,
            losses=tuple(self._loss(name, facts) for name, facts in moving.items()),
            barred=self._notices.barred(now),
            promised=promised and Promised(promised.proposer_id, frozenset(promised.target.node_ids())),
            is_starting=self._slots.is_starting(),
            knows_pace=self._pace.knows(active),
            may_suspend=order.suspends_utc is None and order.spec.checkpoint is not None,
            used=max(order.next_generation - 1, self._slots.highest_generation()),
            news=self._is_news,
        )

    def _loss(self, name: str, facts: list[NoticeFact]) -> Loss:
        """When it was heard first, and what its notices leave of time."""
        budget = self._node.budget
        return Loss(
            name,
            heard_at=min(fact.first_seen_utc for fact in facts).timestamp(),
            safe_by=min(budget.safe_by_utc(fact.first_seen_utc, fact.deadline_utc) for fact in facts).timestamp(),
            ends_at=min(budget.node_gone_utc(fact.first_seen_utc, fact.deadline_utc) for fact in facts).timestamp(),
            late_until=min(map(heard_until, facts)).timestamp(),
        )

    def _wanted(self, order: JobOrder, wanted: HandoffOrder) -> HandoffWanted:
        """What the service proposes, and what is known of it here."""
        found = wanted_of(wanted, order.notices, now=self._node.now(), budget=self._node.budget)
        is_heard = bool({fact.node_id for fact in self._notices.all()} & found.leaving)
        told_late = self._lead.mirrors.has_told_late(found.handoff_id)
        return replace(found, is_heard=is_heard, has_ended=told_late or self._slots.has_ended(found.handoff_id))

    async def _carry_out(self, order: JobOrder, effects: Iterable[NoticeEffect]) -> None:
        for effect in effects:
            match effect:
                case ForwardNotices(to=to, about=about):
                    facts = [fact for fact in self._notices.moving(utc(self._node.now())) if fact.node_id in about]
                    self._forwarding = asyncio.create_task(self._tell_first(tuple(facts[:TOLD_MAX]), to))
                case SuspendAlone(world=world, leaving=leaving, reason=reason):
                    await self._suspend_alone(world, leaving, reason)
                case CallOffSuspension():
                    await self._alone.call_off()
                case AskPace(world=world):
                    self._pace.is_known(world)
                case TellWithdrawal():
                    pass  # It is told where the notice is withdrawn.
                case _:
                    assert_never(effect)

    async def _suspend_alone(self, world: Roster, leaving: frozenset[str], why: str) -> None:
        pulse = self._pace.pulse()
        facts = self._notices.moving(utc(self._node.now()))
        going = {name: _earliest([fact for fact in facts if fact.node_id == name]) for name in sorted(leaving)}
        await self._alone.plan(world, going, EndTimes(pulse.median_step_s, pulse.save_s), why)

    async def _tell_first(self, facts: tuple[NoticeFact, ...], candidates: tuple[str, ...]) -> None:
        told, missed = "", list[str]()
        try:
            for name in candidates:
                try:
                    for fact in facts:
                        body = NoticeBody(notice=fact, step_s=self._pace.pulse().median_step_s)
                        await self._node.peers.send(self._node.envelope(self._job_id, name, body))
                except PeerUnreachable as error:
                    _log.warning("job %s: %s cannot be told of the notice: %s", self._job_id, name, error)
                    missed.append(name)
                    continue
                told = name
                return
        finally:
            self._lead.note(Forwarded(told, tuple(missed)))

    def _tell_withdrawal(self, notice: NoticeFact, effects: Iterable[NoticeEffect]) -> None:
        """Everybody who was not told that this node goes hears it from the service."""
        for name in (name for effect in effects if isinstance(effect, TellWithdrawal) for name in effect.to):
            envelope = self._node.envelope(self._job_id, name, NoticeBody(notice=notice))
            subject = f"notice/{notice.kind}/{notice.source}"
            self._node.peers.send_newest(envelope, subject, attempts=WITHDRAWAL_ATTEMPTS)


def _earliest(facts: list[NoticeFact]) -> datetime | None:
    """By when a node goes; None where one of its notices names no time."""
    deadlines = [fact.deadline_utc for fact in facts]
    return None if None in deadlines else min(at for at in deadlines if at is not None)
