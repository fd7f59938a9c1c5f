"""What of a report lies beyond anything that its jobs can have reached. A number is used up for ever once it is stored,
and a time is paid for: what is too great is refused by name. Pure.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from agent.protocol.sync import HandoffMeasures, HandoffMirror, SyncReport
from liver_core.handoff import FailureCause
from liver_core.handoff.generations import PLACES, last_after, start_of

GENERATIONS_AHEAD_MAX = 1_000
"""Agents may make so many worlds of a job before the service hears of the first."""
SLACK = timedelta(seconds=5)
"""Times of a node are moved to the service's clock, and may be off by as much afterwards."""
NODE_BYTES_PER_S_MAX = 1e12
"""More than a node with eight links of 800 Gbit/s sends."""
_OF_JOBS = ("ranks", "steps", "handoffs", "logs", "checkpoints", "stores", "finished", "metrics")
_TIMES = {
    "steps": ("finished_utc",),
    "checkpoints": ("finished_utc",),
    "metrics": ("at_utc",),
    "handoffs": ("opened_utc", "changed_utc"),
}
Refuse = Callable[[str, object, str], None]


@dataclass(frozen=True, slots=True)
class Reach:
    """What the agents of a job can have reached. `generation`: the highest that they can have made. `newer_start`: the
    highest number of a start that the service may have forgotten. `checkpoint`: the highest that was asked for. `step`:
    the last of the job. Whatever they did lies between `since`, when the job was submitted, and `until`."""

    generation: int
    newer_start: int
    checkpoint: int
    step: int
    since: datetime
    until: datetime

    @classmethod
    def of(
        cls,
        *,
        next_generation: int,
        active_generation: int | None,
        checkpoints_asked: int,
        last_step: int,
        since: datetime,
        now: datetime,
    ) -> "Reach":
        """Only the service begins a start, so the agents' numbers lie in the newest one."""
        last_of_start = (start_of(max(0, next_generation - 1)) + 1) * PLACES - 1
        return cls(
            generation=min(next_generation + GENERATIONS_AHEAD_MAX, last_of_start),
            newer_start=last_after(active_generation or 0),
            checkpoint=checkpoints_asked,
            step=last_step,
            since=since,
            until=now,
        )

    @property
    def longest_s(self) -> float:
        """How long anything can have taken."""
        return (self.until - self.since + SLACK).total_seconds()


def within_reach(report: SyncReport, reach: Mapping[str, Reach], refuse: Refuse) -> SyncReport:
    """The report without what is out of reach; the same object where all is within. A time that lies outside of the
    job's life becomes the nearest one within. `reach`: by job; what is of others stays. `refuse`: called with part, key
    and reason of whatever is taken out."""
    kept: dict[str, tuple[Any, ...]] = {}
    for part in _OF_JOBS:
        items = getattr(report, part)
        found = tuple(_within(part, items, reach, refuse))
        if len(found) != len(items) or any(new is not old for new, old in zip(found, items, strict=True)):
            kept[part] = found
    return report.model_copy(update=kept) if kept else report


def _within(part: str, items: tuple[Any, ...], reach: Mapping[str, Reach], refuse: Refuse) -> Iterator[Any]:
    for item in items:
        of_job = reach.get(item.job_id)
        if of_job is None:
            yield item
            continue
        key = item.handoff_id if isinstance(item, HandoffMirror) else f"{item.job_id}/{item.generation}"
        if why := _why_not(item, of_job):
            refuse(part, key, why)
            continue
        changes: dict[str, Any] = {
            name: moved for name in _TIMES.get(part, ()) if (moved := _in_life(getattr(item, name), of_job)) is not None
        }
        if isinstance(item, HandoffMirror):
            wrong = _beyond(item, of_job)
            for name, why in wrong.items():
                refuse(part, key, f"{name}: {why}")
            if wrong:
                changes["measures"] = item.measures.model_copy(update=dict.fromkeys(wrong))
        yield item.model_copy(update=changes) if changes else item


def _why_not(item: Any, reach: Reach) -> str:
    if item.generation > reach.generation:
        return f"generation {item.generation} is beyond {reach.generation}, which this job cannot have passed"
    if isinstance(item, HandoffMirror):
        if item.parent >= item.generation:
            return f"generation {item.generation} must be above parent {item.parent}"
        if item.parent and start_of(item.parent) != start_of(item.generation):
            return f"generation {item.generation} is of another start than parent {item.parent}: no handoff makes it"
    if (asked := getattr(item, "asked", 0)) > reach.checkpoint:
        return f"checkpoint {asked} was not asked for, only {reach.checkpoint} were"
    causes = _causes(item)
    steps = (getattr(part, "step", None) or 0 for part in (item, getattr(item, "ended", None), *causes))
    if (step := max(steps)) > reach.step:
        return f"step {step} is after the last step, {reach.step}"
    if (newer := max((cause.newer_start or 0 for cause in causes), default=0)) > reach.newer_start:
        return f"newer_start {newer} is beyond {reach.newer_start}, which no start of this job can have"
    seconds = getattr(item, "seconds", None) or 0.0
    return f"seconds: {_too_long(seconds, reach)}" if seconds > reach.longest_s else ""


def _causes(item: Any) -> list[FailureCause]:
    reasons = (getattr(item, name, None) for name in ("reason", "failed"))
    return [reason.cause for reason in reasons if reason is not None and reason.cause is not None]


def _in_life(at: datetime, reach: Reach) -> datetime | None:
    """The time at which it can have been; None where that is the same."""
    if at > reach.until + SLACK:
        return reach.until
    return reach.since if at < reach.since - SLACK else None


def _beyond(mirror: HandoffMirror, reach: Reach) -> dict[str, str]:
    """What the ledger would charge and cannot be, and why."""
    measures: HandoffMeasures = mirror.measures
    wrong = {}
    if (measures.pause_s or 0.0) > reach.longest_s:
        wrong["pause_s"] = _too_long(measures.pause_s, reach)
    nodes = set(mirror.target.node_ids()) | set(mirror.source.node_ids() if mirror.source is not None else ())
    most = len(nodes) * NODE_BYTES_PER_S_MAX * reach.longest_s
    if (measures.bytes_moved or 0) > most:
        wrong["bytes_moved"] = f"{len(nodes)} nodes cannot have moved {measures.bytes_moved} bytes since then"
    return wrong


def _too_long(seconds: float | None, reach: Reach) -> str:
    return (
        f"nothing of the job took {seconds:g} s, it was submitted {reach.longest_s - SLACK.total_seconds():.0f} s ago"
    )
