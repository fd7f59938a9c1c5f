"""What one node's agent decides when it leads handoffs of a job: who leads, when again, amend or supersede.

Pure, sans-IO: `handle(event, now)` returns the effects to carry out, in order; `now` is seconds since 1970, UTC. It
owns the proposer of the job on this node. Its rules are in `README.md`.
"""

from collections.abc import Callable
from typing import assert_never

from liver_core.handoff.forwarding import Forwarding
from liver_core.handoff.leader_events import (
    NOTICE,
    AskedToLead,
    AskPace,
    CallOffSuspension,
    Decline,
    Forwarded,
    HandoffWanted,
    LeaderEffect,
    LeaderEvent,
    Loss,
    LossesKnown,
    NoPlan,
    OwnNoticeWithdrawn,
    PeersAnswered,
    PeersUnreachable,
    Plan,
    Planner,
    Say,
    StoreDied,
    StoreFailed,
    StoreReady,
    SuspendAlone,
    WorldStarted,
    with_time_left,
)
from liver_core.handoff.messages import HandoffId, Tick
from liver_core.handoff.own_handoffs import Led, Losses, OwnHandoffs
from liver_core.handoff.proposer_events import Cancel, ProposerRecord, ReportReceived
from liver_core.layout.limits import listed

LEAD_TURN_S, IN_TOUCH_S = 3.0, 2.0
"""How long each candidate leaves a proposal of the service to the one before it; and since when whoever was asked to
lead by another node is not cut off."""
ASKS_PACE = "asking the nodes that train how long a step takes"
PROPOSED_MAX = 64
"""So many proposals of the service are remembered, each with when it was heard of."""

Effects = tuple[LeaderEffect, ...]


