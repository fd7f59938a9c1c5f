"""One handoff of a replay: what the service sees of it while it is open, and what is remembered of it. Pure."""

from uuid import UUID

from agent.protocol.values import HandoffState
from liver_core.handoff import Phase, ProposerRecord, Rung, Stage
from liver_core.handoff.own_handoffs import OwnHandoffs
from service.handoffs.rules import OpenHandoff
from service.simulation.machines.enacted import Enacted
from service.simulation.machines.meeting import Meeting
from service.simulation.machines.played_job import utc


class PlayedHandoff:
    """`own`: of the node `leads`, which has it open. `leaving`: the nodes that it answers; `target`: of all its
    revisions; `deadline_s`: of the newest one. `ending_s`: since when it can only end. `dropped`: the service shows it
    no more. `superseded`: it makes way for another one. `missed`: since when each node is not reached."""

    def __init__(self, ground: Meeting, own: OwnHandoffs) -> None:
        proposal = own.proposer.record.proposal
        assert proposal is not None and own.led is not None, "it is open"
        self.leads, self.handoff_id = own.node_id, UUID(proposal.handoff_id)
        self.parent, self.rung, self.deadline_s = proposal.parent, proposal.rung, proposal.deadline_utc
        self.leaving, self.target = own.led.leaving, tuple[str, ...]()
        self.opened_s, self.ending_s = ground.time.now, float("inf")
        self.dropped = self.superseded = False
        self.missed: dict[str, float] = {}
        self._generation, self._revisions = own.proposer.record.generation, 1
        self._ground, self._proposer = ground, own.proposer

    def take(self, record: ProposerRecord) -> None:
        """What the proposer has decided."""
        for proposal in (record.proposal, record.pending):
            if proposal is not None:
                nodes = (member.node_id for member in proposal.members)
                self.target = tuple(dict.fromkeys((*self.target, *nodes)))
        if record.proposal is None:
            return
        self.rung, self.deadline_s = record.proposal.rung, record.proposal.deadline_utc
        self._revisions = record.plan_revision
        if record.phase is Phase.ABORT:
            self.ending_s = min(self.ending_s, self._ground.time.now)

    def mirror(self) -> OpenHandoff | None:
        """What the service sees of it, again and again while the node lives that leads."""
        if self.dropped:
            return None
        tally = self._proposer.tally
        passed = tally.boundary_passed()
        return OpenHandoff(
            handoff_id=self.handoff_id,
            state=HandoffState.CUTTING_OVER if passed else HandoffState.PREPARING,
            leaving=tuple(sorted(self.leaving)),
            target_nodes=self.target,
            opened_at=utc(self.opened_s),
            changed_at=utc(self._ground.time.now),
            deadline_at=utc(self.deadline_s),
            may_lose_leavers=tally.goes() or (passed and self.rung is Rung.RESCUE),
        )

    def over(self, stage: Stage, reason: str, decision: str) -> Enacted:
        """What is to be remembered of it, now that it has ended."""
        if stage is not Stage.ACTIVE:
            self._ground.charge_building(min(self._ground.time.now, self.ending_s) - self.opened_s)
        return self.enacted(str(stage), reason, decision)

    def enacted(self, ended: str, reason: str, decision: str) -> Enacted:
        """How far it is."""
        return Enacted(
            self.opened_s,
            self._generation,
            str(self.rung),
            reason,
            self._ground.time.now,
            ended,
            decision,
            self._revisions,
        )
