"""What became of a notice, and how a handoff's phases lie in time. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from enum import StrEnum

from agent.protocol.notice_life import NoticePhase
from agent.protocol.values import HandoffState
from service.handoffs.rules import is_open

HANDOFFS_MAX = 16
"""Of one incident."""
TAIL_S = 3_600.0
"""So long after its deadline, or its first sight, whatever happens to its node belongs to an incident."""
BEFORE_S = 5.0
"""Clocks of nodes differ: a handoff may seem to begin this much before the notice that it answers."""


class IncidentOutcome(StrEnum):
    """What became of an incident."""

    OPEN = "open"
    MOVING = "moving"
    MOVED = "moved"
    RESTARTED = "restarted"
    FAILED = "failed"
    WITHDRAWN = "withdrawn"
    NOTHING = "nothing"


FAILURES = frozenset({IncidentOutcome.FAILED, IncidentOutcome.RESTARTED})
"""The job did not keep going by itself."""


@dataclass(frozen=True, slots=True)
class Attempt:
    """A handoff that answered the notice."""

    state: HandoffState
    reason: str
    source_layout: str
    target_layout: str
    superseded: bool = False


@dataclass(frozen=True, slots=True)
class IncidentFacts:
    """All that the outcome follows from. `restarts`: why the jobs of the node were started again. `gone`: its lease has
    ended. `ended`: all of the jobs that were on it have."""

    phase: NoticePhase
    takes_node: bool
    jobs: int
    attempts: Sequence[Attempt]
    restarts: Sequence[str]
    gone: bool
    ended: bool


def outcome(facts: IncidentFacts) -> tuple[IncidentOutcome, str]:
    """What became of it, and why one says so."""
    later = "; the notice was withdrawn later" if facts.phase is NoticePhase.WITHDRAWN else ""
    moved = [item for item in facts.attempts if item.state is HandoffState.ACTIVE]
    if any(is_open(item.state) for item in facts.attempts):
        return IncidentOutcome.MOVING, f"handing over to {facts.attempts[-1].target_layout}"
    if moved:
        last = moved[-1]
        source = last.source_layout or "nothing"
        return IncidentOutcome.MOVED, f"handed over from {source} to {last.target_layout}{later}"
    if facts.restarts:
        return IncidentOutcome.RESTARTED, facts.restarts[-1] + later
    if facts.phase is NoticePhase.WITHDRAWN:
        return IncidentOutcome.WITHDRAWN, "every channel that announced it took it back"
    if facts.jobs == 0:
        return IncidentOutcome.NOTHING, "no job was on the node"
    if not facts.takes_node:
        return IncidentOutcome.NOTHING, "advice only: it moves no running job"
    if facts.phase in (NoticePhase.HEARD, NoticePhase.DUE) and not facts.gone:
        return IncidentOutcome.OPEN, "no handoff has begun yet"
    if facts.ended:
        return IncidentOutcome.NOTHING, "the job had ended"
    failed = [item for item in facts.attempts if not item.superseded] or list(facts.attempts)
    if failed:
        return IncidentOutcome.FAILED, failed[-1].reason or f"a handoff is {failed[-1].state}"
    if not facts.gone:
        return IncidentOutcome.NOTHING, "the node stayed"
    return IncidentOutcome.FAILED, "the node went, and no handoff had begun"


@dataclass(frozen=True, slots=True)
class Bar:
    """One phase in time. `starts_s`: after the begin of the picture. `critical`: nothing could have been faster without
    it."""

    name: str
    label: str
    group: str
    starts_s: float
    seconds: float
    critical: bool


@dataclass(frozen=True, slots=True)
class Picture:
    """The phases of a handoff. `critical_path`: names of bars, by their begin."""

    from_at: datetime
    total_s: float
    bars: tuple[Bar, ...]
    critical_path: tuple[str, ...]


_DRIVEN = (
    ("to_ready", "Prepare the next world", "prepare"),
    ("to_boundary", "Wait for the step boundary", "cutover"),
    ("to_active", "Switch to the next world", "cutover"),
    ("to_retired", "Retire the old world", "after"),
)
"""What the leading agent measures: one after the other, from the opening on."""


def picture(
    phases_s: Mapping[str, float], *, opened_at: datetime, noticed_at: datetime | None, pause_s: float | None
) -> Picture:
    """Phases as bars. The leading agent's phases follow each other, and they are the critical path up to the switch.
    Those of ranks run inside preparation, on all ranks at once: of each the slowest rank is shown, one after the other,
    as long as they fit, and the path goes through the longest one. No two bars of the path overlap."""
    from_at = min(noticed_at, opened_at) if noticed_at is not None else opened_at
    at = (opened_at - from_at).total_seconds()
    bars = [Bar("to_open", "Decide and open", "decide", 0.0, at, True)] if at > 0 else []
    spans: dict[str, tuple[float, float]] = {}
    for name, label, group in _DRIVEN:
        if name in phases_s:
            took = phases_s[name]
            spans[name] = (at, took)
            bars.append(Bar(name, label, group, at, took, name != "to_retired"))
            at += took
    if pause_s is not None and "to_active" in spans:
        starts, took = spans["to_active"]
        bars.append(Bar("pause", "Training stands", "pause", max(0.0, starts + took - pause_s), pause_s, False))
    inner = [(name, took) for name, took in phases_s.items() if name not in spans]
    if "to_ready" in spans and inner:
        # What preparation took is told by what ranks did in it: the path goes through the longest of that.
        bars = [replace(bar, critical=bar.critical and bar.name != "to_ready") for bar in bars]
        bars += _inside(inner, *spans["to_ready"])
    total = max((bar.starts_s + bar.seconds for bar in bars), default=0.0)
    path = tuple(bar.name for bar in sorted(bars, key=lambda bar: bar.starts_s) if bar.critical)
    return Picture(from_at, total, tuple(bars), path)


def _inside(inner: Sequence[tuple[str, float]], starts_s: float, most_s: float) -> list[Bar]:
    """Ranks' phases within a time, each as the slowest rank had it: side by side where they do not fit one after the
    other, since nobody measured where they began."""
    longest = max((took for _, took in inner), default=0.0)
    found, at = [], starts_s
    for name, took in inner:
        if at + took > starts_s + most_s + 1e-6:
            at = max(starts_s, starts_s + most_s - took)
        found.append(Bar(name, name.replace("_", " ").capitalize(), "ranks", at, took, took == longest > 0))
        at += took
    return found
