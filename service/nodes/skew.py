"""How far a node's clock is off, and times moved from its clock to the service's and back. Pure.

A report says when it was made. No way is shorter than nothing: what it arrives later by the service's clock is the way
it took, plus how far the node's clock is behind. In the same way the answer before it, which it names, says how far the
clock is ahead at most. What is known moves only as far as a report proves it wrong: slow ways, of a service or an agent
that is busy, move nothing. A clock that is off by no more than `EXACT_S` counts as right.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import TypeVar

from pydantic import BaseModel

from agent.protocol.notice_life import moved
from agent.protocol.sync import JobOrder, SyncReport
from agent.protocol.values import shifted

EXACT_S = 1.0
STEADY_S = 0.25
"""A smaller change of what is known is none: times that were moved before must not move again with each report."""
WAY_S_MAX = 15.0
"""Agents give up earlier: a report that seems to have taken longer comes from a clock that was put back."""
CONFIRM_S = 30.0
"""What was not seen again for so long is measured anew: clocks are put right."""
SAME_WITHIN = timedelta(seconds=2)
"""Two first sights of a notice, moved from different clocks, that differ by no more are one."""
ModelT = TypeVar("ModelT", bound=BaseModel)


@dataclass(frozen=True, slots=True)
class Skew:
    """The node's clock is ahead of the service's by `ahead_s`, as last confirmed at `at`. Behind is negative."""

    ahead_s: float
    at: datetime


def measured(
    known: Skew | None, *, issued: datetime, arrived: datetime, answered: datetime | None = None, ago_s: float = 0.0
) -> Skew:
    """What is known after one more report, made at `issued` by the node's clock, `ago_s` after the node got the answer
    that the service made at `answered`."""
    ahead_s = (issued - arrived).total_seconds()
    if answered is not None:
        most_s = (issued - answered).total_seconds() - ago_s
        if ahead_s <= most_s:
            nearest_s = min(max(0.0 if known is None else known.ahead_s, ahead_s), most_s)
            is_same = known is not None and abs(nearest_s - known.ahead_s) <= STEADY_S
            return Skew(known.ahead_s if known is not None and is_same else nearest_s, arrived)
        # The clock was set between the two: the answer says nothing of what it is now.
    if known is None:
        return Skew(ahead_s, arrived)
    change_s = ahead_s - known.ahead_s
    if abs(change_s) <= STEADY_S:
        return Skew(known.ahead_s, arrived)
    is_old = (arrived - known.at).total_seconds() > CONFIRM_S
    return Skew(ahead_s, arrived) if change_s > 0 or change_s < -WAY_S_MAX or is_old else known


def off_by(ahead_s: float | None) -> timedelta:
    """By how much times of the node are moved: nothing for a clock that is about right."""
    return timedelta(0) if ahead_s is None or abs(ahead_s) <= EXACT_S else timedelta(seconds=ahead_s)


def in_service_time(report: SyncReport, ahead: timedelta) -> SyncReport:
    """The report with the times that it names by the service's clock. `issued_utc` stays."""
    if not ahead:
        return report
    source = report.node.notice_source
    node = report.node
    if source is not None:
        node = node.model_copy(update={"notice_source": _shift(source, -ahead, ("since_utc",))})
    return report.model_copy(
        update={
            "node": node,
            "notices": tuple(moved(fact, -ahead) for fact in report.notices),
            "steps": tuple(_shift(step, -ahead, ("finished_utc",)) for step in report.steps),
            "checkpoints": tuple(_shift(fact, -ahead, ("finished_utc",)) for fact in report.checkpoints),
            "wires": tuple(_shift(fact, -ahead, ("measured_utc",)) for fact in report.wires),
            "metrics": tuple(_shift(row, -ahead, ("at_utc",)) for row in report.metrics),
            "handoffs": tuple(
                _shift(mirror, -ahead, ("opened_utc", "deadline_utc", "changed_utc")) for mirror in report.handoffs
            ),
        }
    )


def in_node_time(order: JobOrder, ahead: timedelta) -> JobOrder:
    """The order with the times that the node acts on by its own clock."""
    if not ahead:
        return order
    handoff = order.handoff
    if handoff is not None:
        handoff = _shift(handoff, ahead, ("proposed_utc", "deadline_utc"))
    notices = tuple(moved(fact, ahead) for fact in order.notices)
    steps_from = shifted(order.steps_from_utc, ahead)
    return order.model_copy(update={"handoff": handoff, "notices": notices, "steps_from_utc": steps_from})


def _shift(model: ModelT, by: timedelta, names: Iterable[str]) -> ModelT:
    return model.model_copy(update={name: shifted(getattr(model, name), by) for name in names})
