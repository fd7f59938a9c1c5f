"""Which checkpoints a start of a job may use: not those that are damaged, nor those that were left behind when somebody
had the job go back to an earlier step."""

from collections.abc import Sequence
from datetime import datetime
from pathlib import PurePosixPath

from sqlalchemy import and_, func, not_, select
from sqlalchemy.orm import Session

from agent.protocol.errors import FieldProblem
from agent.protocol.jobfile import JobFile, step_of
from liver_core.handoff.generations import next_start
from liver_core.layout.limits import fitting, listed
from service.jobs.tables import CheckpointRow, GenerationRow, JobRow
from service.jobs.view import Checkpoint, Damaged
from service.paging import Pages
from service.problems import conflict, invalid

CHOICE_MAX = 1_000
"""Of so many checkpoints somebody may choose one."""
_STEP = "step-"
DAMAGED_MAX = 64
"""So many damaged checkpoints of a job are kept that nobody had heard of before."""


def list_checkpoints(session: Session, pages: Pages, job_id: str) -> Sequence[CheckpointRow]:
    """Complete checkpoints, the highest step first, also those that no start may use."""
    statement = select(CheckpointRow).where(CheckpointRow.job_id == job_id)
    return pages.newest(session, statement, CheckpointRow.step, CheckpointRow.path)


def newest_checkpoint(session: Session, job: JobRow, job_file: JobFile) -> Checkpoint | None:
    """The checkpoint that a start uses: the newest of the job's own, or where it may use none of these the one that it
    starts from."""
    statement = select(CheckpointRow).where(CheckpointRow.job_id == job.job_id, CheckpointRow.damage.is_(None))
    if job.from_step is not None:
        older = CheckpointRow.generation < job.from_generation
        statement = statement.where(not_(and_(CheckpointRow.step > job.from_step, older)))
    newest = statement.order_by(CheckpointRow.step.desc(), CheckpointRow.finished_at.desc()).limit(1)
    row = session.scalars(newest).one_or_none()
    return _as_given(job_file) if row is None else _of(row)


def is_left_behind(row: CheckpointRow, job: JobRow) -> bool:
    """Whether the job has gone back to an earlier step since this was written."""
    return job.from_step is not None and row.step > job.from_step and row.generation < job.from_generation


def damaged_of(session: Session, job: JobRow) -> Damaged:
    """What is known of its damaged checkpoints."""
    if not job.damaged_step:
        return Damaged()
    found = select(CheckpointRow).where(CheckpointRow.job_id == job.job_id, CheckpointRow.damage.is_not(None))
    rows = session.scalars(found.order_by(CheckpointRow.step).limit(CHOICE_MAX)).all()
    of_start = any(row.damaged_in == job.active_generation for row in rows)
    return Damaged(tuple(row.step for row in rows if not is_left_behind(row, job)), of_start)


def checkpoint_of_step(session: Session, job: JobRow, job_file: JobFile, step: int) -> Checkpoint:
    """The checkpoint of this step. Raises 422 with the steps that there are, and 409 where it is damaged."""
    there = {row.step: row for row in list_checkpoints(session, Pages(CHOICE_MAX), job.job_id)[::-1]}
    whole = {row.step: _of(row) for row in there.values() if row.damage is None}
    if (given := _as_given(job_file)) is not None:
        whole.setdefault(given.step, given)
    if step in whole:
        return whole[step]
    steps = f"these steps: {listed(map(str, sorted(whole)))}" if whole else "no step"
    if step not in there:
        rule = f"job {job.job_id} has checkpoints that can be loaded of {steps}"
        raise invalid(FieldProblem(field="from_step", rule=rule))
    raise conflict(
        f"the checkpoint of step {step} is damaged: {there[step].damage}; job {job.job_id} has others of {steps}"
    )


def go_back(job: JobRow, step: int) -> None:
    """From now on the job begins from this step. Later checkpoints are left behind, also those on disk of which nobody
    has heard: worlds of starts up to now wrote them."""
    job.from_step, job.from_generation, job.damaged_step = step, next_start(job.next_generation - 1), 0


def note_damage(session: Session, job: JobRow, start: GenerationRow, path: str, damage: str, *, now: datetime) -> bool:
    """The ranks of a start have found that the checkpoint they were to begin from cannot be loaded: no start uses it
    again until it is written anew. One a start at most, and none but what that start may have begun from. Whether this
    is news."""
    marked = select(CheckpointRow.path).where(CheckpointRow.job_id == job.job_id)
    if session.scalars(marked.where(CheckpointRow.damaged_in == start.generation).limit(1)).first() is not None:
        return False
    row = session.get(CheckpointRow, (job.job_id, path))
    if row is None:
        row = _unheard(session, job, start, path, now)
    if row is None or row.damage is not None:
        return False
    if path != start.checkpoint_path and row.step <= (start.checkpoint_step or 0):
        return False
    row.damage, row.damaged_in = fitting(damage), start.generation
    job.damaged_step = max(job.damaged_step, row.step)
    return True


def _unheard(session: Session, job: JobRow, start: GenerationRow, path: str, now: datetime) -> CheckpointRow | None:
    """A later checkpoint in the job's place, which its ranks found there; None where it cannot be one."""
    place, folder = (job.spec.get("checkpoint") or {}).get("path"), PurePosixPath(path)
    named, number = folder.name[: len(_STEP)], folder.name[len(_STEP) :]
    is_one = named == _STEP and number.isascii() and number.isdecimal()
    if place is None or folder.parent != PurePosixPath(place) or not is_one:
        return None
    step, known = int(number), select(func.count()).select_from(CheckpointRow)
    known = known.where(CheckpointRow.job_id == job.job_id, CheckpointRow.damage.is_not(None))
    is_later = (start.checkpoint_step or 0) < step <= int(job.spec["stop"]["steps"])
    if not is_later or session.scalars(known).one() >= DAMAGED_MAX:
        return None
    row = CheckpointRow(
        job_id=job.job_id,
        path=path,
        generation=start.generation,
        step=step,
        finished_at=now,
        size_bytes=None,
        seconds=None,
    )
    session.add(row)
    return row


def _of(row: CheckpointRow) -> Checkpoint:
    return Checkpoint(row.path, row.step, row.finished_at, row.seconds)


def _as_given(job_file: JobFile) -> Checkpoint | None:
    start_from = job_file.start_from
    return Checkpoint(start_from, step_of(start_from)) if start_from is not None else None
