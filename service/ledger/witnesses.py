"""What others report of the work of nodes that are gone. A world makes a step only while all its ranks work: its steps
are known, so what each of its nodes did is known too, also where the node itself could not report it any more."""

from collections import defaultdict
from collections.abc import Collection
from datetime import datetime
from typing import NamedTuple

from sqlalchemy import func, select
from sqlalchemy.orm import Session

from service.jobs.tables import GenerationRow, JobGrantRow, JobRow, JobStepRow, SourceKind
from service.leases.tables import LeaseRow
from service.ledger.operations import charge_due, recast_slots
from service.ledger.rules import Origin, Part, StepTime, parts_of


class _World(NamedTuple):
    row: GenerationRow
    times: tuple[StepTime, ...]


def origin_of(row: GenerationRow | None) -> Origin:
    """How a generation began; None for one that the service has no row of."""
    if row is None:
        return Origin()
    return Origin(
        is_handoff=row.source_kind == SourceKind.HANDOFF,
        from_checkpoint=row.checkpoint_path is not None,
        begun_at=row.checkpoint_step or 0,
        repeats_until=row.repeats_until,
        known=row.generation,
    )


def settle_gone(session: Session, node_ids: Collection[str], *, since: datetime) -> None:
    """Put right what the ledger says of these nodes from `since` on: their leases have ended. Where a world of theirs
    made steps they worked, and pauses that are due are charged to that."""
    ended = LeaseRow.node_id.in_(sorted(node_ids)), LeaseRow.ended_at > since
    leases = session.scalars(select(LeaseRow).where(*ended).order_by(LeaseRow.lease_id)).all()
    gone = {lease.node_id for lease in leases}
    if not gone:
        return
    jobs = select(JobGrantRow.job_id).where(JobGrantRow.node_id.in_(sorted(gone))).distinct()
    worlds: dict[str, list[_World]] = defaultdict(list)
    for world in _worlds(session, session.scalars(jobs).all(), since=since):
        worlds[world.row.job_id].append(world)
    for job_id, of_job in sorted(worlds.items()):
        for node_id, by_slot in _work(job_id, of_job, gone).items():
            recast_slots(session, node_id=node_id, by_slot=by_slot)
    for lease in leases:
        if lease.pauses_due:
            charge_due(session, lease)


def _worlds(session: Session, job_ids: Collection[str], *, since: datetime) -> list[_World]:
    """The worlds of these jobs that ended steps after `since`: begin and end of those, repeats apart from others."""
    step = JobStepRow
    is_repeat = step.step <= GenerationRow.repeats_until
    begun_at = func.min(step.finished_at - func.make_interval(0, 0, 0, 0, 0, 0, step.seconds))
    begun_at = func.greatest(begun_at, func.min(JobRow.created_at))
    found = session.execute(
        select(GenerationRow, func.min(step.step), begun_at, func.max(step.step), func.max(step.finished_at))
        .join(step, (step.job_id == GenerationRow.job_id) & (step.generation == GenerationRow.generation))
        .join(JobRow, JobRow.job_id == step.job_id)
        .where(step.job_id.in_(sorted(job_ids)), step.finished_at > since)
        .group_by(GenerationRow.job_id, GenerationRow.generation, is_repeat)
    )
    times: dict[tuple[str, int], list[StepTime]] = defaultdict(list)
    rows = {}
    for row, first, begun, last, ended in found:
        key = row.job_id, row.generation
        rows[key] = row
        times[key] += [StepTime(row.generation, first, 0.0, begun), StepTime(row.generation, last, 0.0, ended)]
    return [_World(row, tuple(times[key])) for key, row in sorted(rows.items())]


def _work(job_id: str, worlds: Collection[_World], node_ids: Collection[str]) -> dict[str, dict[int, list[Part]]]:
    """What each of these nodes did, by node and slot."""
    origins = {world.row.generation: origin_of(world.row) for world in worlds}
    times: dict[tuple[str, int], list[StepTime]] = defaultdict(list)
    for world in worlds:
        for member in world.row.roster["members"]:
            if member["node_id"] in node_ids:
                times[member["node_id"], member["slot"]] += world.times
    found: dict[str, dict[int, list[Part]]] = defaultdict(dict)
    for (node_id, slot), made in sorted(times.items()):
        found[node_id][slot] = parts_of(job_id, made, origins.__getitem__)
    return found
