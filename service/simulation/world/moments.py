"""Seconds of a virtual clock as the moments that the rules of the service take. Pure."""

from datetime import UTC, datetime, timedelta

EPOCH = datetime(2026, 1, 1, tzinfo=UTC)
"""The second 0 of every virtual clock."""


def utc(at_s: float) -> datetime:
    """Of a second of a virtual clock."""
    return EPOCH + timedelta(seconds=at_s)


def utc_or_none(at_s: float | None) -> datetime | None:
    """The same, where there is one."""
    return None if at_s is None else utc(at_s)


def seconds_at(moment: datetime) -> float:
    """The second of a virtual clock at which this is."""
    return (moment - EPOCH).total_seconds()
