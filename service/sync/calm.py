"""Calm reports: of a node whose ranks stand as they stood, and that says nothing but steps and logs of a world at work.

Nearly all reports are calm. They do not wait for each other at the row of their job, as the nodes of a large job would.
"""

from collections.abc import Sequence

from sqlalchemy import text

from agent.protocol.sync import SyncReport
from service.jobs.grants import Standing, read_standing
from service.jobs.tables import JobState
from service.nodes.operations import differs
from service.nodes.tables import NodeRow
from service.sync.intake import Intake

_MORE = ("notices", "handoffs", "declined", "checkpoints", "stores", "finished", "answering")
# A job whose world is another one by now, or has ended, is left alone: what is counted has to be looked at again.
_PROGRESS = text(
    """
    WITH made AS (SELECT * FROM unnest(CAST(:job_ids AS text[]), CAST(:generations AS bigint[]),
                                       CAST(:steps AS bigint[])) AS made (job_id, generation, step)),
         more AS (UPDATE jobs SET last_step = made.step, last_step_at = :now,
                                  highest_step = greatest(jobs.highest_step, made.step)
                    FROM made
                   WHERE jobs.job_id = made.job_id AND jobs.active_generation = made.generation
                     AND jobs.state = 'running' AND jobs.last_step < made.step
               RETURNING jobs.job_id)
    SELECT count(*) FROM made
     WHERE job_id NOT IN (SELECT job_id FROM more)
       AND NOT EXISTS (SELECT FROM jobs
                        WHERE jobs.job_id = made.job_id AND jobs.active_generation = made.generation
                          AND jobs.state = 'running' AND jobs.last_step >= made.step)
    """
)


class Unsettled(Exception):
    """A job of a calm report has changed since it was read: the report has to be stored anew."""


def try_calm(intake: Intake, job_ids: Sequence[str]) -> bool:
    """Whether the report is calm; if so, its jobs are read."""
    if not _says_nothing_new(intake.node, intake.report):
        return False
    standing = read_standing(intake.session, intake.node.node_id, job_ids, now=intake.now)
    by_id = {item.job.job_id: item for item in standing}
    if not all(_is_at_work(by_id.get(rank.job_id), rank.generation) for rank in intake.report.ranks):
        return False
    intake.standing = standing
    intake.jobs = {job_id: by_id[job_id].job for job_id in job_ids}
    intake.generations = {
        (item.job.job_id, item.generation.generation): item.generation
        for item in standing
        if item.generation is not None
    }
    return True


def store_progress(intake: Intake) -> None:
    """Raises Unsettled."""
    made = [(job_id, intake.jobs[job_id].active_generation, step) for job_id, step in sorted(intake.progress.items())]
    if made:
        job_ids, generations, steps = (list(part) for part in zip(*made, strict=True))
        values = {"job_ids": job_ids, "generations": generations, "steps": steps, "now": intake.now}
        if intake.session.execute(_PROGRESS, values).scalar_one():
            raise Unsettled


def _says_nothing_new(node: NodeRow, report: SyncReport) -> bool:
    if any(getattr(report, part) for part in _MORE) or differs(node, report.node) or not report.ranks:
        return False
    worlds = {(rank.job_id, rank.generation) for rank in report.ranks}
    facts = (*report.steps, *report.logs, *report.metrics)
    if any((fact.job_id, fact.generation) not in worlds for fact in facts):
        return False
    if not {kept.job_id for kept in report.peer_keys} <= {job_id for job_id, _ in worlds}:
        return False
    before = {(rank["job_id"], rank["generation"], rank["rank"], rank["slot"], rank["stage"]) for rank in node.ranks}
    return before == {(rank.job_id, rank.generation, rank.rank, rank.slot, rank.stage.value) for rank in report.ranks}


def _is_at_work(standing: Standing | None, generation: int) -> bool:
    return (
        standing is not None
        and standing.is_granted
        and not standing.has_held
        and standing.job.state == JobState.RUNNING
        and standing.generation is not None
        and standing.generation.generation == generation
        and standing.generation.first_step_at is not None
    )
