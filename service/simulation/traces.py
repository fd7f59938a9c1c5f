"""Capacity traces of public data sets as one thing: which nodes came and went, and when. Pure.

Read: rows of `ms,add|remove,node` (Bamboo, Parcae, Oobleck); JSON lines `[ms, "add"|"remove", {"nodes": [...]}]`
(SpotServe, Parcae's segments); counts as `date, time, n` (Bamboo's GCP), `seconds,n` (its step curves), a JSON list of
`{"Time", "GPUs"}` (Sailor) and `{"metadata": {"gap_seconds"}, "data": [...]}` (SkyNomad).
"""

import json
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from itertools import pairwise
from typing import Any

NODES_MAX, EVENTS_MAX, TEXT_BYTES_MAX = 10_000, 200_000, 64 * 1024 * 1024


class TraceError(ValueError):
    """A trace that cannot be read, with the line and what is wrong."""


class TraceFormat(StrEnum):
    """How a trace is written; see the begin of this file. Auto: as its first line says."""

    AUTO = "auto"
    EVENTS = "events"
    EVENT_LINES = "event-lines"
    DATED_COUNTS = "dated-counts"
    STEP_CURVE = "step-curve"
    COUNTS = "counts"


@dataclass(frozen=True, slots=True)
class TraceEvent:
    """Nodes that came and nodes that went at one moment."""

    at_s: float
    added: tuple[str, ...]
    lost: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class CapacityTrace:
    """What could be held of one pool. `has_names`: the trace says which nodes went, not only how many."""

    name: str
    events: tuple[TraceEvent, ...]
    end_s: float
    has_names: bool = True

    def counts(self) -> list[tuple[float, int]]:
        """(from when, nodes) after each event."""
        found, here = [], 0
        for event in self.events:
            here += len(event.added) - len(event.lost)
            found.append((event.at_s, here))
        return found


def read_trace(name: str, text: str, written: TraceFormat = TraceFormat.AUTO) -> CapacityTrace:
    """A trace of any of the formats. Raises TraceError, also where it is not `written` as was said."""
    if len(text) > TEXT_BYTES_MAX:
        raise TraceError(f"{name}: at most {TEXT_BYTES_MAX} bytes")
    stripped = text.strip()
    if not stripped:
        raise TraceError(f"{name}: is empty")
    first = stripped.split("\n", 1)[0]
    found = _format_of(stripped, first)
    if found is None:
        raise TraceError(f"{name}: line 1 is of no known format: {first[:80]!r}")
    if written not in (TraceFormat.AUTO, found):
        raise TraceError(f"{name}: line 1 is not of format {written} but of {found}: {first[:80]!r}")
    return _READERS[found](name, stripped)


def _format_of(stripped: str, first: str) -> TraceFormat | None:
    if stripped[0] in "[{" and not re.match(r"^\[\s*\d", first):
        return TraceFormat.COUNTS
    if first.startswith("["):
        return TraceFormat.EVENT_LINES
    if re.match(r"^\d+,(add|remove),", first):
        return TraceFormat.EVENTS
    if re.match(r"^\d{4}-\d\d-\d\d,", first):
        return TraceFormat.DATED_COUNTS
    if re.match(r"^[\d.]+\s*,\s*\d+\s*$", first):
        return TraceFormat.STEP_CURVE
    return None


def of_counts(name: str, counts: Iterable[tuple[float, int]], end_s: float) -> CapacityTrace:
    """A trace of node counts: the node that came last goes first, since nobody knows which one went."""
    here: list[str] = []
    events, born = [], 0
    for at_s, count in counts:
        if count > NODES_MAX:
            raise TraceError(f"{name}: at most {NODES_MAX} nodes, are {count} at {at_s:g} s")
        added: list[str] = []
        while len(here) < count:
            born += 1
            here.append(f"node-{born}")
            added.append(here[-1])
        lost = tuple(here[count:])
        del here[count:]
        if added or lost:
            events.append(TraceEvent(at_s, tuple(added), lost))
    return CapacityTrace(name, _checked(name, events), end_s, has_names=False)


def _event_rows(name: str, text: str) -> CapacityTrace:
    rows: list[tuple[float, str, tuple[str, ...]]] = []
    for number, line in enumerate(text.splitlines(), start=1):
        parts = line.strip().split(",")
        if len(parts) != 3 or parts[1] not in ("add", "remove") or not parts[0].isdigit():
            raise TraceError(f"{name}: line {number} must be ms,add|remove,node, is {line[:80]!r}")
        rows.append((int(parts[0]) / 1e3, parts[1], (parts[2],)))
    return _of_rows(name, rows)


