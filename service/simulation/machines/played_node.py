"""A node of a replay: its agent's participant machine, and the rank process that it commands. Pure."""

from typing import assert_never

from liver_core.handoff import Order, Participant, ParticipantRecord, Reason
from liver_core.handoff.participant_events import (
    AbortRank,
    ClearReadyTag,
    OrderReceived,
    ParticipantEffect,
    ParticipantEvent,
    Persist,
    PrepareRank,
    QueryRank,
    RankDied,
    RankReported,
    RetireRank,
    SendReport,
    SetReadyTag,
    StartRank,
    StartReceived,
    StopRank,
    Tick,
    WorldReplaced,
)
from liver_core.layout import Member
from service.simulation.machines.meeting import Meeting, Process
from service.simulation.machines.played_rank import PlayedRank
from service.simulation.replay_ledger import JOB

LATE_S = 0.05
"""So much after a deadline its tick comes."""


class PlayedNode:
    """`up`: the machine is there. Agents of a replay do not die alone, so that nothing is read back from a journal."""

    def __init__(self, ground: Meeting, name: str) -> None:
        self.name, self.up = name, True
        self.member = Member(name, 0)
        self.rank: PlayedRank | None = None
        self._ground = ground
        self.participant = Participant(job_id=JOB, member=self.member, agent_incarnation=1, record=ParticipantRecord())

    def receive(self, order: Order) -> None:
        """An order of a proposer. The time for its boundary runs out here as it does anywhere."""
        if self.up:
            self._ground.time.at(order.boundary_by(self.member) + LATE_S, self.handle, Tick())
            self.handle(OrderReceived(order))

    def handle(self, event: ParticipantEvent) -> None:
        if not self.up:
            return
        for effect in self.participant.handle(event, self._ground.time.now):
            self._carry_out(effect)

    def hear_start(self, order: Order) -> None:
        """The service has started a generation."""
        self.handle(WorldReplaced(order.generation))
        if self.member in order.target.members:
            self.handle(StartReceived(order))

    def take_report(self, rank: Process, event: RankReported | RankDied) -> None:
        """Only the present process is heard."""
        if rank is self.rank:
            self.handle(event)

    def die(self) -> None:
        """Machine, agent and rank are gone at once."""
        self.up = False
        if self.rank is not None:
            self.rank.alive = False

    def _carry_out(self, effect: ParticipantEffect) -> None:
        ground, rank = self._ground, self.rank
        match effect:
            case Persist():
                pass
            case SendReport(to=to, report=report):
                ground.send_report(to, report)
            case PrepareRank(order=order):
                if rank is None or not rank.alive:
                    rank = self.rank = PlayedRank(ground, self.member)
                ground.send(rank.prepare, order)
            case StartRank(order=order):
                self.rank = PlayedRank(ground, self.member)
                ground.start_rank(self.rank, order)
            case SetReadyTag(handoff_id=handoff_id, plan_revision=revision, tag=tag) if rank is not None:
                ground.send(rank.permit, handoff_id, revision, tag)
            case ClearReadyTag(handoff_id=handoff_id) if rank is not None:
                ground.send(rank.withdraw, handoff_id)
            case AbortRank(handoff_id=handoff_id, reason=reason) if rank is not None and rank.alive:
                ground.send(rank.abort, handoff_id, reason)
            case RetireRank(handoff_id=handoff_id) if rank is not None:
                ground.send(rank.retire, handoff_id)
            case StopRank() if rank is not None and rank.alive:
                ground.send(rank.exit)
            case AbortRank() | StopRank() | QueryRank():
                ground.send(self._has_no_rank)
            case SetReadyTag() | ClearReadyTag() | RetireRank():
                pass  # Its process has ended, of which it will hear.
            case _:
                assert_never(effect)

    def _has_no_rank(self) -> None:
        if self.rank is None or not self.rank.alive:
            self.handle(RankDied(Reason("there is no such process", "supervise")))
