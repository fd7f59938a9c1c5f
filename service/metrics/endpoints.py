"""REST of the numbers of a job: loss, learning rate, gradient norm, and what the job reports of its own."""

from typing import Annotated

from fastapi import APIRouter, Query, Response

from agent.protocol.errors import FieldProblem
from liver_core.layout.limits import BUILT_IN_METRICS, COUNT_MAX, METRICS_PER_STEP_MAX, JobId, MetricName
from service.context import PERSON_ONLY, SessionOf
from service.edge.routes import PeoplesRoute
from service.edge.rows import answer_with
from service.jobs.tables import JobRow
from service.metrics.queries import Wanted, list_metrics, thin_metrics
from service.metrics.schemas import MetricsOut
from service.paging import ManyPagesOf
from service.problems import invalid, not_found

router = APIRouter(prefix="/api/v1/jobs", tags=["jobs"], route_class=PeoplesRoute, dependencies=[PERSON_ONLY])
POINTS_MAX = 5_000


@router.get(
    "/{job_id}/metrics",
    operation_id="list_metrics",
    summary="Numbers of a job's steps",
    response_model=list[MetricsOut],
)
def list_all(
    session: SessionOf,
    response: Response,
    job_id: JobId,
    pages: ManyPagesOf,
    name: Annotated[
        list[MetricName] | None,
        Query(
            max_length=METRICS_PER_STEP_MAX + len(BUILT_IN_METRICS),
            description="Only this one; may be given several times.",
        ),
    ] = None,
    after: Annotated[int, Query(ge=-1, le=COUNT_MAX, description="Only steps above this one.")] = -1,
    until: Annotated[int, Query(ge=0, le=COUNT_MAX, description="Only steps up to this one.")] = COUNT_MAX,
    points: Annotated[
        int | None,
        Query(
            ge=1,
            le=POINTS_MAX,
            description="So many steps at most, evenly spread over the range, all in one page; `limit` has no meaning.",
        ),
    ] = None,
) -> Response:
    """In the order of steps, each once: a step that was made again after a restart has the newer numbers. The newest
    steps are kept."""
    if session.get(JobRow, job_id) is None:
        raise not_found("job", job_id)
    wanted = Wanted(job_id, name or (), after, until)
    if points is not None and pages.cursor is not None:
        raise invalid(FieldProblem(field="points", rule="must not come with cursor: all is in one page"))
    rows = list_metrics(session, pages, wanted) if points is None else thin_metrics(session, wanted, points)
    return answer_with((MetricsOut.of(row, wanted.names) for row in rows), MetricsOut, response)
