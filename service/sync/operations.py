"""One sync: stores a whole report in one transaction. `service.sync.orders` makes the answer from the stored rows.

Lock order, here and in the reconcilers: the node, then jobs by id, then ledger tails. A report is applied at most once
for each (agent_incarnation, report_seq). Every fact also has its own key, so a fact sent again changes nothing.
"""

from datetime import datetime, timedelta
from itertools import groupby
from operator import attrgetter

from sqlalchemy import select
from sqlalchemy.orm import Session

from agent.protocol.sync import REFUSALS_MAX, NoticeFact, SyncReport
from agent.protocol.wires import WireFact
from service.capacity.operations import MachineClaim, judge_claim, release_machine, store_claim
from service.capacity.tables import InstanceRow
from service.clouds.operations import forget_oldest_heard, hear_from_agent
from service.db.wake import job_topic, notify
from service.handoffs.operations import decline_handoff, name_cause
from service.jobs.causes import FailedPart, at_store, cause_of_rank
from service.jobs.grants import granted_nodes
from service.jobs.membership import refresh_members
from service.jobs.operations import touch
from service.jobs.tables import (
    ENDED,
    JobMemberRow,
    MemberRole,
)
from service.jobs.waking import wake_all
from service.leases.operations import begin_lease
from service.leases.queries import open_lease
from service.leases.tables import LeaseRow
from service.ledger.operations import account_all, close_lease
from service.ledger.rules import LOST, OVER, Spent
from service.ledger.tables import Cause
from service.nodes.operations import lock_node, note_answers, skew_of, store_node
from service.nodes.skew import SAME_WITHIN, in_service_time, off_by
from service.nodes.tables import NodeRow, NodeState
from service.notices.operations import (
    LeaseNotices,
    forget,
    forget_hearsay,
    forget_oldest,
    notices_of_leases,
    store_added,
)
from service.notices.queries import known_of_lease
from service.notices.rules import (
    NOTICES_OF_LEASE_MAX,
    PEERS_WORDS_MAX,
    SAID_BY_SERVICE,
    gives_way,
    same_loss,
    withdrawn_by,
)
from service.peer_keys.operations import note_keeps
from service.sync.accounts import account, spent_now
from service.sync.facts import store_facts
from service.sync.intake import Intake, key_of
from service.sync.reach import within_reach
from service.sync.reading import Reading
from service.sync.sifting import keep_granted, note_oversteps, sift, take_mirrors
from service.tokens.operations import Caller, check_still_valid
from service.wires.operations import store_wires

_TOO_MANY = "at most {} notices of a node count at a time, and others press more"


def apply_report(
    session: Session,
    reading: Reading,
    caller: Caller,
    *,
    silent_after_s: float,
    gone_after_s: float,
    now: datetime,
    arrived: datetime | None = None,
) -> Intake:
    """Store what could be read of a report, and what the node may say. Raises 409 for an agent start that has been
    replaced. `silent_after_s`, `gone_after_s`: as in ServiceSettings. `arrived`: when the report did, if not now."""
    reporter = lock_node(session, reading.report, now=now)
    node = reporter.node
    if node.state == NodeState.GONE:
        # It is not taken back on the word of a token that was revoked while this report was on its way.
        check_still_valid(session, caller, now=now)
    refusals = list(reading.refusals[:REFUSALS_MAX])
    intake = Intake(session, reading.report, node, now, refusals, silent_after_s, gone_after_s)
    with session.no_autoflush:
        keep_granted(intake)
    if not reporter.is_news:
        node.last_seen_at = now
        return intake
    intake.report = report = in_service_time(intake.report, _measure_clock(node, intake.report, arrived or now))
    seen_as, before = (node.state, node.peer_url), node.ranks
    ranks_before = {_standing(rank["job_id"], rank["rank"], rank["stage"]) for rank in before}
    source_before = node.notice_source
    is_changed = store_node(node, report, now=now) or reporter.is_new
    info = report.node
    if (node.state, node.peer_url) != seen_as:
        # The orders of its jobs say where it is reached, and whether it is heard.
        intake.restated |= intake.jobs_of(node.node_id) & intake.jobs.keys()
    with session.no_autoflush:
        # Neither call reads the changes made so far; those are written at once, below.
        lease = _lease_of(intake, _claim_of(intake), was_away=reporter.was_away)
        notices = report.notices
        if node.notice_source != source_before and info.notice_source is not None:
            known = known_of_lease(session, lease.lease_id, now=now)
            notices += withdrawn_by(info.notice_source, known, now)
    intake.keep(within_reach(intake.report, intake.reaches(), intake.refuse))
    note_answers(session, intake.report, now=now)
    take_mirrors(intake)
    _store_declined(intake)
    _store_notices(intake, lease, notices)
    facts = sift(intake)
    _store_stores(intake)
    _store_wires(intake)
    note_keeps(session, node.node_id, intake.report.peer_keys)
    store_facts(intake, facts)
    session.flush()
    account(intake, lease, before, facts)
    ranks_now = {_standing(rank.job_id, rank.rank, rank.stage) for rank in intake.report.ranks}
    intake.due.update(job_id for job_id, _, _ in ranks_before ^ ranks_now)
    _note_errors(intake, ranks_now - ranks_before)
    _wake(intake, all_jobs=is_changed)
    note_oversteps(session, caller, intake)
    session.flush()
    return intake


