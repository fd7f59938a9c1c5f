"""What a start of a job waits for, since an older world of it might step on beside it. Pure."""

from collections.abc import Collection, Iterable
from datetime import datetime, timedelta

from liver_core.handoff.generations import StartWait, start_wait
from liver_core.layout import Member

OLDER_MAY_STEP = "an older world that was heard may hold step leases so long"


def wait_of(
    worlds: Collection[Collection[Member]],
    target: Collection[Member],
    lost_sight_of: Iterable[tuple[str, datetime]],
    *,
    now: datetime,
    listening_since: datetime | None,
    lease_s: float,
    waits_s: float,
) -> StartWait:
    """As `start_wait`, by the moments when nodes were last heard. While the service was away (before `listening_since`)
    agents gave leases without its answers."""
    heard = ((name, max(at, listening_since or at)) for name, at in lost_sight_of)
    ages = [(name, (now - at).total_seconds()) for name, at in heard]
    return start_wait(worlds, target=target, lost_sight_of=ages, lease_s=lease_s, waits_s=waits_s)


def waits_s(
    now: datetime, steps_from_at: datetime | None, *, unstepped_since: datetime | None = None, lease_s: float = 0.0
) -> float:
    """How long worlds that are older than the present one may still step. That one need not have waited so long itself:
    where it has a rank on a node of theirs, the older rank ends first. Its first step proves that."""
    ends = [now, steps_from_at or now]
    if unstepped_since is not None:
        ends.append(unstepped_since + timedelta(seconds=lease_s))
    return (max(ends) - now).total_seconds()


def starting_words(steps_from_at: datetime | None) -> str:
    """What a start does that has made no step yet. The same at any moment, so that it is one decision."""
    if steps_from_at is None:
        return "starting"
    return f"starting; ranks wait until {steps_from_at:%H:%M:%S} UTC, since {OLDER_MAY_STEP}"
