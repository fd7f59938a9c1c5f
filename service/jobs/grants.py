"""Who may see and say what of a job: a node that the service gave orders of it. Rows of grants are only ever added."""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime, timedelta
from typing import NamedTuple

from sqlalchemy import DateTime, and_, bindparam, exists, or_, select, text, true
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.orm import Session, defer

from service.db.base import among
from service.jobs.tables import GenerationRow, HeldFactRow, JobGrantRow, JobRow, MemberRole

GRACE_S = 900.0
"""A node that is not needed any more may finish its part for so long: its last steps, logs and handoffs count."""

_newest = (
    select(JobGrantRow.role, JobGrantRow.ends_at)
    .where(JobGrantRow.job_id == JobRow.job_id, JobGrantRow.node_id == bindparam("node_id"))
    .order_by(JobGrantRow.grant_id.desc())
    .limit(1)
    .lateral("newest")
)
_NOW = bindparam("now", type_=DateTime(timezone=True))
# Locked in this order, so that two reports about the same jobs cannot wait for each other.
_LOCK_GRANTED = (
    select(JobRow, exists().where(HeldFactRow.job_id == JobRow.job_id).label("has_held"))
    .join(_newest, true())
    .where(
        among(JobRow.job_id, "job_ids"),
        or_(_newest.c.role.is_not(None), _newest.c.ends_at > _NOW),
    )
    .order_by(JobRow.job_id)
    .with_for_update(key_share=True, of=JobRow)
    .execution_options(populate_existing=True)
)
_PARTS = text(
    """
    SELECT wanted.node_id, wanted.job_id, newest.role IS NOT NULL OR coalesce(newest.ends_at > :now, false)
      FROM (SELECT * FROM unnest(CAST(:namers AS text[]), CAST(:job_ids AS text[]))
             UNION SELECT node_id, job_id FROM job_members WHERE node_id = ANY(CAST(:node_ids AS text[])))
           AS wanted (node_id, job_id)
      LEFT JOIN LATERAL (SELECT role, ends_at FROM job_grants
                          WHERE job_grants.job_id = wanted.job_id AND job_grants.node_id = wanted.node_id
                          ORDER BY grant_id DESC LIMIT 1) AS newest ON true
     ORDER BY wanted.job_id
    """
)
_READ_STANDING = (
    select(JobRow, GenerationRow, exists().where(HeldFactRow.job_id == JobRow.job_id).label("has_held"))
    .outerjoin(
        GenerationRow,
        and_(GenerationRow.job_id == JobRow.job_id, GenerationRow.generation == JobRow.active_generation),
    )
    .where(among(JobRow.job_id, "job_ids"))
    .options(defer(GenerationRow.roster))
)
_OF_JOB = text(
    """
    SELECT wanted.node_id
      FROM unnest(CAST(:node_ids AS text[])) AS wanted (node_id)
      JOIN LATERAL (SELECT role, ends_at FROM job_grants
                     WHERE job_grants.job_id = :job_id AND job_grants.node_id = wanted.node_id
                     ORDER BY grant_id DESC LIMIT 1) AS newest ON true
     WHERE newest.role IS NOT NULL OR newest.ends_at > :now
    """
)
_END_OF_NODE = text(
    """
    INSERT INTO job_grants (job_id, node_id, role, at, ends_at)
    SELECT newest.job_id, :node_id, NULL, :now, :now
      FROM (SELECT DISTINCT ON (job_id) job_id, role, ends_at FROM job_grants
             WHERE node_id = :node_id ORDER BY job_id, grant_id DESC) AS newest
     WHERE newest.role IS NOT NULL OR newest.ends_at > :now
    """
)


