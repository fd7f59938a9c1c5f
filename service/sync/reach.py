"""What of a report lies beyond anything that its jobs can have reached: refused, for a number is used up for ever once
it is stored. Pure.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from agent.protocol.sync import HandoffMirror, SyncReport
from liver_core.handoff.generations import PLACES, start_of

GENERATIONS_AHEAD_MAX = 1_000
"""Agents may make so many worlds of a job before the service hears of the first."""
_WITH_GENERATION = ("ranks", "steps", "handoffs", "logs", "checkpoints", "stores", "finished")


@dataclass(frozen=True, slots=True)
class Reach:
    """The highest generation that a job's agents can have made, and the highest checkpoint it was asked for."""

    generation: int
    checkpoint: int

    @classmethod
    def of(cls, *, next_generation: int, checkpoints_asked: int) -> "Reach":
        """Only the service begins a start, so the agents' numbers lie in the newest one."""
        last_of_start = (start_of(max(0, next_generation - 1)) + 1) * PLACES - 1
        return cls(min(next_generation + GENERATIONS_AHEAD_MAX, last_of_start), checkpoints_asked)


def within_reach(
    report: SyncReport, reach: Mapping[str, Reach], refuse: Callable[[str, object, str], None]
) -> SyncReport:
    """The report without the elements that are out of reach. `reach`: by job; others stay. `refuse`: called with part,
    key and reason of each one taken out."""
    kept: dict[str, tuple[Any, ...]] = {}
    for part in _WITH_GENERATION:
        items = getattr(report, part)
        wrong = [(item, why) for item in items if (why := _why_not(item, reach.get(item.job_id)))]
        for item, why in wrong:
            refuse(
                part, item.handoff_id if isinstance(item, HandoffMirror) else f"{item.job_id}/{item.generation}", why
            )
        if wrong:
            out = {id(item) for item, _ in wrong}
            kept[part] = tuple(item for item in items if id(item) not in out)
    return report.model_copy(update=kept) if kept else report


def _why_not(item: Any, reach: Reach | None) -> str:
    if reach is None:
        return ""
    if item.generation > reach.generation:
        return f"generation {item.generation} is beyond {reach.generation}, which this job cannot have passed"
    if isinstance(item, HandoffMirror):
        return (
            "" if item.parent < item.generation else f"generation {item.generation} must be above parent {item.parent}"
        )
    asked = getattr(item, "asked", 0)
    return f"checkpoint {asked} was not asked for, only {reach.checkpoint} were" if asked > reach.checkpoint else ""