def _json_lines(name: str, text: str) -> CapacityTrace:
    rows: list[tuple[float, str, tuple[str, ...]]] = []
    for number, line in enumerate(text.splitlines(), start=1):
        try:
            at_ms, what, more = json.loads(line)
            rows.append((float(at_ms) / 1e3, str(what), tuple(map(str, more.get("nodes") or ()))))
        except (ValueError, TypeError, AttributeError):
            raise TraceError(f'{name}: line {number} must be [ms, "add"|"remove", {{"nodes": [...]}}]') from None
    return _of_rows(name, rows)


def _of_rows(name: str, rows: Sequence[tuple[float, str, tuple[str, ...]]]) -> CapacityTrace:
    """Rows with one time are one event. A node that comes twice or goes without having come is an error."""
    here: set[str] = set()
    events: list[TraceEvent] = []
    for number, (at_s, what, nodes) in enumerate(rows, start=1):
        wrong = [node for node in nodes if (node in here) == (what == "add")] if what in ("add", "remove") else []
        if wrong:
            raise TraceError(f"{name}: row {number}: {wrong[0]} {'came twice' if what == 'add' else 'was not there'}")
        added, lost = (nodes if what == "add" else ()), (nodes if what == "remove" else ())
        here = (here | set(added)) - set(lost)
        if events and events[-1].at_s == at_s:
            before = events.pop()
            added, lost = before.added + added, before.lost + lost
        if added or lost:
            events.append(TraceEvent(at_s, added, lost))
    return CapacityTrace(name, _checked(name, events), max((row[0] for row in rows), default=0.0) + 60.0)


def _dated_counts(name: str, text: str) -> CapacityTrace:
    def row(line: str) -> tuple[float, int]:
        day, clock, count = (part.strip() for part in line.split(","))
        return datetime.fromisoformat(f"{day}T{clock}").timestamp(), int(count)

    return _of_pairs(name, _pairs(name, text, row))


def _step_curve(name: str, text: str) -> CapacityTrace:
    """Seconds, or hours where the times are written with a fraction, as one file of Bamboo's has them."""
    scale = 3_600.0 if "." in text.splitlines()[0].split(",")[0] else 1.0

    def row(line: str) -> tuple[float, int]:
        at, count = line.split(",")
        return float(at) * scale, int(count)

    return _of_pairs(name, _pairs(name, text, row))


def _pairs(name: str, text: str, row: Callable[[str], tuple[float, int]]) -> list[tuple[float, int]]:
    found = []
    for number, line in enumerate(text.splitlines(), start=1):
        try:
            found.append(row(line))
        except ValueError:
            raise TraceError(f"{name}: line {number} is not a time and a count of nodes: {line[:80]!r}") from None
    return found


def _json_counts(name: str, text: str) -> CapacityTrace:
    try:
        content: Any = json.loads(text)
        if isinstance(content, dict):
            gap = float(content["metadata"]["gap_seconds"])
            pairs = [(at * gap, int(count)) for at, count in enumerate(content["data"])]
        else:
            pairs = [(float(row["Time"]), int(row["GPUs"])) for row in content]
    except (ValueError, KeyError, TypeError) as error:
        raise TraceError(f"{name}: is no list of Time and GPUs, and has no metadata.gap_seconds: {error!r}") from None
    return _of_pairs(name, pairs)


def _of_pairs(name: str, pairs: Sequence[tuple[float, int]]) -> CapacityTrace:
    if not pairs:
        raise TraceError(f"{name}: has no rows")
    begin = pairs[0][0]
    if any(count < 0 for _, count in pairs):
        raise TraceError(f"{name}: a count of nodes is below 0")
    if any(later[0] < earlier[0] for earlier, later in pairwise(pairs)):
        raise TraceError(f"{name}: times must not go back")
    last: dict[float, int] = {at - begin: count for at, count in pairs}
    return of_counts(name, last.items(), pairs[-1][0] - begin + 60.0)


def _checked(name: str, events: list[TraceEvent]) -> tuple[TraceEvent, ...]:
    if len(events) > EVENTS_MAX:
        raise TraceError(f"{name}: at most {EVENTS_MAX} events, are {len(events)}")
    if any(later.at_s <= earlier.at_s for earlier, later in pairwise(events)):
        raise TraceError(f"{name}: times must not go back")
    return tuple(events)


_READERS: dict[TraceFormat, Callable[[str, str], CapacityTrace]] = {
    TraceFormat.EVENTS: _event_rows,
    TraceFormat.EVENT_LINES: _json_lines,
    TraceFormat.DATED_COUNTS: _dated_counts,
    TraceFormat.STEP_CURVE: _step_curve,
    TraceFormat.COUNTS: _json_counts,
}
