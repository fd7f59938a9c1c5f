"""What a start of a job waits for, since an older world of it might step on beside it. Pure."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING

from agent.protocol.values import Placement
from liver_core.handoff.generations import StartWait, start_wait
from liver_core.layout import Member

if TYPE_CHECKING:
    from service.jobs.rules import JobView

OLDER_MAY_STEP = "an older world that was heard may hold step leases so long"


def wait_of(view: JobView, target: Placement, lease_s: float) -> StartWait:
    """Of a start on `target`, where an answer of the service gives a step lease of `lease_s`."""
    worlds = [] if view.world is None or view.errors or view.broken else [view.world.members]
    if view.handoff is not None and not set(view.handoff.target_nodes) & set(target.node_ids()):
        worlds.append(tuple(Member(name, 0) for name in view.handoff.target_nodes))
    # While the service was away, agents gave leases without its answers.
    heard = ((name, max(at, view.listening_since or at)) for name, at in view.lost_sight_of)
    ages = [(name, (view.now - at).total_seconds()) for name, at in heard]
    still_s = waits_s(view, lease_s)
    return start_wait(worlds, target=target.members, lost_sight_of=ages, lease_s=lease_s, waits_s=still_s)


def waits_s(view: JobView, lease_s: float) -> float:
    """How long worlds that are older than the present one may still step. That one need not have waited so long itself:
    where it has a rank on a node of theirs, the older rank ends first. Its first step proves that."""
    ends = [view.now, view.steps_from_at or view.now]
    if view.unstepped_since is not None:
        ends.append(view.unstepped_since + timedelta(seconds=lease_s))
    return (max(ends) - view.now).total_seconds()


def starting_words(view: JobView) -> str:
    """What a start does that has made no step yet. The same at any moment, so that it is one decision."""
    if view.steps_from_at is None:
        return "starting"
    return f"starting; ranks wait until {view.steps_from_at:%H:%M:%S} UTC, since {OLDER_MAY_STEP}"
