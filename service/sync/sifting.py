"""Lets through of a report what its node may say: refuses the rest by name, and keeps what cannot be judged yet."""

import logging
from collections.abc import Iterator, Mapping, Sequence, Set
from datetime import timedelta
from operator import attrgetter
from typing import Any

from sqlalchemy import select
from sqlalchemy.orm import Session

from agent.protocol.notice_life import bars_ranks
from agent.protocol.sync import HandoffMirror, StepRow
from service.audit.operations import note
from service.audit.tables import AuditRow
from service.handoffs.operations import mirror_handoff
from service.handoffs.queries import is_stored
from service.jobs.grants import granted_nodes, lock_granted
from service.jobs.tables import HeldFactRow
from service.ledger.rules import OVER
from service.nodes.operations import differs
from service.nodes.tables import NodeRow
from service.notices.queries import as_fact, open_notices
from service.sync.facts import Facts
from service.sync.held import Fact, drop, fact_of, hold, waiting
from service.sync.intake import Intake, key_of
from service.sync.reach import within_reach
from service.sync.rights import HOLDS, JobFacts, Ruling, Treatment, mirror_ruling, ruling
from service.tokens.operations import Caller

NOTED_AGAIN_AFTER = timedelta(hours=1)
"""A node that oversteps the same way again and again stands in the audit log once in so long."""
_OF_JOBS = (
    "handoffs",
    "declined",
    "ranks",
    "steps",
    "logs",
    "checkpoints",
    "stores",
    "finished",
    "answering",
    "metrics",
    "wires",
    "peer_keys",
)
_log = logging.getLogger(__name__)


def keep_granted(intake: Intake) -> None:
    """Lock the jobs that the report concerns, and leave of it what is about those that the node has a part in. A job
    that does not exist is refused with the same words, so that nobody learns which do."""
    report, node_id, session = intake.report, intake.node.node_id, intake.session
    named = {item.job_id for part in _OF_JOBS for item in getattr(report, part)}
    concerned = set(named)
    if report.notices or differs(intake.node, report.node):
        concerned |= intake.jobs_of(node_id)
    intake.jobs, intake.with_held = lock_granted(session, node_id, concerned, now=intake.now)
    if not (foreign := named - intake.jobs.keys()):
        return
    for job_id in sorted(foreign):
        intake.overstep("jobs", node_id, job_id, f"there is no job {job_id!r} for node {node_id} here; end its ranks")
    kept = {part: tuple(item for item in getattr(report, part) if item.job_id in intake.jobs) for part in _OF_JOBS}
    intake.report = report.model_copy(update=kept)


def take_mirrors(intake: Intake) -> None:
    """Store the handoffs that the node reports. One that only its other nodes can confirm waits for them."""
    later: list[tuple[str, Fact]] = []
    # Oldest generation first: agents that worked without the service may report several, each the parent of the next.
    for mirror in sorted(intake.report.handoffs, key=attrgetter("generation", "mirror_seq")):
        verdict, reason = _rule_on(intake, mirror, intake.node.node_id)
        if verdict is Treatment.REFUSE and is_stored(intake.session, mirror):
            continue  # An agent that was started anew tells it again, and nodes of it have left since.
        if verdict is Treatment.REFUSE:
            intake.overstep("handoffs", mirror.job_id, mirror.handoff_id, reason)
        elif verdict is Treatment.HOLD:
            intake.overstepped.setdefault(("handoffs", mirror.job_id), f"{mirror.handoff_id} waits: {reason}")
            later.append(("handoffs", mirror))
        else:
            _store_mirror(intake, mirror)
    _hold(intake, later)


def sift(intake: Intake) -> Facts:
    """What may be stored of the facts in the report, and of those that waited for a handoff that is known now. Takes
    out of the report what its node may not say of its ranks and stores."""
    held = waiting(intake.session, intake.with_held) if intake.with_held else ()
    over = [row for row in held if row.part == "handoffs" and _take_held_mirror(intake, row)]
    found: dict[str, list[Any]] = {part: [] for part in HOLDS}
    late_steps: list[tuple[str, StepRow]] = []
    known = {job_id: intake.facts_of(job) for job_id, job in intake.jobs.items()}
    for row in held:
        if row.part == "handoffs":
            continue
        fact = fact_of(row)
        verdict, reason = ruling(row.part, fact, row.node_id, known[row.job_id])
        if verdict is Treatment.TAKE:
            found[row.part].append(fact)
            if isinstance(fact, StepRow):
                late_steps.append((row.node_id, fact))
        elif verdict is Treatment.REFUSE:
            _log.warning("%s of node %s waited and is refused: %s", key_of(row.part, fact), row.node_id, reason)
        if verdict is not Treatment.HOLD:
            over.append(row)
    drop(intake.session, over)
    later: list[tuple[str, Fact]] = []
    for part in sorted(HOLDS):
        for item, verdict in _ruled(intake, part, known):
            if verdict is Treatment.TAKE:
                found[part].append(item)
            else:
                later.append((part, item))
    _hold(intake, later)
    _keep_own(intake, known)
    return Facts(**found, late_steps=late_steps)


