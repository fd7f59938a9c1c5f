"""Waits before a step is applied while no rank of the world holds a step lease.

A step lease says that nobody has started the job elsewhere in the meantime. An agent gives it to the ranks of its node
for as long as the service, which heard of this node a moment ago, does not take the node for lost. One lease is enough
for a world: as long as one node is heard, its steps are seen. A world that nobody hears must stand still before the
service may start another one from a checkpoint, or both would train.
"""

from __future__ import annotations

import logging
import time

import torch.distributed as dist

from liver_core.handoff.messages import Reason
from liver_core.handoff.ready_tag import NOTHING_WANTED, BoundaryPhase
from liver_core.rank.after_step import Ended, Ending
from liver_core.rank.boundary_requests import BoundaryRequests
from liver_core.rank.step_boundary import Boundary, agree

AGAIN_S = 0.2
"""Seconds between two questions whether a rank has a lease."""
WAIT_MOST_S = 600.0
"""After so long the world goes on without a lease. Whoever was to take over has done so, and this world's steps are
thrown away as soon as it is heard again; or nobody was there to do so, and then it must not stand still for ever."""
_log = logging.getLogger(__name__)


def await_lease(
    found: Boundary, requests: BoundaryRequests, group: dist.ProcessGroup, step: int, *, most_s: float = WAIT_MOST_S
) -> float:
    """Wait until `step` may be applied. Returns the seconds waited. A collective of the world, entered by all of its
    ranks with the same `found`. Raises Ended if all ranks are to stop meanwhile: the step is not applied then, and no
    checkpoint is written, since a newer world may be ahead of it."""
    if found.may_step:
        return 0.0
    began = time.monotonic()
    _log.warning("step %d is not applied yet: no rank here has a step lease, another world of the job may step", step)
    while not found.may_step:
        if found.agreement is not None and found.agreement.phase is BoundaryPhase.STOP:
            why = "no rank here had a step lease, another world of the job may step"
            text = f"{requests.stored.stop}; step {step} was not applied: {why}"
            raise Ended(Ending.STOPPED, Reason(text, "boundary"))
        time.sleep(AGAIN_S)
        word = requests.word() if requests.stored.stop is not None else NOTHING_WANTED
        is_over = time.monotonic() - began > most_s
        found = agree(word, group, has_lease=requests.has_lease() or is_over)
    waited_s = time.monotonic() - began
    _log.warning("step %d is applied after %.1f s", step, waited_s)
    return waited_s
