"""One handoff of a replay and its host: the product's proposer, its orders and clock, what the service sees. Pure."""

from collections.abc import Callable, Sequence
from uuid import UUID

from agent.protocol.values import HandoffState
from liver_core.handoff import Proposal, Proposer, ProposerRecord, Reason, Rung, Stage
from liver_core.handoff.proposer import PEER_LOST_S, SILENT_IS_LOST, ProposerState
from liver_core.handoff.proposer_events import (
    Amend,
    Cancel,
    HandoffEnded,
    MemberLost,
    Open,
    PersistProposal,
    ProposerEffect,
    ProposerEvent,
    Refused,
    SendOrder,
    Tick,
)
from liver_core.layout import Member
from service.handoffs.rules import OpenHandoff
from service.simulation.machines.enacted import Enacted
from service.simulation.machines.meeting import Meeting
from service.simulation.machines.played_job import PlayedJob, utc
from service.simulation.replay_ledger import JOB

LOOK_AGAIN_S = 2.0
TICK_S, LATE_S = 10.0, 0.05
"""No message is lost, so that nothing has to be sent again each second; deadlines are looked at when they are due."""


class PlayedHandoff:
    """`leads`: the node that hosts it; `leaving`: the nodes that it answers; `target`: of all its revisions.
    `ending_s`: since when it can only end. `dropped`: the service shows it no more."""

    def __init__(
        self,
        ground: Meeting,
        job: PlayedJob,
        leads: str,
        leaving: frozenset[str],
        when_over: Callable[["PlayedHandoff", HandoffEnded], None],
    ) -> None:
        self.leads, self.leaving = leads, leaving
        self.target: tuple[str, ...] = ()
        self.parent, self.rung = 0, Rung.LIVE
        self.opened_s, self.ending_s = ground.time.now, float("inf")
        self.superseded = self.dropped = self._is_gone = False
        record = ProposerRecord(highest_generation=job.highest)
        self.proposer = Proposer(job_id=JOB, proposer_id=leads, agent_incarnation=1, record=record)
        self._ground, self._job, self._when_over = ground, job, when_over

    def open(self, proposal: Proposal) -> str:
        """Returns why it was refused, empty if it is open."""
        ground = self._ground
        effects = self.proposer.handle(Open(proposal), ground.time.now)
        refused = [str(effect.reason) for effect in effects if isinstance(effect, Refused)]
        if refused:
            return refused[0]
        self.parent = proposal.parent
        self._takes(proposal)
        self._job.handoff_opened(self.proposer.record.generation)
        ground.time.after(TICK_S, self._tick, True)
        for name in self.target:
            if not ground.is_up(name):
                self.misses(name)
        self._carry_out(effects)
        return ""

    def amend(self, amended: Proposal, leaving: frozenset[str]) -> bool:
        """A newer revision of its plan; False where that is refused."""
        effects = self.proposer.handle(Amend(amended), self._ground.time.now)
        taken = amended in (self.proposer.record.proposal, self.proposer.record.pending)
        if taken:
            self.leaving = leaving
            self._takes(amended)
        self._carry_out(effects)
        return taken

    def cancel(self, reason: str, phase: str) -> None:
        self.feed(Cancel(Reason(reason, phase)))

    def misses(self, name: str) -> None:
        """A node is not reached. After a while it counts as lost, at a time at which that may be said."""
        self._ground.time.after(PEER_LOST_S, self._lose, name)

    def feed(self, event: ProposerEvent) -> None:
        if self.is_open:
            self._carry_out(self.proposer.handle(event, self._ground.time.now))

    @property
    def is_open(self) -> bool:
        return self.proposer.record.proposal is not None and not self._is_gone

    def dies(self) -> None:
        """With the node that hosts it: nobody will say how it ended."""
        self._is_gone = True

    def mirror(self) -> OpenHandoff | None:
        """What the service sees of it, again and again while the node lives that leads."""
        proposal, tally = self.proposer.record.proposal, self.proposer.tally
        if proposal is None or self.dropped:
            return None
        passed = tally.boundary_passed()
        return OpenHandoff(
            handoff_id=UUID(proposal.handoff_id),
            state=HandoffState.CUTTING_OVER if passed else HandoffState.PREPARING,
            leaving=tuple(sorted(self.leaving)),
            target_nodes=self.target,
            opened_at=utc(self.opened_s),
            changed_at=utc(self._ground.time.now),
            deadline_at=utc(proposal.deadline_utc),
            may_lose_leavers=tally.goes() or (passed and self.rung is Rung.RESCUE),
        )

    def over(self, stage: Stage, reason: str, decision: str) -> Enacted:
        """What is to be remembered of it, now that it has ended."""
        if stage is not Stage.ACTIVE:
            self._ground.charge_building(min(self._ground.time.now, self.ending_s) - self.opened_s)
        return self.enacted(str(stage), reason, decision)

    def enacted(self, ended: str, reason: str, decision: str) -> Enacted:
        """How far it is."""
        record = self.proposer.record
        what = str(self.rung), reason, self._ground.time.now, ended, decision, max(1, record.plan_revision)
        return Enacted(self.opened_s, record.generation, *what)

    def _takes(self, proposal: Proposal) -> None:
        target = (member.node_id for member in proposal.members)
        self.target, self.rung = tuple(dict.fromkeys((*self.target, *target))), proposal.rung
        self._ground.time.at(proposal.deadline_utc + LATE_S, self._tick, False)

    def _lose(self, name: str) -> None:
        if self.proposer.state in SILENT_IS_LOST:
            self.feed(MemberLost(Member(name, 0), Reason(f"{name} has not been reached", str(self.proposer.state))))
        elif self.is_open:
            self._ground.time.after(LOOK_AGAIN_S, self._lose, name)

    def _tick(self, again: bool) -> None:
        if self.is_open:
            if again:
                self._ground.time.after(TICK_S, self._tick, True)
            self.feed(Tick())

    def _carry_out(self, effects: Sequence[ProposerEffect]) -> None:
        for effect in effects:
            match effect:
                case PersistProposal():
                    if self.proposer.state is ProposerState.ABORTING:
                        self.ending_s = min(self.ending_s, self._ground.time.now)
                    self._job.handoff_changed()
                case SendOrder(member=member, order=order):
                    self._ground.send_order(member, order)
                case HandoffEnded():
                    self._when_over(self, effect)
                case Refused():
                    pass  # What is too late to be amended or ended is answered by the next handoff.
