"""The proposer's half of a handoff, hosted by the agent that leads or by the service; one machine per job.

Pure, sans-IO: `handle(event, now)` returns the effects to carry out, in order. It has at most one handoff open, burns a
generation number for each, also for those that end aborted, and journals before it speaks.
"""

from liver_core.handoff.proposer_events import ProposerEffect, ProposerEvent, ProposerRecord


class Proposer:
    """Opens handoffs of one job and drives each to its end.

    `proposer_id` is where reports go (a node id, or the service). `record` is the journalled one after a restart.
    """

    def __init__(self, *, job_id: str, proposer_id: str, agent_incarnation: int, record: ProposerRecord) -> None:
        self.job_id = job_id
        self.proposer_id = proposer_id
        self.agent_incarnation = agent_incarnation
        self.record = record

    def handle(self, event: ProposerEvent, now: float) -> tuple[ProposerEffect, ...]:
        """Take one event; `now` is seconds since the epoch, UTC."""
        raise NotImplementedError
