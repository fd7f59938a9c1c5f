"""Notices about the nodes of one job, and what this node does about them: lead, or see that somebody who stays leads.

The node that hears of its own end cannot lead. It tells the first staying peer that answers, and the next one when
nothing comes of it. The service learns of it in parallel, through sync.
"""

import asyncio
import logging

from agent.driver.lead import Lead
from agent.driver.node_context import Node
from agent.driver.participants import JobSlots
from agent.driver.planning import lead_candidates
from agent.peer.peer_client import PeerUnreachable
from agent.protocol.peer import NoticeBody
from agent.protocol.sync import JobOrder, NoticeFact, NoticeKind
from liver_core.layout import Roster

FORWARD_AGAIN_S, FORWARD_PATIENCE_S = 2.0, 5.0
"""How soon a notice is forwarded again, and how long one candidate is given to make something of it."""
LEAD_TURN_S = 3.0
KNOWN_MAX = 10_000
TOLD_MAX = 64
_log = logging.getLogger(__name__)


class Rumours:
    """Of one job."""

    def __init__(self, node: Node, job_id: str, slots: JobSlots, lead: Lead) -> None:
        self._node = node
        self._job_id = job_id
        self._slots = slots
        self._lead = lead
        self._notices: dict[str, NoticeFact] = {}
        self._asked_to_lead = False
        self._forwarding: asyncio.Task[None] | None = None
        self._forwarded_at = float("-inf")
        self._skip: dict[str, float] = {}
        self._told: dict[str, float] = {}
        self._proposed_at: dict[str, float] = {}

    async def take(self, fact: NoticeFact, *, asked_to_lead: bool) -> None:
        """Remember it; the earliest deadline counts. Advice such as a rebalance recommendation moves nobody."""
        if fact.kind not in (NoticeKind.INTERRUPTION, NoticeKind.MAINTENANCE):
            return
        self._asked_to_lead = self._asked_to_lead or asked_to_lead
        known = self._notices.get(fact.node_id)
        if known is None or _is_earlier(fact, known):
            if known is None and len(self._notices) < KNOWN_MAX:
                _log.info("job %s: %s will go, heard by %s", self._job_id, fact.node_id, fact.source)
            self._notices[fact.node_id] = fact

    async def consider(self, order: JobOrder) -> None:
        """What is due now, given what is known. Called after every notice and order, and about twice a second."""
        active = self._slots.active()
        if active is None:
            return
        leaving = self._leaving(active)
        candidates = lead_candidates(order, active, leaving)
        if leaving and candidates:
            await self._answer(order, active, leaving, candidates)
        if not leaving:
            self._asked_to_lead = False
        self._forget_served(order, active)
        if order.handoff is not None and order.handoff.parent == active.generation:
            await self._answer_proposal(order, active, candidates)

    async def close(self) -> None:
        """Stop telling others."""
        if self._forwarding is not None:
            self._forwarding.cancel()
            await asyncio.gather(self._forwarding, return_exceptions=True)

    async def _answer(
        self, order: JobOrder, active: Roster, leaving: dict[str, NoticeFact], candidates: tuple[str, ...]
    ) -> None:
        own = self._node.node_id
        if own in candidates and (self._asked_to_lead or candidates[0] == own):
            promised = self._slots.promised_order()
            if promised is not None and promised.proposer_id != own and self._lead.is_idle:
                return  # Somebody else leads a handoff here; a next one can only follow it.
            await self._lead.answer_loss(order, active, {name: self._moments(fact) for name, fact in leaving.items()})
            return
        await self._forward(active, leaving, candidates)

    async def _forward(self, active: Roster, leaving: dict[str, NoticeFact], candidates: tuple[str, ...]) -> None:
        """Tell the first candidate that answers, again and further down the order while nothing comes of it."""
        now = self._node.now()
        busy = self._forwarding is not None and not self._forwarding.done()
        if busy or now - self._forwarded_at < FORWARD_AGAIN_S:
            return
        promised = self._slots.promised_order()
        if promised is not None and not set(promised.target.node_ids()) & set(leaving):
            return  # A handoff without all of them is under way.
        if self._node.node_id not in leaving:
            return  # Who hears of its own end tells it; what the service told, it has told the others too.
        self._forwarded_at = now
        self._forwarding = asyncio.create_task(self._tell_first(tuple(leaving.values())[:TOLD_MAX], candidates))

    async def _tell_first(self, facts: tuple[NoticeFact, ...], candidates: tuple[str, ...]) -> None:
        now = self._node.now()
        ready = [name for name in candidates if self._is_worth_telling(name, now)]
        if not ready:
            self._skip.clear()
            self._told.clear()
        for name in ready or candidates:
            try:
                for fact in facts:
                    await self._node.peers.send(self._node.envelope(self._job_id, name, NoticeBody(notice=fact)))
            except PeerUnreachable as error:
                _log.warning("job %s: %s cannot be told of the notice: %s", self._job_id, name, error)
                self._skip[name] = now + FORWARD_PATIENCE_S
                continue
            self._told.setdefault(name, now)
            return

    def _is_worth_telling(self, name: str, now: float) -> bool:
        """Not if it was unreachable just now, nor if it was told a while ago and nothing came of it."""
        if self._skip.get(name, float("-inf")) > now:
            return False
        return now - self._told.get(name, now) <= FORWARD_PATIENCE_S

    async def _answer_proposal(self, order: JobOrder, active: Roster, candidates: tuple[str, ...]) -> None:
        """The first agent of the order that is up opens it; the others wait their turn."""
        wanted, own = order.handoff, self._node.node_id
        if wanted is None or own not in candidates or self._slots.is_bound() or not self._lead.is_idle:
            return
        key = str(wanted.handoff_id)
        since = self._proposed_at.setdefault(key, self._node.now())
        while len(self._proposed_at) > 64:
            del self._proposed_at[next(iter(self._proposed_at))]
        turn = candidates.index(own)
        if self._node.now() - since >= turn * LEAD_TURN_S:
            await self._lead.answer_proposal(order, active, wanted)

    def _leaving(self, active: Roster) -> dict[str, NoticeFact]:
        members = set(active.node_ids())
        return {name: fact for name, fact in self._notices.items() if name in members}

    def _moments(self, fact: NoticeFact) -> tuple[float, float]:
        """When it was heard, and by when the node's state must be elsewhere."""
        safe_by = self._node.budget.safe_by_utc(fact.first_seen_utc, fact.deadline_utc)
        return fact.first_seen_utc.timestamp(), safe_by.timestamp()

    def _forget_served(self, order: JobOrder, active: Roster) -> None:
        """A notice about a node that is no member any more has been answered; the service may bring it again."""
        told = {fact.node_id for fact in order.notices}
        for name in tuple(self._notices):
            if name not in active.node_ids() and name not in told and name != self._node.node_id:
                del self._notices[name]


def _is_earlier(fact: NoticeFact, known: NoticeFact) -> bool:
    if fact.deadline_utc is None:
        return False
    return known.deadline_utc is None or fact.deadline_utc < known.deadline_utc