def _claim_of(intake: Intake) -> MachineClaim:
    """What the node says of its machine, and whether that is taken."""
    info, node = intake.report.node, intake.node
    claim = judge_claim(intake.session, info, now=intake.now)
    if claim.refused:
        assert info.provider_id is not None
        intake.overstep("provider_id", info.node_id, info.provider_id, claim.refused)
    elif info.provider_id is not None:
        node.provider_id, node.zone = info.provider_id, info.zone
    return claim


def _lease_of(intake: Intake, claim: MachineClaim, *, was_away: bool) -> LeaseRow:
    """The node's open lease. It begins another one if it has none, or comes with other slots, in another pool or on
    another machine: then the time of the present one up to now is accounted, by what the report says, and it ends."""
    session, info, now = intake.session, intake.report.node, intake.now
    provider_id = info.provider_id if not claim.refused else None
    lease = open_lease(session, info.node_id)
    is_same = lease is not None and (lease.pool, lease.slots) == (info.pool, info.slots)
    if lease is None or not is_same or claim.is_another:
        if lease is not None:
            reason = f"the node came back with {info.slots} slots in pool {info.pool}"
            reason = f"the node is machine {provider_id} now" if is_same else reason
            close_lease(session, lease=lease, at=now, spent=spent_now(intake, lease.slots), reason=reason)
            session.flush()
            # What was announced of the machine before is in no order any more.
            _change_orders_of(intake, info.node_id)
        if claim.is_another:
            release_machine(session, info.node_id, now=now)
            was_away = False
        what = {"node_id": info.node_id, "provider": info.provider.value, "pool": info.pool, "slots": info.slots}
        lease = begin_lease(session, **what, now=now, was_away=was_away, provider_id=provider_id)
        # Until here the machine booted; or it was there, and nobody knows yet what it did.
        cause = Cause.LOST if was_away else Cause.BOOTSTRAP
        account_all(session, lease=lease, until=now, spent=[Spent(cause)] * lease.slots)
    if provider_id is not None:
        store_claim(session, session.get_one(InstanceRow, lease.instance_id), info)
    return lease


def _measure_clock(node: NodeRow, report: SyncReport, arrived: datetime) -> timedelta:
    """How far the node's clock is ahead, as far as that matters."""
    skew = skew_of(node, report, arrived=arrived)
    node.clock_ahead_s, node.clock_at = skew.ahead_s, skew.at
    return off_by(skew.ahead_s)


