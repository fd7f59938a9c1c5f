"""What the answers of the service, and of other agents, are worth as step leases of ranks. Pure."""

import math
from collections.abc import Mapping
from typing import Any

from liver_core.handoff.generations import start_of
from liver_core.layout.limits import GENERATION_MAX

ASK_SHARE = 0.3
"""Of the time after which the service may start a job elsewhere: when the other agents are asked, and how old an answer
of the service is that still counts."""
HIGHEST_FIELD = "highest_generation"


def lease_for(
    generation: int, *, wanted: int, steps_from: float | None, until: float, at: float, now: float
) -> float | None:
    """Until when a rank of this generation may step: `until`, or less. `at` is this moment in the same unit, `now` in
    that of `steps_from`.

    None for a rank of a world that the service has replaced by the `wanted` generation: it gets no lease. Before
    `steps_from` an older world may step on beside the wanted one, and the ranks of that get a lease that is over. So do
    ranks of a newer start than the wanted one: these orders are older, and do not tell from when on it may step.
    """
    if generation < wanted:
        return None
    is_newer = start_of(generation) > start_of(wanted)
    waits = generation == wanted and steps_from is not None and now < steps_from
    return min(until, at) if waits or is_newer else until


def may_go_on(*, is_there: bool, reaches_anybody: bool) -> bool:
    """Whether ranks may step though the service has not answered this node. Not if it answers another agent; nor if
    this node reaches neither another agent of the job nor the service's machine, and so may be the one cut off."""
    return reaches_anybody and not is_there


def answered_ago(status: Mapping[str, Any], *, wanted: int) -> float:
    """Seconds since the service answered another agent, by what that one tells of itself; inf if it never did. -inf
    where it knows of a newer start than the `wanted` generation, also where no rank of that is left: the service was
    there after it had answered here, and whatever becomes of it, ranks of an older world must not step."""
    if start_of(highest_of(status)) > start_of(wanted):
        return -math.inf
    heard_s = status.get("service_heard_s")
    return float(heard_s) if isinstance(heard_s, int | float) else math.inf


def highest_of(status: Mapping[str, Any]) -> int:
    """The greatest number that an agent tells; 0 where it tells none."""
    found = status.get(HIGHEST_FIELD)
    return found if type(found) is int and 0 <= found <= GENERATION_MAX else 0
