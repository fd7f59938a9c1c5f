"""The agent of one node of a replay, as far as it leads: the product's leader, and what it lets happen. Pure."""

from collections.abc import Iterable
from typing import Protocol, assert_never

from liver_core.handoff import Proposal, StoreAddress
from liver_core.handoff.leader import Leader
from liver_core.handoff.leader_events import (
    AskPace,
    AskPeers,
    CallOffSuspension,
    Decline,
    Forwarded,
    ForwardNotices,
    HandoffAmended,
    HandoffOpened,
    HandoffSuperseded,
    LeaderEffect,
    LeaderEvent,
    NoPlan,
    PeersAnswered,
    PeersUnreachable,
    Plan,
    RungBasis,
    Say,
    StartStore,
    StoreReady,
    SuspendAlone,
    TellWithdrawal,
    Wait,
)
from liver_core.handoff.own_handoffs import FENCED_LOST_S
from liver_core.handoff.proposer_events import HandoffEnded, PersistProposal, Refused, SendOrder, Tick
from liver_core.layout import Roster
from service.simulation.machines.enacted import handoff_id_of
from service.simulation.machines.meeting import Meeting
from service.simulation.machines.played_handoff import PlayedHandoff
from service.simulation.machines.played_job import PlayedJob
from service.simulation.replay_ledger import JOB

LOOK_AGAIN_S = 2.0
"""For nodes that are lost by now: whole times of it after a node was missed, and a moment."""
TICK_S, LATE_S = 10.0, 0.05
"""No message is lost, so that nothing has to be sent again each second; deadlines are looked at when they are due."""
STORE = StoreAddress("replay", 1)


class PlayedPlans:
    """The policy, as a leader asks it."""

    def __init__(self, ground: Meeting) -> None:
        self._ground = ground

    def candidates(self, source: Roster, leaving: Iterable[str]) -> tuple[str, ...]:
        """By rank; where every member goes, the nodes that come."""
        gone = set(leaving)
        staying = tuple(name for name in source.node_ids() if name not in gone)
        if staying:
            return staying
        target = self._ground.facts.plan().decision.target
        return () if target is None else tuple(name for name in target.node_ids() if name not in gone)

    def plan(
        self, source: Roster, leaving: frozenset[str], *, barred: frozenset[str], left_s: float, waited_s: float
    ) -> Plan | Wait | NoPlan:
        """What the policy wants at this moment. It knows the notices itself."""
        planned = self._ground.facts.plan()
        target, layout = planned.decision.target, planned.layout
        if target is None or layout is None:
            return NoPlan(planned.decision.reason)
        return Plan(target.layout, target.members, self._ground.digest_of(layout), planned.decision.reason)

    def ladder(self, wanted: Proposal, leaving: frozenset[str], left_s: float | None) -> RungBasis:
        """What an agent would tell its ladder."""
        target = tuple(dict.fromkeys(member.node_id for member in wanted.members))
        return RungBasis(self._ground.ladder(wanted.source.node_ids(), target, left_s))


class Others(Protocol):
    """What an agent that leads has others hear."""

    def is_over(self, agent: "PlayedAgent", handoff: PlayedHandoff, ended: HandoffEnded) -> None:
        """The handoff has ended."""
        ...

    def tell(self, agent: "PlayedAgent", notices: ForwardNotices) -> None:
        """A node that goes tells others."""
        ...

    def refuses(self, reason: str) -> None:
        """No handoff is opened."""
        ...


class PlayedAgent:
    """`handoff`: what it has open. Agents of a replay do not die alone, so that nothing is read back from a journal."""

    def __init__(self, ground: Meeting, job: PlayedJob, name: str, others: Others) -> None:
        self.name, self.is_gone = name, False
        self.handoff: PlayedHandoff | None = None
        self.leader = Leader(
            job_id=JOB,
            node_id=name,
            agent_incarnation=1,
            planner=PlayedPlans(ground),
            new_id=lambda: handoff_id_of(job.next_id()),
        )
        self._ground, self._job, self._others = ground, job, others
        self._refused = ""

    def hear(self, event: LeaderEvent) -> None:
        """One event, unless the node is gone."""
        if self.is_gone:
            return
        for effect in self.leader.handle(event, self._ground.time.now):
            self._carry_out(effect)

    def misses(self, name: str) -> None:
        """A node is not reached. After a while it counts as lost, at a time at which that may be said."""
        if self.handoff is not None:
            self.handoff.missed[name] = self._ground.time.now
            self._ground.time.after(FENCED_LOST_S + LATE_S, self._look_for_lost, self.handoff)

    def take_forwarded(self, told: str, missed: tuple[str, ...]) -> None:
        """What became of the notices that it forwarded."""
        self.hear(Forwarded(told, missed))

    def _carry_out(self, effect: LeaderEffect) -> None:
        match effect:
            case AskPeers(generation=generation):
                self.hear(PeersAnswered(generation))
            case StartStore(generation=generation):
                self.hear(StoreReady(generation, STORE))
            case HandoffOpened(generation=generation):
                self._opens(generation)
            case HandoffAmended():
                pass  # The record that follows says what has changed.
            case HandoffSuperseded():
                if self.handoff is not None:
                    self.handoff.superseded = True
            case PersistProposal(record=record):
                if self.handoff is not None and record.proposal is not None:
                    self._keeps(self.handoff)
                    self.handoff.take(record)
                self._job.handoff_changed()
            case SendOrder(member=member, order=order):
                self._ground.send_order(member, order)
            case HandoffEnded():
                handoff, self.handoff = self.handoff, None
                assert handoff is not None, "it was open"
                self._others.is_over(self, handoff, effect)
            case Decline(reason=reason):
                self._job.declined(reason)
            case Say(text=text, about=about):
                # What can be opened is said as well, but is about nothing in particular.
                if about and about != self._refused:
                    self._others.refuses(text)
                self._refused = about
            case ForwardNotices():
                self._others.tell(self, effect)
            case Refused() | TellWithdrawal() | CallOffSuspension() | SuspendAlone() | AskPace():
                pass  # What is too late to be amended or ended is answered by the next handoff. The service suspends.
            case _:
                assert_never(effect)

    def _opens(self, generation: int) -> None:
        handoff = self.handoff = PlayedHandoff(self._ground, self.leader.own)
        self._job.handoff_opened(generation)
        self._ground.time.after(TICK_S, self._tick, handoff, True)
        handoff.take(self.leader.own.proposer.record)
        for name in handoff.target:
            if not self._ground.is_up(name):
                self.misses(name)

    def _keeps(self, handoff: PlayedHandoff) -> None:
        """What a record says of the open handoff: whom it answers by now, and when to look at its deadline."""
        own = self.leader.own
        handoff.leaving = own.led.leaving if own.led is not None else handoff.leaving
        if own.proposer.record.proposal is not None:
            self._ground.time.at(own.proposer.record.proposal.deadline_utc + LATE_S, self._tick, handoff, False)

    def _look_for_lost(self, handoff: PlayedHandoff) -> None:
        if self.handoff is handoff:
            self.hear(PeersUnreachable(dict(handoff.missed)))
            self._ground.time.after(LOOK_AGAIN_S, self._look_for_lost, handoff)

    def _tick(self, handoff: PlayedHandoff, again: bool) -> None:
        if self.handoff is handoff:
            if again:
                self._ground.time.after(TICK_S, self._tick, handoff, True)
            self.hear(Tick())
