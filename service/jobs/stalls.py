"""Whether a job's world stands still: no step for far longer than its steps take, which rank it waits for, and when it
is given up as hung. Pure.

A hook of the job that runs between steps is named, and is not standing still.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from agent.protocol.process_end import STOPPED
from agent.protocol.values import HandoffState
from liver_core.layout.limits import fitting
from service.elapsed import span
from service.jobs.causes import FailedPart, FirstCause
from service.jobs.tables import JobRow, JobState
from service.jobs.view import JobView, Loss, RankAt

STALL_LEAST_S, STALL_STEPS, STALL_LONGEST = 30.0, 20.0, 2.0
"""No step for so long is standing still: in seconds, in usual steps and in longest steps, whichever is longest."""
HANG_LEAST_S, HANG_STEPS = 1_200.0, 10.0
"""After so long, in seconds and in longest steps, the world is ended where the job file says nothing else."""
HOOK_WARNED_S = 1_200.0
"""A hook that runs for longer is said to have no limit."""
HANGS_MAX = 2
"""A world that hangs so often after the same step is not started again."""
NAMED_MAX = 3


@dataclass(frozen=True, slots=True)
class Standstill:
    """No step since `since`, and why as far as it is known. `hook`: what runs instead; empty where nothing does, so
    that the world stands still. `hook_s`: for how long. `cause`: the rank that the others wait for, if one is."""

    since: datetime
    because: str
    hook: str = ""
    hook_s: float = 0.0
    cause: FirstCause | None = None

    def as_json(self) -> dict[str, Any]:
        """To be stored and shown."""
        return {"since": self.since.isoformat(), "because": self.because, "hook": self.hook}


def standstill(view: JobView) -> Standstill | None:
    """Whether there is no step for far longer than steps take, though all nodes of the world are heard. What becomes of
    a world of which some are not, or which switches now, follows from other rules."""
    if view.state is not JobState.RUNNING or view.last_step_at is None or view.world is None:
        return None
    if view.silent or view.gone or view.errors or set(view.unheard) & set(view.world.node_ids()):
        return None
    if view.handoff is not None and view.handoff.state is HandoffState.CUTTING_OVER:
        return None
    # What happened before the service listened is not known.
    known = (view.last_step_at, view.state_changed_at, view.listening_since)
    since = max(at for at in known if at is not None)
    if (view.now - since).total_seconds() <= _stall_s(view):
        return None
    hooks = sorted((rank for rank in view.at_work if rank.hook), key=lambda rank: -rank.hook_s)
    if hooks:
        first = hooks[0]
        because = f"rank {first.rank} on {first.node} runs {first.hook}"
        if view.hook_s_max is None and first.hook_s > HOOK_WARNED_S:
            because += f" for {span(first.hook_s)} already; hook_s_max is not set, so nothing ends it"
        return Standstill(since, because, first.hook, first.hook_s, _cause_of(first, view))
    stands = [rank for rank in view.at_work if rank.is_stopped] or [
        rank for rank in view.at_work if rank.at and not rank.waits
    ]
    cause = _cause_of(stands[0], view) if len(stands) == 1 else None
    return Standstill(since, _because(stands, view), cause=cause)


def hang_of(view: JobView) -> Loss | None:
    """Whether the world hangs: it stands still, or a hook of it runs, for longer than the job file allows."""
    found = standstill(view)
    if found is None:
        return None
    unnamed = FirstCause(FailedPart.PEER, step=view.last_step)
    if found.hook:
        if view.hook_s_max is None or found.hook_s <= view.hook_s_max:
            return None
        text = f"{found.because} for {span(found.hook_s)}, longer than hook_s_max allows"
        return Loss(text, found.cause or unnamed, is_hang=True)
    limit_s, stood_s = hang_s(view), (view.now - found.since).total_seconds()
    if limit_s is None or stood_s <= limit_s:
        return None
    text = f"no step was made for {span(stood_s)} after step {view.last_step}, though all nodes are heard"
    return Loss(f"{text}; {found.because}", found.cause or unnamed, is_hang=True)


def hang_s(view: JobView) -> float | None:
    """After how long without a step the world is ended; None where the job file turns that off."""
    if view.hang_restart_s is None:
        return max(HANG_LEAST_S, HANG_STEPS * view.longest_s)
    return view.hang_restart_s or None


def is_late(job: JobRow, now: datetime) -> bool:
    """Whether a job that runs has made no step for so long that it may stand still."""
    if job.state != JobState.RUNNING or job.last_step_at is None:
        return False
    return (now - job.last_step_at).total_seconds() > STALL_LEAST_S


def rank_at(node: str, rank: Mapping[str, Any]) -> RankAt:
    """Where a rank of this node is, from what its agent reported of it."""
    is_stopped = (rank.get("reason") or {}).get("phase") == STOPPED
    known = {} if is_stopped else rank.get("whereabouts") or {}
    return RankAt(
        node,
        rank["rank"],
        hook=known.get("hook", ""),
        hook_s=known.get("hook_s", 0.0),
        at=known.get("at", ""),
        waits=known.get("waits", False),
        is_stopped=is_stopped,
    )


def _stall_s(view: JobView) -> float:
    usual_s = view.step_s or view.longest_s
    return max(STALL_LEAST_S, STALL_STEPS * usual_s, STALL_LONGEST * view.longest_s)


def _cause_of(rank: RankAt, view: JobView) -> FirstCause:
    return FirstCause(FailedPart.RANK, rank.node, rank.rank, step=view.last_step)


def _because(stands: list[RankAt], view: JobView) -> str:
    if not stands:
        return "all ranks wait for each other" if any(rank.waits for rank in view.at_work) else "no rank says why"
    named = [
        f"rank {rank.rank} on {rank.node} " + ("is stopped" if rank.is_stopped else f"stands in {rank.at}")
        for rank in stands[:NAMED_MAX]
    ]
    more = len(stands) - len(named)
    return fitting(", ".join(named) + (f", and {more} more" if more else ""))
