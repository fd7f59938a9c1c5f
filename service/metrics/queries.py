"""Reads the numbers of a job: page by page, or a few steps that stand for many."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from sqlalchemy import Select, Text, cast, func, literal, select, true
from sqlalchemy.dialects.postgresql import ARRAY
from sqlalchemy.orm import Session, aliased

from service.metrics.tables import StepMetricsRow
from service.paging import Pages


class Wanted(NamedTuple):
    """Steps above `after`, up to `until`, that have one of these names; without names, all."""

    job_id: str
    names: Sequence[str]
    after: int
    until: int


def list_metrics(session: Session, pages: Pages, wanted: Wanted) -> Iterator[StepMetricsRow]:
    """In the order of steps, read as they are asked for."""
    return pages.oldest(session, _found(wanted), StepMetricsRow.step)


def thin_metrics(session: Session, wanted: Wanted, points: int) -> Sequence[StepMetricsRow]:
    """At most so many steps: of as many equal parts of the range, the last step of each."""
    found = _found(wanted).subquery()
    least, most = session.execute(select(func.min(found.c.step), func.max(found.c.step))).one()
    if least is None:
        return ()
    width = -(-(most - least + 1) // points)
    parts = func.generate_series(least, most, width).table_valued("first").render_derived(name="parts")
    last = (
        _found(wanted)
        .where(StepMetricsRow.step >= parts.c.first, StepMetricsRow.step < parts.c.first + literal(width))
        .order_by(StepMetricsRow.step.desc())
        .limit(1)
        .lateral()
    )
    row = aliased(StepMetricsRow, last)
    return session.scalars(select(row).select_from(parts).join(last, true()).order_by(row.step)).all()


def _found(wanted: Wanted) -> Select[StepMetricsRow]:
    statement = select(StepMetricsRow).where(
        StepMetricsRow.job_id == wanted.job_id, StepMetricsRow.step > wanted.after, StepMetricsRow.step <= wanted.until
    )
    if wanted.names:
        statement = statement.where(StepMetricsRow.numbers.op("?|")(cast(list(wanted.names), ARRAY(Text()))))
    return statement
