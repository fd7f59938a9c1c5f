"""Where a job stands and what happens next, in one sentence of two halves. Pure.

The second half never promises more than the facts say: what comes next is what the service's own rule would do.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum

from agent.protocol.values import HandoffState
from liver_core.layout.limits import listed
from service.elapsed import due, span
from service.jobs.tables import JobState

NAMES_SHOWN = 3


class Mood(StrEnum):
    """How much a person should care. Good: it trains. Busy: it is being moved or started, by itself. Waiting: it needs
    nodes, or somebody. Bad: it lost its world or has failed. Ended: nothing more will come."""

    GOOD = "good"
    BUSY = "busy"
    WAITING = "waiting"
    BAD = "bad"
    ENDED = "ended"


@dataclass(frozen=True, slots=True)
class OpenMove:
    """The job's open handoff."""

    state: HandoffState
    source_layout: str
    target_layout: str
    nodes: int


@dataclass(frozen=True, slots=True)
class JobNow:
    """What the sentence says. `reason`: of the state; `planned`: what the service would do next, and why."""

    state: JobState
    reason: str
    now: datetime
    layout: str | None
    nodes: int
    last_step: int
    stop_steps: int
    remaining_s: float | None
    leaving: Sequence[tuple[str, datetime | None]]
    handoff: OpenMove | None
    paused: bool
    planned: str
    stale_s: float | None
    """Seconds since the last step where that is much longer than a step takes; None while steps come."""
    hook: str = ""
    """What the job runs meanwhile; empty where it stands still."""


@dataclass(frozen=True, slots=True)
class Sentence:
    """Two halves."""

    level: Mood
    now: str
    next: str


_DOING = {
    HandoffState.PROPOSED: "is proposed to its agents",
    HandoffState.PREPARING: "builds the next world beside the running one",
    HandoffState.STREAMING: "moves the state while training goes on",
    HandoffState.READY: "is ready to switch at a step",
    HandoffState.CUTTING_OVER: "switches now",
}


def sentence(job: JobNow) -> Sentence:
    """Of a job in any state."""
    steps = f"step {job.last_step} of {job.stop_steps}"
    match job.state:
        case JobState.FINISHED:
            return Sentence(Mood.ENDED, f"Finished at {steps}.", "Nothing more will happen.")
        case JobState.STOPPED:
            return Sentence(Mood.ENDED, f"Stopped at {steps}.", "It stays so until somebody resumes it.")
        case JobState.FAILED:
            return Sentence(Mood.BAD, f"Failed at {steps}: {job.reason}.", "It stays so until somebody resumes it.")
        case JobState.STOPPING:
            return Sentence(Mood.BUSY, f"Stopping at {steps}.", "It ends once its ranks have.")
        case JobState.SUSPENDING:
            return Sentence(Mood.BUSY, f"Its ranks end after {steps}.", _after_suspension(job))
        case JobState.PENDING | JobState.SUSPENDED if job.paused:
            return Sentence(Mood.WAITING, f"Paused at {steps}.", "It stands until somebody resumes it.")
        case JobState.PENDING | JobState.SUSPENDED:
            return Sentence(Mood.WAITING, f"Not running, at {steps}.", f"{_capital(job.planned or job.reason)}.")
        case JobState.STARTING:
            return Sentence(Mood.BUSY, f"Starting in {job.layout} on {_nodes(job.nodes)}.", _of_planned(job))
        case JobState.RUNNING:
            return _running(job, steps)


def _running(job: JobNow, steps: str) -> Sentence:
    where = f"in {job.layout} on {_nodes(job.nodes)}, {steps}"
    now, level = f"Training {where}.", Mood.GOOD
    if job.stale_s is not None:
        runs = f"Runs {job.hook}, no" if job.hook else "No"
        now, level = f"{runs} step for {span(job.stale_s)}, {where}.", Mood.GOOD if job.hook else Mood.BAD
    going = _going(job)
    if job.handoff is not None:
        move = f"The handoff to {job.handoff.target_layout} on {_nodes(job.handoff.nodes)} {_DOING[job.handoff.state]}."
        return Sentence(level if level is Mood.BAD else Mood.BUSY, now, f"{going} {move}".strip())
    if going:
        return Sentence(level if level is Mood.BAD else Mood.BUSY, now, f"{going} {_of_planned(job)}")
    if level is Mood.BAD:
        return Sentence(level, now, _of_planned(job))
    if job.remaining_s is None:
        return Sentence(level, now, _of_planned(job))
    return Sentence(level, now, f"Done in about {span(job.remaining_s)} at this pace; {job.planned}.")


def _going(job: JobNow) -> str:
    if not job.leaving:
        return ""
    names = listed((node for node, _ in job.leaving), NAMES_SHOWN)
    deadlines = [at for _, at in job.leaving if at is not None]
    verb = "goes" if len(job.leaving) == 1 else "go"
    if not deadlines:
        return f"{names} {verb}, time unknown."
    first = min(deadlines)
    return f"{names} {verb if first > job.now else 'was due'} {due(first, job.now)}."


def _after_suspension(job: JobNow) -> str:
    return "Then it stands until somebody resumes it." if job.paused else "It starts again once nodes suffice."


def _of_planned(job: JobNow) -> str:
    return f"{_capital(job.planned)}." if job.planned else "Nothing is planned."


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:].rstrip(".")


def _nodes(count: int) -> str:
    return "1 node" if count == 1 else f"{count} nodes"