def _store_notices(intake: Intake, lease: LeaseRow, facts: tuple[NoticeFact, ...]) -> None:
    by_lease: dict[int, LeaseNotices] = {}
    leases: dict[int, LeaseRow] = {}
    for fact in facts:
        if fact.source in SAID_BY_SERVICE:
            continue
        is_own = fact.node_id == intake.node.node_id
        found, told_in = (lease, None) if is_own else _lease_of_peer(intake, fact)
        is_exact = is_own and not off_by(intake.node.clock_ahead_s)
        same_within = timedelta(0) if is_exact else SAME_WITHIN
        if found is None:
            continue
        if found.lease_id not in by_lease:
            by_lease[found.lease_id] = _notices_of(intake, found)
            leases[found.lease_id] = found
        notices = by_lease[found.lease_id]
        if not is_own and notices.stands(fact, intake.now):
            continue
        if is_own and notices.is_hearsay(fact):
            if notices.confirm(fact, same_within=same_within):
                _change_orders_of(intake, fact.node_id)
                continue
            forget_hearsay(intake.session, fact, lease_id=found.lease_id)
            notices = by_lease[found.lease_id] = _notices_of(intake, found)
        most = PEERS_WORDS_MAX if told_in else NOTICES_OF_LEASE_MAX
        least = gives_way(notices.known(intake.now, by_peers=not is_own), fact, intake.now, most=most)
        if least is not None:
            intake.refuse("notices", f"{least.node_id}/{least.kind}/{least.source}", _TOO_MANY.format(most))
        if least is fact:
            continue
        if least is not None:
            forget(intake.session, least, lease_id=found.lease_id)
            notices = by_lease[found.lease_id] = _notices_of(intake, found)
        known = notices.known(intake.now)
        is_first = not any(item.source != fact.source and same_loss(item, fact) for item in known)
        if notices.add(fact, lease_id=found.lease_id, now=intake.now, same_within=same_within, told_in=told_in):
            store_added(intake.session, [notices])
            occurrence = notices.occurrence_of(fact)
            hear_from_agent(intake.session, fact, found, occurrence, is_first=is_first, now=intake.now)
            _change_orders_of(intake, fact.node_id)
    for lease_id, notices in by_lease.items():
        if notices.may_be_many():
            forget_oldest(intake.session, lease_id=lease_id, now=intake.now)
            forget_oldest_heard(intake.session, leases[lease_id])


def _notices_of(intake: Intake, lease: LeaseRow) -> LeaseNotices:
    return notices_of_leases(intake.session, [lease.lease_id])[lease.lease_id]


def _change_orders_of(intake: Intake, node_id: str) -> None:
    """The orders of all jobs of this node that the reporting one may speak of say something else now."""
    intake.described |= intake.jobs_of(node_id) & intake.jobs.keys()


def _lease_of_peer(intake: Intake, fact: NoticeFact) -> tuple[LeaseRow | None, str | None]:
    """The lease of another node of a job of the reporting one, and that job: it passes on what that node's agent told
    it, in case that agent was gone before the service heard of it. None, and the fact is refused, for any other node,
    and for a withdrawal, which is the node's own to report. The job is locked, so that all who report this wait for
    each other."""
    session, own = intake.session, intake.node.node_id
    working = select(JobMemberRow).where(JobMemberRow.job_id.in_(intake.jobs), JobMemberRow.role != MemberRole.SPARE)
    shared = session.scalars(working.where(JobMemberRow.node_id == fact.node_id).limit(1)).one_or_none()
    if shared is None or not _works_for(intake, shared.job_id):
        reason = f"agent of {own} may report notices of its own and its jobs' nodes only"
        intake.overstep("notices", own, fact.node_id, reason)
    elif fact.withdrawn_utc is not None:
        intake.refuse("notices", fact.node_id, f"a withdrawal is reported by {fact.node_id} itself")
    else:
        lease = open_lease(session, fact.node_id)
        # One of the machine that had this name before does not count.
        if lease is not None and fact.first_seen_utc >= lease.started_at:
            return lease, shared.job_id
    return None, None


def _works_for(intake: Intake, job_id: str) -> bool:
    """Whether the reporting node is a member or a target, or has become one by a handoff that it has just reported."""
    own, job = intake.node.node_id, intake.jobs[job_id]
    row = intake.session.get(JobMemberRow, (job_id, own))
    world = intake.world(job_id, job.active_generation) if job.active_generation else None
    return (row is not None and row.role != MemberRole.SPARE) or (world is not None and own in world.seats)


