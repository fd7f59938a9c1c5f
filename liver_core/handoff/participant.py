"""The participant's half of a handoff: one machine per rank, hosted by that rank's agent.

Pure, sans-IO: `handle(event, now)` returns the effects to carry out, in order. It promises to at most one handoff at a
time, and a promise is journalled (`Persist`) before it is spoken.
"""

from liver_core.handoff.participant_events import ParticipantEffect, ParticipantEvent, ParticipantRecord
from liver_core.layout import Member


class Participant:
    """One member's part in the handoffs of one job.

    `record` is the journalled one after a restart of the agent, or a fresh ParticipantRecord (with `active` set when
    this member already runs a rank). `agent_incarnation` must be greater than at every earlier start of the agent.
    Call `start` once, before any event.
    """

    def __init__(self, *, job_id: str, member: Member, agent_incarnation: int, record: ParticipantRecord) -> None:
        self.job_id = job_id
        self.member = member
        self.agent_incarnation = agent_incarnation
        self.record = record

    def start(self, now: float) -> tuple[ParticipantEffect, ...]:
        """Re-adopt: asks the rank for its true stage (QueryRank) when the record holds a promise or a world."""
        raise NotImplementedError

    def handle(self, event: ParticipantEvent, now: float) -> tuple[ParticipantEffect, ...]:
        """Take one event; `now` is seconds since the epoch, UTC."""
        raise NotImplementedError

    @property
    def wants_ticks(self) -> bool:
        """Whether a deadline is running."""
        raise NotImplementedError
