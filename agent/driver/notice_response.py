"""Notices about the nodes of one job, and what this node does about them: lead, or see that somebody who stays leads.

The node that hears of its own end opens nothing. It tells the first staying peer that answers, and the next one when
nothing comes of it. The service learns of it in parallel, through sync. Whoever leads an open handoff answers every
notice that concerns it, also one for its own node or for a node that only comes with it: nobody else may.
"""

import asyncio
import logging
from collections.abc import Iterable
from datetime import datetime

from agent.driver.lead import Lead, Leaving
from agent.driver.node_context import Node
from agent.driver.pace import Pace
from agent.driver.participants import JobSlots
from agent.driver.planning import Intent, NoPlan, Turn, lead_candidates
from agent.link.lone_suspension import LoneSuspension
from agent.peer.peer_client import PeerUnreachable
from agent.protocol.notice_life import TAKES_THE_NODE, Notices, heard_until, moves_jobs
from agent.protocol.peer import NoticeBody
from agent.protocol.sync import HandoffOrder, JobOrder, NoticeFact
from agent.protocol.values import HandoffCause, utc
from liver_core.handoff.suspending import EndTimes
from liver_core.layout import Roster
from liver_core.layout.limits import listed

FORWARD_AGAIN_S, FORWARD_PATIENCE_S = 2.0, 5.0
"""How soon a notice is forwarded again, and how long one candidate is given to make something of it."""
LEAD_TURN_S = 3.0
IN_TOUCH_S = 2.0
"""Whoever was asked to lead by another node since then is not cut off."""
ASKS_PACE = "asking the nodes that train how long a step takes"
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
        self._asked_to_lead = False
        self._asked_at = float("-inf")
        self._forwarding: asyncio.Task[None] | None = None
        self._forwarded_at = float("-inf")
        self._skip: dict[str, float] = {}
        self._told: dict[str, float] = {}
        self._heard_of_us: set[str] = set()
        self._proposed_at: dict[str, float] = {}
        self._newest: Roster | None = None

    def take(self, fact: NoticeFact, *, asked_to_lead: bool) -> None:
        """Remember it. `asked_to_lead`: a peer says so because it is this node's turn. Advice moves nobody."""
        if fact.kind not in TAKES_THE_NODE:
            return
        if asked_to_lead and fact.withdrawn_utc is None:
            self._asked_to_lead, self._asked_at = True, self._node.now()
        notice = self._notices.take(fact)
        if notice is None:
            return
        if asked_to_lead and notice.withdrawn_utc is None and notice.node_id != self._node.node_id:
            # The agent that heard it may be gone before it reaches the service.
            self._node.outbox.put_notice(notice)
            self._node.sync_soon()
        self._forwarded_at = float("-inf")  # News is told at once.
        if notice.withdrawn_utc is not None:
            _log.info("job %s: %s stays, its notice by %s is withdrawn", self._job_id, fact.node_id, fact.source)
            self._tell_withdrawal(notice)
        elif moves_jobs(notice, utc(self._node.now())):
            when = "" if notice.deadline_utc is None else f" at {notice.deadline_utc:%H:%M:%S} UTC"
            _log.info("job %s: %s will go%s, heard by %s", self._job_id, fact.node_id, when, fact.source)

    async def consider(self, order: JobOrder) -> None:
        """What is due now, given what is known. Called after every notice and order, and about twice a second."""
        self._notices.drop_ended(utc(self._node.now()))
        active = self._world(order)
        if active is None:
            return
        self._tell_who_brings_us_in(active)
        leaving = self._leaving(active)
        candidates = lead_candidates(order, active, leaving)
        if leaving and candidates:
            await self._answer(order, active, leaving, candidates)
        elif leaving:
            await self._suspend_alone(order, active, leaving, "every node goes, and none comes")
        else:
            self._asked_to_lead = False
            await self._alone.call_off()
        if order.handoff is not None and order.handoff.parent == active.generation:
            await self._answer_proposal(order, order.handoff, active, candidates)

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

    async def _answer(
        self, order: JobOrder, active: Roster, leaving: dict[str, list[NoticeFact]], candidates: tuple[str, ...]
    ) -> None:
        own = self._node.node_id
        may_open = own in candidates and (self._asked_to_lead or candidates[0] == own)
        if may_open or not self._lead.is_idle:
            if self._slots.is_starting():
                return self._lead.wait(f"the world of generation {active.generation} has not made its first step yet")
            promised = self._slots.promised_order()
            if promised is not None and promised.proposer_id != own and self._lead.is_idle:
                return  # Somebody else leads a handoff here; a next one can only follow it.
            if self._lead.is_idle and not self._pace.is_known(active):
                return self._lead.wait(ASKS_PACE)
            place = candidates.index(own) if own in candidates else len(candidates)
            turn = Turn(place, in_touch=self._node.now() - self._asked_at <= IN_TOUCH_S)
            where = (order, active, self._moments(leaving))
            found = await self._lead.answer_loss(*where, barred=self._barred(active), turn=turn)
            if isinstance(found, NoPlan):
                await self._suspend_alone(order, active, leaving, found.reason)
            elif isinstance(found, Intent):
                await self._alone.call_off()
            return
        await self._forward(leaving, candidates)

    async def _suspend_alone(
        self, order: JobOrder, active: Roster, leaving: dict[str, list[NoticeFact]], why: str
    ) -> None:
        """Nothing fits without these nodes. Where the service is away agents suspend the job, if it can be saved."""
        if order.suspends_utc is not None or order.spec.checkpoint is None:
            return
        pulse = self._pace.pulse()
        times = EndTimes(pulse.median_step_s, pulse.save_s)
        text = f"{listed(sorted(leaving))} will go, and {why}"
        await self._alone.plan(active, {node: _earliest(facts) for node, facts in leaving.items()}, times, text)

    async def _forward(self, leaving: dict[str, list[NoticeFact]], candidates: tuple[str, ...]) -> None:
        """Tell the first candidate that answers, again and further down the order while nothing comes of it."""
        promised = self._slots.promised_order()
        if promised is not None and not set(promised.target.node_ids()) & set(leaving):
            return  # A handoff without all of them is under way.
        if self._node.node_id not in leaving:
            return  # Who hears of its own end tells it; what the service told, it has told the others too.
        self._tell([fact for found in leaving.values() for fact in found], candidates)

    def _tell(self, facts: list[NoticeFact], candidates: tuple[str, ...]) -> None:
        now = self._node.now()
        busy = self._forwarding is not None and not self._forwarding.done()
        if busy or now - self._forwarded_at < FORWARD_AGAIN_S:
            return
        self._forwarded_at = now
        self._forwarding = asyncio.create_task(self._tell_first(tuple(facts[:TOLD_MAX]), candidates))

    def _tell_who_brings_us_in(self, active: Roster) -> None:
        """This node goes before the handoff that brings it in has ended: its lead makes another plan."""
        own, promised = self._node.node_id, self._slots.promised_order()
        if promised is None or promised.proposer_id == own or own in active.node_ids():
            return
        ours = [fact for fact in self._notices.moving(utc(self._node.now())) if fact.node_id == own]
        if ours and own in promised.target.node_ids():
            self._tell(ours, (promised.proposer_id,))

    async def _tell_first(self, facts: tuple[NoticeFact, ...], candidates: tuple[str, ...]) -> None:
        now = self._node.now()
        ready = [name for name in candidates if self._is_worth_telling(name, now)]
        if not ready:
            self._skip.clear()
            self._told.clear()
        for name in ready or candidates:
            try:
                for fact in facts:
                    body = NoticeBody(notice=fact, step_s=self._pace.pulse().median_step_s)
                    await self._node.peers.send(self._node.envelope(self._job_id, name, body))
            except PeerUnreachable as error:
                _log.warning("job %s: %s cannot be told of the notice: %s", self._job_id, name, error)
                self._skip[name] = now + FORWARD_PATIENCE_S
                continue
            self._told.setdefault(name, now)
            self._heard_of_us.add(name)
            return

    def _is_worth_telling(self, name: str, now: float) -> bool:
        """Not if it was unreachable just now, nor if it was told a while ago and nothing came of it."""
        if self._skip.get(name, float("-inf")) > now:
            return False
        return now - self._told.get(name, now) <= FORWARD_PATIENCE_S

    def _tell_withdrawal(self, notice: NoticeFact) -> None:
        """Who was told that this node goes is told that it stays; everybody else hears it from the service."""
        if notice.node_id != self._node.node_id:
            return
        for name in sorted(self._heard_of_us):
            envelope = self._node.envelope(self._job_id, name, NoticeBody(notice=notice))
            subject = f"notice/{notice.kind}/{notice.source}"
            self._node.peers.send_newest(envelope, subject, attempts=WITHDRAWAL_ATTEMPTS)
        self._heard_of_us.clear()
        self._told.clear()

    async def _answer_proposal(
        self, order: JobOrder, wanted: HandoffOrder, active: Roster, candidates: tuple[str, ...]
    ) -> None:
        """The first agent of the order that is up opens it, or says why it does not; the others wait their turn."""
        own = self._node.node_id
        if own not in candidates or self._slots.is_bound() or self._slots.is_starting() or not self._lead.is_idle:
            return
        going = self._leaving(active).keys()
        is_answered = wanted.cause is HandoffCause.NOTICE and not going & set(wanted.leaving)
        if is_answered and not {fact.node_id for fact in self._notices.all()} & set(wanted.leaving):
            return  # Its notices have not come yet.
        key = str(wanted.handoff_id)
        if self._slots.has_ended(key):
            return  # Another agent has tried; the service will hear of it, and propose again if it still wants that.
        since = self._proposed_at.setdefault(key, self._node.now())
        while len(self._proposed_at) > 64:
            del self._proposed_at[next(iter(self._proposed_at))]
        if not self._pace.is_known(active):
            return self._lead.wait(ASKS_PACE)
        turn = candidates.index(own)
        if self._node.now() - since < turn * LEAD_TURN_S:
            return
        if is_answered:
            self._lead.decline(wanted, f"no notice moves the job away from {listed(sorted(wanted.leaving))} any more")
        elif barred := self._barred(active) & set(wanted.target.node_ids()):
            self._lead.decline(wanted, f"{listed(sorted(barred))} will go")
        else:
            await self._lead.answer_proposal(order, active, wanted, Turn(turn))

    def _leaving(self, active: Roster) -> dict[str, list[NoticeFact]]:
        """Members that will go, also those that the handoff led here brings in, each with the notices that say so."""
        members = {*active.node_ids(), *self._lead.coming}
        found: dict[str, list[NoticeFact]] = {}
        for fact in self._notices.moving(utc(self._node.now())):
            if fact.node_id in members:
                found.setdefault(fact.node_id, []).append(fact)
        return found

    def _barred(self, active: Roster) -> frozenset[str]:
        """Nodes that must not get a rank which they do not have yet."""
        return self._notices.barred(utc(self._node.now())) - set(active.node_ids())

    def _moments(self, leaving: dict[str, list[NoticeFact]]) -> Leaving:
        """When each was heard first, and by when the node's state must be elsewhere. A node whose time has run out is
        left behind too, but does not take their time from the others. Where all have only what is reserved for delays,
        that is used, and then the time for which a machine may go late: a loss is certain without it."""
        now, budget = self._node.now(), self._node.budget
        found: Leaving = {}
        ends: list[float] = []
        latest: list[float] = []
        for name, facts in leaving.items():
            heard_at = min(fact.first_seen_utc for fact in facts)
            safe_by = min(budget.safe_by_utc(fact.first_seen_utc, fact.deadline_utc) for fact in facts)
            found[name] = (heard_at.timestamp(), safe_by.timestamp())
            ends.append(min(budget.node_gone_utc(fact.first_seen_utc, fact.deadline_utc) for fact in facts).timestamp())
            latest.append(min(map(heard_until, facts)).timestamp())
        safe = (safe_by for _, safe_by in found.values())
        in_time = _next_of(safe, now) or _next_of(ends, now) or _next_of(latest, now)
        if in_time is None:
            return found
        return {name: (heard, safe_by if safe_by > now else in_time) for name, (heard, safe_by) in found.items()}


def _next_of(times: Iterable[float], now: float) -> float | None:
    """The first that is not past, seconds since 1970."""
    return min((at for at in times if at > now), default=None)


def _earliest(facts: list[NoticeFact]) -> datetime | None:
    """By when a node goes; None where one of its notices names no time."""
    deadlines = [fact.deadline_utc for fact in facts]
    return None if None in deadlines else min(at for at in deadlines if at is not None)
