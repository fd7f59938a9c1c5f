"""When the suspension of a job has to begin that nothing fits once nodes have gone: it trains on until then. Pure.

A node may come meanwhile, or the notice may be taken back. The service tells agents the time as soon as it is known;
where it cannot be heard, the agent that leads tells the others. Either way agents end the ranks by themselves.
"""

from dataclasses import dataclass
from datetime import datetime, timedelta

TAKES_S = 15.0
"""A suspension fits a notice of this length, beside its steps and its checkpoint."""
STEPS, SAVES = 3, 2
"""So many of either there is time for: ranks end behind a step that all have begun, and a disk is not always as fast.
"""
SAVE_GUESS_S = 30.0
"""Of a job that has not written a checkpoint yet."""
EARLIER_S, LATER_S = 1.0, 5.0
"""By how much another time must be earlier or later for agents to be told of it."""
COMMITTED_S = 3.0
"""So long before its time a suspension is not called off any more: some agents might not hear of it."""


@dataclass(frozen=True, slots=True)
class EndTimes:
    """Seconds of a usual step, 0 if not known, and of the newest checkpoint, None before there is one."""

    step_s: float
    save_s: float | None

    @property
    def suspends_in_s(self) -> float:
        """How long a suspension may take."""
        save_s = SAVE_GUESS_S if self.save_s is None else self.save_s
        return TAKES_S + STEPS * self.step_s + SAVES * save_s


def begins_at(deadlines: tuple[datetime | None, ...], times: EndTimes, planned: datetime | None) -> datetime | None:
    """When the suspension has to begin that is over before the first of these deadlines. None: at once, since a node
    may go at any time, or nobody knows how long a step takes. `planned`: for when it is planned so far, which stays
    unless that is too late or much too early."""
    if not times.step_s or not deadlines or any(at is None for at in deadlines):
        return None
    at = min(at for at in deadlines if at is not None) - timedelta(seconds=times.suspends_in_s)
    if planned is not None and -EARLIER_S <= (at - planned).total_seconds() <= LATER_S:
        return planned
    return at
