"""What ranks say once, as the facts that the service gets. Pure."""

from datetime import datetime

from agent.protocol.rank import Checkpointed, CheckpointFailed, StepReport
from agent.protocol.sync import CheckpointFact, StepRow
from agent.protocol.values import utc


def step_row(job_id: str, event: StepReport, *, at: datetime) -> StepRow:
    """A step that ended at `at`."""
    return StepRow(
        job_id=job_id,
        generation=event.generation,
        step=event.step,
        seconds=event.seconds,
        finished_utc=at,
        loss=event.loss,
        consumed_samples=event.consumed_samples,
        sample_digest=event.sample_digest,
        tokens=event.tokens,
    )


def with_news(known: StepRow | None, row: StepRow) -> StepRow | None:
    """What is known of the step of `row` now; None where it says nothing new. `known`: of the newest step."""
    if known is None or (known.generation, known.step) != (row.generation, row.step):
        return row
    more = {name: value for name, value in row if value is not None and getattr(known, name) is None}
    return known.model_copy(update=more) if more else None


def checkpoint_fact(
    job_id: str, event: Checkpointed | CheckpointFailed, *, generation: int, now: float
) -> CheckpointFact:
    """A checkpoint that is complete, or that failed, in the world of `generation`. `now`: seconds since 1970, where the
    rank did not say when."""
    told = {"job_id": job_id, "generation": generation, "step": event.step, "path": event.path, "asked": event.asked}
    if isinstance(event, CheckpointFailed):
        return CheckpointFact(**told, finished_utc=utc(event.failed_utc), failure=event.reason)
    at = utc(event.finished_utc or now)
    measured = {"size_bytes": event.size_bytes, "seconds": event.seconds}
    return CheckpointFact(**told, finished_utc=at, loaded=event.loaded, **measured)