_CUT_OFF = text(
    """
    SELECT newest.node_id
      FROM (SELECT DISTINCT ON (node_id) node_id, role, at, ends_at FROM job_grants
             WHERE job_id = :job_id AND node_id = ANY(CAST(:node_ids AS text[]))
             ORDER BY node_id, grant_id DESC) AS newest
     WHERE newest.role IS NULL AND newest.ends_at <= newest.at AND newest.at >= :since
    """
).bindparams(bindparam("since", type_=DateTime(timezone=True)))


class Granted(NamedTuple):
    """The jobs that a node has a part in, and those of them of which facts wait for the handoff that they belong to."""

    jobs: dict[str, JobRow]
    with_held: set[str]


class Standing(NamedTuple):
    """How a job stands, and whether the node may speak of it. Its row is not locked."""

    job: JobRow
    generation: GenerationRow | None
    has_held: bool
    is_granted: bool


def read_standing(
    session: Session, node_ids: Sequence[str], named: Iterable[tuple[str, str]], *, now: datetime
) -> dict[str, tuple[Standing, ...]]:
    """By node, in order of the jobs' ids: those that it is a member of, and those named with it. `named`: (node, job).
    Jobs that do not exist are left out."""
    namers, job_ids = zip(*named, strict=True) if (named := list(named)) else ((), ())
    values = {"node_ids": list(node_ids), "namers": list(namers), "job_ids": list(job_ids), "now": now}
    parts = session.execute(_PARTS, values).all() if node_ids else ()
    found_ids = sorted({job_id for _, job_id, _ in parts})
    rows = session.execute(_READ_STANDING, {"job_ids": found_ids}) if found_ids else ()
    jobs = {job.job_id: (job, generation, has_held) for job, generation, has_held in rows}
    found: dict[str, list[Standing]] = defaultdict(list)
    for node_id, job_id, is_granted in parts:
        if job_id in jobs:
            found[node_id].append(Standing(*jobs[job_id], is_granted))
    return {node_id: tuple(standing) for node_id, standing in found.items()}


def lock_granted(session: Session, node_id: str, job_ids: Iterable[str], *, now: datetime) -> Granted:
    """Those of the given jobs that the node may speak of; their rows are locked, in order of id."""
    wanted = list(job_ids)
    if not wanted:
        return Granted({}, set())
    found = session.execute(_LOCK_GRANTED, {"node_id": node_id, "job_ids": wanted, "now": now}).all()
    return Granted({job.job_id: job for job, _ in found}, {job.job_id for job, has_held in found if has_held})


def granted_nodes(session: Session, job_id: str, node_ids: Iterable[str], *, now: datetime) -> frozenset[str]:
    """Those of the given nodes that have a part in the job, or had one until a moment ago."""
    return frozenset(session.scalars(_OF_JOB, {"job_id": job_id, "node_ids": sorted(node_ids), "now": now}))


def follow_members(
    session: Session, job_id: str, *, given: Mapping[str, MemberRole], taken: Iterable[str], now: datetime
) -> None:
    """Nodes have become members of the job or changed their role (`given`), or are none any more (`taken`)."""
    same = {"job_id": job_id, "at": now}
    rows = [{**same, "node_id": name, "role": role.value, "ends_at": None} for name, role in sorted(given.items())]
    ends_at = now + timedelta(seconds=GRACE_S)
    rows += [{**same, "node_id": name, "role": None, "ends_at": ends_at} for name in sorted(taken)]
    if rows:
        session.execute(insert(JobGrantRow).values(rows))


def end_grants(session: Session, node_id: str, *, now: datetime) -> None:
    """The node's key does not count any more, so that it has no time to finish its part."""
    session.execute(_END_OF_NODE, {"node_id": node_id, "now": now})


def cut_off(session: Session, job_id: str, node_ids: Iterable[str], *, since: datetime) -> frozenset[str]:
    """Those of the given nodes, which got their part in the job at `since`, whose grant has ended at once since then:
    whoever has such a name now is another machine."""
    values = {"job_id": job_id, "node_ids": sorted(node_ids), "since": since}
    return frozenset(session.scalars(_CUT_OFF, values))