def _store_declined(intake: Intake) -> None:
    for declined in intake.report.declined:
        job = intake.jobs[declined.job_id]
        refusal = decline_handoff(intake.session, job, declined, node_id=intake.node.node_id, now=intake.now)
        if refusal is not None:
            intake.refuse("declined", declined.handoff_id, refusal)
        intake.changed.add(job.job_id)


def _store_stores(intake: Intake) -> None:
    """The store of a generation stays where it is: one that another node has too is no part of its world."""
    for store in intake.report.stores:
        row, own = intake.generation(store.job_id, store.generation), intake.node.node_id
        if row is None or (row.store_node, row.store_host, row.store_port) == (own, store.host, store.port):
            continue
        if row.store_node not in (None, own):
            intake.refuse(
                "stores", store.generation, f"the store of generation {store.generation} is on {row.store_node}"
            )
            continue
        row.store_node, row.store_host, row.store_port = own, store.host, store.port
        intake.described.add(store.job_id)


def _note_errors(intake: Intake, news: set[tuple[str, int, str]]) -> None:
    """When the first rank of a job's world failed; and how one ended, for an attempt that others say it ended."""
    for rank in intake.report.ranks:
        job = intake.jobs[rank.job_id]
        if rank.stage not in LOST or _standing(rank.job_id, rank.rank, rank.stage) not in news:
            continue
        if job.error_at is None and rank.generation == job.active_generation:
            job.error_at = intake.now
        said = rank.reason.cause if rank.reason else None
        blamed = rank.reason.node or None if rank.reason else None
        cause = cause_of_rank(intake.node.node_id, rank.rank, rank.step, said, rank.ended, blamed=blamed)
        if not cause.is_felt:
            row = intake.generation(rank.job_id, rank.generation) if cause.what is FailedPart.STORE else None
            cause = at_store(cause, row.store_node if row is not None else None)
            # While a world ends, its attempts ended of the same, also where who knows of it was away until now.
            ends_since = job.error_at if rank.generation == job.active_generation else None
            name_cause(intake.session, job.job_id, cause, since=ends_since or intake.now)


def _store_wires(intake: Intake) -> None:
    """What the node itself has read, of nodes that have a part in the job as well."""
    said, own = intake.report.wires, intake.node.node_id
    sources = {
        job_id: granted_nodes(intake.session, job_id, (fact.source for fact in facts), now=intake.now)
        for job_id, facts in groupby(sorted(said, key=attrgetter("job_id")), key=attrgetter("job_id"))
    }
    kept: list[WireFact] = []
    for fact in said:
        if fact.target != own or fact.source == own:
            intake.overstep(
                "wires", fact.job_id, key_of("wires", fact), f"agent of {own} reports what it reads of others"
            )
        elif fact.source not in sources[fact.job_id]:
            intake.refuse("wires", key_of("wires", fact), f"node {fact.source} has no part in this job")
        else:
            kept.append(fact)
    store_wires(intake.session, kept, now=intake.now)


def _wake(intake: Intake, *, all_jobs: bool) -> None:
    """Wake the agents of jobs whose orders changed and the reconcilers of jobs whose facts changed. `all_jobs`: a
    node joined or changed."""
    session, now = intake.session, intake.now
    urgent = intake.changed | intake.described
    touched = urgent | intake.restated
    for job_id in sorted(touched):
        if job_id in intake.changed:
            refresh_members(session, intake.jobs[job_id], now=now)
        is_urgent = job_id in urgent
        touch(session, intake.jobs[job_id], now=now, asker=intake.node.node_id, is_urgent=is_urgent)
    for job_id in sorted((intake.due - touched) & intake.jobs.keys()):
        job = intake.jobs[job_id]
        if job.state not in ENDED:
            job.due_at = now
            intake.watched.add(job_id)
    notify(session, map(job_topic, sorted(intake.watched - touched)))
    if all_jobs:
        intake.passed_over = wake_all(session, but=intake.jobs, now=now)


def _standing(job_id: str, rank: int, stage: str) -> tuple[str, int, str]:
    """What the reconciler needs to know of a rank: that it exists, and whether it has ended."""
    return job_id, rank, stage if stage in OVER else "alive"
