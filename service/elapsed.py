"""How long ago something was and how long it is yet, in words; a past time never reads like a future one. Pure."""

from datetime import datetime

Moment = datetime | str | None
"""A time with its zone, or the same in ISO 8601 as the API says it; None is never."""

_UNITS = ((2 * 86_400.0, 86_400.0, "d"), (2 * 3_600.0, 3_600.0, "h"), (120.0, 60.0, "min"))


def span(duration_s: float) -> str:
    """A length of time in one unit, such as `95 s`, `12 min`, `5 h`, `3 d`."""
    for least, scale, unit in _UNITS:
        if duration_s >= least:
            return f"{duration_s / scale:.0f} {unit}"
    return f"{max(0.0, duration_s):.0f} s"


def ago(moment: Moment, now: datetime) -> str:
    """Of something that has happened. Clocks differ a little between machines: the near future is now."""
    if moment is None:
        return "-"
    passed_s = _passed_s(moment, now)
    return "now" if passed_s < 1.0 else f"{span(passed_s)} ago"


def due(moment: Moment, now: datetime) -> str:
    """Of a deadline: `in 95 s` before it, `2 min ago` after it."""
    if moment is None:
        return "-"
    passed_s = _passed_s(moment, now)
    return f"in {span(-passed_s)}" if passed_s < 0 else f"{span(passed_s)} ago"


def departure(deadline: Moment, now: datetime, *, is_gone: bool) -> str:
    """Of a node that was announced to go: `goes in 95 s`, `was due 2 min ago`, `went 2 min ago`."""
    if deadline is None:
        return "gone" if is_gone else "goes, time unknown"
    if _passed_s(deadline, now) < 0:
        return f"gone, was due {due(deadline, now)}" if is_gone else f"goes {due(deadline, now)}"
    return f"{'went' if is_gone else 'was due'} {due(deadline, now)}"


def _passed_s(moment: datetime | str, now: datetime) -> float:
    at = datetime.fromisoformat(moment) if isinstance(moment, str) else moment
    return (now - at).total_seconds()