def is_all_taken(intake: Intake) -> bool:
    """Whether the node may say all this, can have reached it, and nothing of it has to wait. Of ranks, steps, logs and
    metrics."""
    if within_reach(intake.report, intake.reaches(), lambda *_: None) is not intake.report:
        return False
    known = {job_id: intake.facts_of(job) for job_id, job in intake.jobs.items()}
    node_id, report = intake.node.node_id, intake.report
    parts = ("ranks", "steps", "logs", "metrics")
    said = ((part, item) for part in parts for item in getattr(report, part))
    return all(ruling(part, item, node_id, known[item.job_id]).verdict is Treatment.TAKE for part, item in said)


def note_oversteps(session: Session, caller: Caller, intake: Intake) -> None:
    """Write down what the node had no right to say."""
    for (part, target), example in intake.overstepped.items():
        again = select(AuditRow.audit_id).where(
            AuditRow.target == target,
            AuditRow.actor == caller.name,
            AuditRow.action == "sync",
            AuditRow.detail["part"].astext == part,
            AuditRow.at > intake.now - NOTED_AGAIN_AFTER,
        )
        if session.scalars(again.limit(1)).first() is None:
            note(session, caller, "sync", target, now=intake.now, part=part, example=example)


def _rule_on(intake: Intake, mirror: HandoffMirror, node_id: str) -> Ruling:
    session, source = intake.session, mirror.source.node_ids() if mirror.source is not None else ()
    parent = intake.world(mirror.job_id, mirror.parent) if mirror.parent else None
    doubted = {mirror.parent: set(source)} if node_id not in source else {}
    active = intake.jobs[mirror.job_id].active_generation
    if parent is None and active is not None and mirror.parent > active:
        world = intake.world(mirror.job_id, active)
        doubted[active] = set(world.seats) if world is not None else set()
    return mirror_ruling(
        mirror,
        node_id,
        granted=granted_nodes(session, mirror.job_id, {*source, *mirror.target.node_ids()}, now=intake.now),
        parent=parent,
        held_by=_still_running(intake, mirror.job_id, doubted) - {node_id} if doubted else frozenset(),
    )


def _still_running(intake: Intake, job_id: str, worlds: Mapping[int, Set[str]]) -> frozenset[str]:
    """Nodes that are not silent, report live ranks of one of these generations, and that nothing announces to go.
    `worlds`: the nodes to ask, by generation."""
    session, now = intake.session, intake.now
    heard_since = now - timedelta(seconds=intake.silent_after_s)
    wanted = NodeRow.node_id.in_(set().union(*worlds.values())), NodeRow.last_seen_at > heard_since
    found = {
        node.node_id
        for node in session.scalars(select(NodeRow).where(*wanted))
        for rank in node.ranks
        if rank["job_id"] == job_id and node.node_id in worlds.get(rank["generation"], ()) and rank["stage"] not in OVER
    }
    going = (as_fact(row) for row in open_notices(session, now=now, node_ids=found))
    return frozenset(found - {fact.node_id for fact in going if bars_ranks(fact, now)})


def _store_mirror(intake: Intake, mirror: HandoffMirror) -> None:
    mirrored = mirror_handoff(intake.session, intake.jobs[mirror.job_id], mirror, now=intake.now)
    if mirrored.refusal is not None:
        intake.refuse("handoffs", mirror.handoff_id, mirrored.refusal)
    (intake.changed if mirrored.orders_differ else intake.watched).add(mirror.job_id)
    intake.forget_worlds()


def _take_held_mirror(intake: Intake, row: HeldFactRow) -> bool:
    """Whether it waits no longer."""
    mirror = fact_of(row)
    assert isinstance(mirror, HandoffMirror)
    verdict, reason = _rule_on(intake, mirror, row.node_id)
    if verdict is Treatment.TAKE:
        _store_mirror(intake, mirror)
    elif verdict is Treatment.REFUSE:
        _log.warning("handoff %s of node %s waited and is refused: %s", mirror.handoff_id, row.node_id, reason)
    return verdict is not Treatment.HOLD


def _ruled(intake: Intake, part: str, known: Mapping[str, JobFacts]) -> Iterator[tuple[Any, Treatment]]:
    """The items of a part that are not refused."""
    for item in getattr(intake.report, part):
        verdict, reason = ruling(part, item, intake.node.node_id, known[item.job_id])
        if verdict is Treatment.REFUSE:
            intake.overstep(part, item.job_id, key_of(part, item), reason)
        else:
            yield item, verdict


def _keep_own(intake: Intake, known: Mapping[str, JobFacts]) -> None:
    report = intake.report
    kept = {part: tuple(item for item, _ in _ruled(intake, part, known)) for part in ("ranks", "stores")}
    changed = {part: items for part, items in kept.items() if len(items) != len(getattr(report, part))}
    if changed:
        intake.keep(report.model_copy(update=changed))


def _hold(intake: Intake, items: Sequence[tuple[str, Fact]]) -> None:
    left = hold(intake.session, intake.node.node_id, items, now=intake.now)
    for part, fact in left:
        intake.refuse(part, key_of(part, fact), "too much waits already for the report of this handoff")
    intake.with_held.update(fact.job_id for _, fact in items)
