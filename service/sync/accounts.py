"""What a report says of the time of the node's slots: by the stage of each rank, and by the steps that the ranks made.

The stage says what a slot does now, and is taken for what it did since the last report. Steps say what it really did:
where that is something else, the ledger is put right, also for times that lie further back.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from datetime import timedelta
from operator import attrgetter
from typing import Any

from sqlalchemy import select

from agent.protocol.sync import RankStatus, StepRow
from service.leases.tables import LeaseRow
from service.ledger.operations import OpenLease, Tails, account_all, recast_slots
from service.ledger.rules import (
    OVER,
    Origin,
    Part,
    SlotFacts,
    Spent,
    StepTime,
    cause_of,
    clipped,
    parts_of,
    start_of,
)
from service.ledger.tables import Cause
from service.ledger.witnesses import origin_of, settle_gone
from service.nodes.tables import NodeRow, NodeState
from service.sync.facts import Facts
from service.sync.intake import Intake


def account(intake: Intake, lease: LeaseRow, before: Sequence[Mapping[str, Any]], facts: Facts) -> None:
    """Continue the ledger of each slot of this node up to now. `before`: its ranks as it reported them last."""
    node_id = intake.node.node_id
    spent = spent_now(intake, lease.slots)
    last = {rank["slot"]: rank for rank in before if rank["slot"] < lease.slots}
    made = _parts_by_slot(intake, node_id, intake.report.steps)
    for slot, rank in _by_slot(intake).items():
        if slot < lease.slots and slot not in made:
            spent[slot] = _without_rows(intake, rank, last.get(slot), spent[slot])
    tails = account_all(intake.session, lease=lease, until=intake.now, spent=spent)
    news: dict[int, list[Part]] = {}
    for slot, parts in made.items():
        if slot >= lease.slots:
            news[slot] = parts  # It had the slot until now.
            continue
        parts = [*_start(intake, parts, slot, tails, last.get(slot)), *parts]
        if not _is_said_already(parts, slot, tails, spent[slot]):
            news[slot] = parts
    recast_slots(intake.session, node_id=node_id, by_slot=news)
    for other in sorted({name for name, _ in facts.late_steps}):
        late = (step for name, step in facts.late_steps if name == other)
        recast_slots(intake.session, node_id=other, by_slot=_parts_by_slot(intake, other, late))
    _account_gone(intake, facts)


def only_grows(intake: Intake, lease: OpenLease) -> bool:
    """Whether all that the report says of the node's slots is that they go on with what they did last. Then the ledger
    has no other interval than before."""
    spent, tails = spent_now(intake, lease.slots), lease.tails
    if (
        _old_steps(intake)
        or lease.owes
        or [tail.spent for tail in tails] != spent
        or any(tail.ends_at >= intake.now for tail in tails)
    ):
        return False
    since = {slot: tail.starts_at for slot, tail in enumerate(tails)}
    grown = Tails(intake.now, since, frozenset())
    made = _parts_by_slot(intake, intake.node.node_id, intake.report.steps)
    return all(slot in since and _is_said_already(parts, slot, grown, spent[slot]) for slot, parts in made.items())


def _account_gone(intake: Intake, facts: Facts) -> None:
    """Steps that ended a while ago may have been made by nodes, too, that are gone since, and cannot say so."""
    old = [*_old_steps(intake), *(step for _, step in facts.late_steps)]
    worlds = [intake.world(*key) for key in {(step.job_id, step.generation) for step in old}]
    others = set().union(*(world.seats for world in worlds if world is not None)) - {intake.node.node_id}
    if not others:
        return
    is_gone = NodeRow.node_id.in_(sorted(others)), NodeRow.state == NodeState.GONE
    begun_at = min(step.finished_utc - timedelta(seconds=step.seconds) for step in old)
    settle_gone(intake.session, intake.session.scalars(select(NodeRow.node_id).where(*is_gone)).all(), since=begun_at)


def _old_steps(intake: Intake) -> list[StepRow]:
    """Those that ended so long ago that a node which was part of them, and was heard then, may count as gone by now.

    Fewer seconds would be many reports where the service is slow: it must not be slower for that."""
    before = intake.now - timedelta(seconds=intake.gone_after_s)
    return [step for step in intake.report.steps if step.finished_utc < before]


def spent_now(intake: Intake, slots: int) -> list[Spent]:
    """What the stage of the rank in each slot says."""
    by_slot = _by_slot(intake)
    return [_by_stage(intake, by_slot[slot]) if slot in by_slot else Spent(Cause.IDLE) for slot in range(slots)]


def _by_slot(intake: Intake) -> dict[int, RankStatus]:
    """The rank of the newest generation in each slot."""
    ranks = sorted(intake.report.ranks, key=attrgetter("generation"))
    return {rank.slot: rank for rank in ranks if rank.job_id in intake.jobs}


def _by_stage(intake: Intake, rank: RankStatus) -> Spent:
    origin = _origin(intake, rank.job_id, rank.generation)
    job = intake.jobs[rank.job_id]
    facts = SlotFacts(
        stage=rank.stage,
        generation=rank.generation,
        active_generation=job.active_generation,
        from_checkpoint=origin.from_checkpoint,
        has_stepped=origin.is_handoff or rank.step > origin.begun_at,
        step=rank.step,
        repeats_until=origin.repeats_until,
        is_stalled=job.is_stalled,
    )
    cause = cause_of(facts)
    return Spent(cause) if cause is Cause.IDLE else Spent(cause, rank.job_id, origin.known)


def _origin(intake: Intake, job_id: str, generation: int) -> Origin:
    return origin_of(intake.generation(job_id, generation))


def _without_rows(intake: Intake, rank: RankStatus, last: Mapping[str, Any] | None, spent: Spent) -> Spent:
    """A rank that has ended since the last report, a step or more further, was working; when its last step ended is not
    known where no step is reported."""
    if last is None or (last["job_id"], last["generation"]) != (rank.job_id, rank.generation):
        return spent
    if rank.stage not in OVER or last["stage"] in OVER or rank.step <= last["step"]:
        return spent
    origin = _origin(intake, rank.job_id, rank.generation)
    cause = Cause.RECOMPUTE if rank.step <= origin.repeats_until else Cause.PRODUCTIVE
    return Spent(cause, rank.job_id, origin.known)


def _parts_by_slot(intake: Intake, node_id: str, steps: Iterable[StepRow]) -> dict[int, list[Part]]:
    """What the steps say of the slots of a node, up to now."""
    times: dict[tuple[str, int], list[StepTime]] = defaultdict(list)
    for row in steps:
        world = intake.world(row.job_id, row.generation)
        for _, slot in world.seats.get(node_id, ()) if world is not None else ():
            times[row.job_id, slot].append(StepTime(row.generation, row.step, row.seconds, row.finished_utc))
    found: dict[int, list[Part]] = {}
    for (job_id, slot), made in times.items():
        parts = parts_of(job_id, made, lambda generation, job_id=job_id: _origin(intake, job_id, generation))
        begun_at = intake.jobs[job_id].created_at
        after = max(begun_at, found[slot][-1].ends_at) if slot in found else begun_at
        found.setdefault(slot, []).extend(clipped(parts, after=after, until=intake.now))
    return {slot: parts for slot, parts in found.items() if parts}


def _start(
    intake: Intake, parts: Sequence[Part], slot: int, tails: Tails, last: Mapping[str, Any] | None
) -> Iterable[Part]:
    """Until its first step a slot started, if no world of the job worked in it before."""
    first, since = parts[0], tails.since.get(slot)
    job_id, number = first.spent.job_id, first.spent.generation
    if since is None or slot not in tails.begun or first.starts_at <= since or job_id is None or number is None:
        return ()
    origin = _origin(intake, job_id, number)
    if last is not None and last["job_id"] == job_id and last["stage"] not in OVER:
        goes_on = last["step"] > 0 if last["generation"] == number else origin.is_handoff
        if goes_on:
            return ()
    return (Part(since, first.starts_at, start_of(job_id, origin)),)


def _is_said_already(parts: Sequence[Part], slot: int, tails: Tails, spent: Spent) -> bool:
    """Whether the last interval says all this, as nearly always."""
    since = tails.since.get(slot)
    return since is not None and all(part.spent == spent and part.starts_at >= since for part in parts)