class Leader:
    """Of one job on node `node_id`. `new_id` names a handoff. `record`: the journalled one after a restart, `led` what
    was kept of the handoff that it has open; `agent_incarnation` grows with every start of the host."""

    def __init__(
        self,
        *,
        job_id: str,
        node_id: str,
        agent_incarnation: int,
        planner: Planner,
        new_id: Callable[[], str],
        record: ProposerRecord | None = None,
        led: Led | None = None,
    ) -> None:
        self.node_id, self.planner = node_id, planner
        self.own = OwnHandoffs(
            job_id=job_id,
            node_id=node_id,
            agent_incarnation=agent_incarnation,
            planner=planner,
            new_id=new_id,
            record=record or ProposerRecord(),
            led=led,
        )
        self._known: LossesKnown | None = None
        self._forwarding = Forwarding()
        self._asked_to_lead = self._asked_anew = False
        self._asked_at = float("-inf")
        self._proposed_at: dict[str, float] = {}
        self._declined = ""

    @property
    def next_deadline(self) -> float:
        """When what is put off is due: the latest time for the next LossesKnown. Infinite where nothing is."""
        return self.own.next_deadline if self.own.is_idle else float("inf")

    def handle(self, event: LeaderEvent, now: float) -> Effects:
        """Take one event."""
        match event:
            case LossesKnown():
                return self._on_losses(event, now)
            case HandoffWanted():
                return self._on_wanted(event, now)
            case AskedToLead():
                self._asked_to_lead, self._asked_anew, self._asked_at = True, True, now
                return ()
            case OwnNoticeWithdrawn():
                return self._forwarding.take_withdrawal()
            case Forwarded():
                self._forwarding.take(event)
                return ()
            case PeersAnswered():
                return self.own.take_answers(event)
            case StoreReady(generation=generation, store=store):
                return self.own.take_store(generation, store, now)
            case StoreFailed(generation=generation, reason=reason):
                return self.own.take_store_failure(generation, reason)
            case StoreDied(generation=generation):
                return self.own.take_store_death(generation, now)
            case WorldStarted(generation=generation):
                return self.own.take_start(generation, now)
            case PeersUnreachable(since=since):
                return self.own.take_unreachable(since, now)
            case Cancel(reason=reason):
                return self.own.cancel(reason, now)
            case ReportReceived() | Tick():
                return self.own.feed(event, now)
            case _:
                assert_never(event)

    def _on_losses(self, known: LossesKnown, now: float) -> Effects:
        in_this_world = self._known is None or self._known.world.generation == known.world.generation
        self._asked_to_lead = self._asked_to_lead and (in_this_world or self._asked_anew)
        if self._known is not None and self._known.promised is not None and known.promised is None:
            self._forwarding.begin_anew()
        self._known, self._asked_anew = known, False
        if known.news:
            self._forwarding.take_news()
        told = self._tell_who_brings_us_in(known, now)
        losses = self._losses_of_members(known, now)
        if not losses:
            self._asked_to_lead = False
            return (*told, CallOffSuspension())
        candidates = self.planner.candidates(known.world, losses)
        answered = self._answer(known, losses, candidates, now) if candidates or not self.own.is_idle else ()
        if not candidates and not self.own.answers(losses):
            answered = (*answered, *self._suspend(known, losses, "every node goes, and none comes"))
        return (*told, *answered)

    def _losses_of_members(self, known: LossesKnown, now: float) -> dict[str, Loss]:
        """Those that the job has to do something about, each with the time that it leaves."""
        members = {*known.world.node_ids(), *self.own.coming}
        return with_time_left((loss for loss in known.losses if loss.node_id in members), now)

    def _answer(self, known: LossesKnown, losses: Losses, candidates: tuple[str, ...], now: float) -> Effects:
        """Open or amend a handoff where that is this node's to do, else see that somebody does."""
        own = self.node_id
        may_open = own in candidates and (self._asked_to_lead or candidates[0] == own)
        if not may_open and self.own.is_idle:
            return self._forward(known, losses, candidates, now)
        if known.is_starting:
            return (Say(f"the world of generation {known.world.generation} has not made its first step yet"),)
        if self.own.is_idle and known.promised is not None and known.promised.proposer_id != own:
            return ()  # Somebody else leads a handoff here; a next one can only follow it.
        if self.own.is_idle and not known.knows_pace:
            return (AskPace(known.world), Say(ASKS_PACE))
        place = candidates.index(own) if own in candidates else len(candidates)
        in_touch = now - self._asked_at <= IN_TOUCH_S
        effects, found = self.own.answer(known, losses, now, place=place, in_touch=in_touch)
        if isinstance(found, NoPlan):
            return (*effects, *self._suspend(known, losses, found.reason))
        return (*effects, CallOffSuspension()) if isinstance(found, Plan) else effects

    def _suspend(self, known: LossesKnown, losses: Losses, why: str) -> Effects:
        """Nothing fits without these nodes."""
        text = f"{listed(sorted(losses))} will go, and {why}"
        return (SuspendAlone(known.world, frozenset(losses), text),) if known.may_suspend else ()

    # Who is told.

    def _tell_who_brings_us_in(self, known: LossesKnown, now: float) -> Effects:
        """This node goes before the handoff that brings it in has ended: its lead makes another plan."""
        own, promised = self.node_id, known.promised
        if promised is None or promised.proposer_id == own or own in known.world.node_ids():
            return ()
        goes = any(loss.node_id == own for loss in known.losses)
        return self._forwarding.tell((promised.proposer_id,), {own}, now) if goes and own in promised.target else ()

    def _forward(self, known: LossesKnown, losses: Losses, candidates: tuple[str, ...], now: float) -> Effects:
        """Tell the first candidate that answers, again and further down the order while nothing comes of it."""
        if known.promised is not None and not known.promised.target & set(losses):
            return ()  # A handoff without all of them is under way.
        if self.node_id not in losses:
            return ()  # Who hears of its own end tells it; what the service told, it has told the others too.
        return self._forwarding.tell(candidates, losses, now)

    # What the service proposes.

    def _on_wanted(self, wanted: HandoffWanted, now: float) -> Effects:
        """The first agent of the order that is up opens it, or says why it does not; the others wait their turn."""
        known, own = self._known, self.node_id
        if known is None or wanted.parent != known.world.generation or known.promised is not None or known.is_starting:
            return ()
        losses = self._losses_of_members(known, now)
        candidates = self.planner.candidates(known.world, losses)
        if own not in candidates or not self.own.is_idle or self.own.knows(wanted.handoff_id) or wanted.has_ended:
            return ()  # Where another agent has tried it, the service will hear of that.
        is_answered = wanted.cause == NOTICE and not wanted.leaving & set(losses)
        if is_answered and not wanted.is_heard:
            return ()  # Its notices have not come yet.
        since = self._proposed_at.setdefault(wanted.handoff_id, now)
        while len(self._proposed_at) > PROPOSED_MAX:
            del self._proposed_at[next(iter(self._proposed_at))]
        if not known.knows_pace:
            return (AskPace(known.world), Say(ASKS_PACE))
        place = candidates.index(own)
        if now - since < place * LEAD_TURN_S:
            return ()
        barred = known.gets_no_rank & {member.node_id for member in wanted.plan.members}
        if is_answered:
            leaving = listed(sorted(wanted.leaving))
            return self._decline(wanted, f"no notice moves the job away from {leaving} any more")
        if barred:
            return self._decline(wanted, f"{listed(sorted(barred))} will go")
        if wanted.handoff_id == self._declined:
            return ()
        effects, refusal = self.own.propose(wanted, known, now, place=place)
        return (*effects, *self._decline(wanted, refusal)) if refusal else effects

    def _decline(self, wanted: HandoffWanted, refusal: str) -> Effects:
        """Once."""
        if wanted.handoff_id == self._declined:
            return ()
        self._declined = wanted.handoff_id
        return (Decline(HandoffId(wanted.handoff_id), refusal),)
