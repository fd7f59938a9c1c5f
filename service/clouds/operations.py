"""Stores what the clouds tell: hearing, notice and count in one transaction, as the reports of agents are stored.

Lock order as there: nodes by id, then jobs by id; counts come last. Whoever reads a channel deletes a message only
after the commit. A message that comes again changes nothing.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

from sqlalchemy import and_, case, delete, func, select, tuple_
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.orm import Session

from agent.protocol.notice_life import LEAD
from agent.protocol.sync import NoticeFact, NoticeKind, Provider
from liver_core.layout.limits import fitting
from service.capacity.tables import InstanceRow
from service.clouds.cloud_facts import NAME_CHARS_MAX, RAW_CHARS_MAX, CloudFact, Disposition, Unread
from service.clouds.rules import ADVICE_MEANS, Judgement, Life, Machine, begun, judge
from service.clouds.tables import ChannelRow, HearingCountRow, HearingRow
from service.jobs.waking import wake_all
from service.leases.tables import LeaseRow
from service.nodes.tables import NodeRow
from service.notices.operations import (
    HISTORY_OF_LEASE_MAX,
    LeaseNotices,
    notices_of_leases,
    store_added,
    tell_jobs,
)
from service.notices.rules import ACCOUNT_CHANNELS, NOTICES_OF_LEASE_MAX, is_urgent
from service.notices.tables import NoticeRow

UNREAD_KEPT_MAX, UNREAD_KEPT_FOR = 1_000, timedelta(hours=1)
"""So many unreadable messages are kept of one channel in so long; the others are counted."""
HEARD_OF_LEASE_MAX = NOTICES_OF_LEASE_MAX + HISTORY_OF_LEASE_MAX
"""What agents heard of one lease is kept as long as the notices that followed from it."""
LIVES_KNOWN_FOR = timedelta(hours=1)
"""What a machine was told before that is over, whoever is told of it now."""
_Name = tuple[Provider, str]


@dataclass(frozen=True, slots=True)
class Taken:
    """What became of one fact. `node_id`: None for a machine that is no node here."""

    fact: CloudFact
    disposition: Disposition
    reason: str
    node_id: str | None = None
    lease_id: int | None = None


@dataclass(frozen=True, slots=True)
class _Found:
    node_id: str
    lease_id: int | None
    life: Life | None


def take_facts(session: Session, facts: Sequence[CloudFact], *, now: datetime) -> tuple[Taken, ...]:
    """Store these facts, and wake the agents of jobs that have to leave a node because of them. What is foreign is only
    counted."""
    facts = [fact.bounded() for fact in facts]
    nodes = _lock_machines(session, {(fact.provider, fact.provider_id) for fact in facts}, now)
    leases = {found.lease_id for found in nodes.values() if found.lease_id is not None}
    notices = notices_of_leases(session, leases)
    before = {lease_id: found.known(now) for lease_id, found in notices.items()}
    taken, heard, changed = [], [], {}
    for fact in sorted(facts, key=lambda item: item.said_at):
        found = nodes.get((fact.provider, fact.provider_id))
        judgement = judge(fact, _machine(notices, found, now), now)
        if found is not None:
            if judgement.notice is not None and found.lease_id is not None:
                for notice in judgement.notices:
                    notices[found.lease_id].add(notice, lease_id=found.lease_id, now=now)
                changed[found.node_id] = found.lease_id
            heard.append((fact, found, judgement))
        node_id, lease_id = (found.node_id, found.lease_id) if found is not None else (None, None)
        taken.append(Taken(fact, judgement.disposition, judgement.reason, node_id, lease_id))
    store_added(session, notices.values())
    _hear(session, [_hearing(fact, found, judgement, notices, now) for fact, found, judgement in heard])
    urgent = {node: is_urgent(before[lease], notices[lease].known(now), now) for node, lease in changed.items()}
    tell_jobs(session, urgent, now=now)
    if any(judgement.disposition is Disposition.WITHDRAWS for _, _, judgement in heard):
        wake_all(session, now=now)
    examples = {(item.fact.channel, item.disposition): f"{item.reason}: {item.fact.raw}" for item in taken}
    _count(session, Counter((item.fact.channel, item.disposition) for item in taken), examples, now=now)
    return tuple(taken)


def begin_planned(session: Session, *, now: datetime) -> int:
    """Have jobs leave the nodes of which channels of accounts announced work that is near now, see `rules.begun`.
    Returns how many."""
    of_lease = LeaseRow.lease_id == NoticeRow.lease_id, LeaseRow.ended_at.is_(None)
    is_near = NoticeRow.deadline_at > now, NoticeRow.deadline_at <= now + LEAD, NoticeRow.withdrawn_at.is_(None)
    is_advice = NoticeRow.kind == NoticeKind.REBALANCE.value, NoticeRow.source.in_(ACCOUNT_CHANNELS)
    near = select(NoticeRow.node_id, LeaseRow.lease_id).join(LeaseRow, and_(*of_lease)).where(*is_near, *is_advice)
    found = {row.node_id: row.lease_id for row in session.execute(near.distinct())}
    if not found:
        return 0
    locked = select(NodeRow.node_id).where(NodeRow.node_id.in_(list(found))).order_by(NodeRow.node_id)
    session.execute(locked.with_for_update(key_share=True)).all()
    # Only now: a report that was at work meanwhile may have ended the lease.
    still = LeaseRow.lease_id.in_(list(found.values())), LeaseRow.ended_at.is_(None)
    notices = notices_of_leases(session, session.scalars(select(LeaseRow.lease_id).where(*still)).all())
    urgent: dict[str, bool] = {}
    for node_id, lease_id in found.items():
        before = notices[lease_id].known(now) if lease_id in notices else ()
        for notice in begun(before, now):
            notices[lease_id].add(notice, lease_id=lease_id, now=now)
            urgent[node_id] = is_urgent(before, notices[lease_id].known(now), now)
    store_added(session, notices.values())
    tell_jobs(session, urgent, now=now)
    return len(urgent)


def take_unread(session: Session, messages: Iterable[Unread], *, now: datetime) -> None:
    """Keep and count messages that nobody can read."""
    counted: Counter[tuple[str, Disposition]] = Counter()
    examples, kept, rows = {}, {}, []
    for message in messages:
        key = message.channel, Disposition.MALFORMED
        counted[key] += 1
        examples[key] = f"{message.reason}: {message.raw}"
        if message.channel not in kept:
            recent = HearingRow.heard_at > now - UNREAD_KEPT_FOR, HearingRow.disposition == Disposition.MALFORMED
            of_channel = select(func.count()).where(HearingRow.channel == message.channel, *recent)
            kept[message.channel] = session.execute(of_channel).scalar_one()
        if kept[message.channel] < UNREAD_KEPT_MAX:
            kept[message.channel] += 1
            rows.append(
                {
                    "channel": message.channel,
                    "message_id": fitting(message.message_id, NAME_CHARS_MAX),
                    "heard_at": now,
                    "disposition": Disposition.MALFORMED.value,
                    "reason": fitting(message.reason),
                    "raw": fitting(message.raw, RAW_CHARS_MAX),
                    "kind": "",
                }
            )
    _hear(session, rows)
    _count(session, counted, examples, now=now)


def count_only(session: Session, channel: str, reasons: Sequence[str], *, now: datetime) -> None:
    """Messages that say nothing about any machine going, such as that one has started: none of them is kept."""
    key = channel, Disposition.NOTED
    if reasons:
        _count(session, Counter({key: len(reasons)}), {key: reasons[-1]}, now=now)


def hear_from_agent(
    session: Session, fact: NoticeFact, lease: LeaseRow, occurrence_id: int | None, *, is_first: bool, now: datetime
) -> None:
    """Note what an agent heard itself, beside what the channels of the account tell. `is_first`: no other channel had
    said so before."""
    if fact.withdrawn_utc is not None:
        disposition, reason = Disposition.WITHDRAWS, f"{fact.source} takes it back; what others say stays"
    elif fact.kind is NoticeKind.REBALANCE:
        disposition, reason = Disposition.ADVICE, ADVICE_MEANS
    elif is_first:
        disposition, reason = Disposition.ACTS, "the first to say so"
    else:
        disposition, reason = Disposition.ADDS, "another channel said so before"
    times = (fact.first_seen_utc, fact.deadline_utc, fact.withdrawn_utc)
    names = ("" if at is None else at.isoformat() for at in times)
    values = {
        "channel": fact.source,
        "message_id": "/".join((str(lease.lease_id), fact.kind, *names, *([fact.event_id] if fact.event_id else []))),
        "node_id": fact.node_id,
        "lease_id": lease.lease_id,
        "kind": fact.kind.value,
        "deadline_at": fact.deadline_utc,
        "heard_at": now,
        "disposition": disposition.value,
        "reason": reason,
        "raw": fact.raw,
        "occurrence_id": occurrence_id,
    }
    _hear(session, [values])


def forget_oldest_heard(session: Session, lease: LeaseRow) -> None:
    """Of what agents heard of this lease themselves, keep the newest HEARD_OF_LEASE_MAX. What its cloud told the
    account stays."""
    of_agents = (
        HearingRow.node_id == lease.node_id,
        HearingRow.lease_id == lease.lease_id,
        HearingRow.provider.is_(None),
    )
    newest = select(HearingRow.hearing_id).where(*of_agents).order_by(HearingRow.hearing_id.desc())
    oldest = delete(HearingRow).where(HearingRow.hearing_id.in_(newest.offset(HEARD_OF_LEASE_MAX)))
    session.execute(oldest.execution_options(synchronize_session=False))


def note_channel(session: Session, channel: str, provider: Provider, *, trouble: str = "", now: datetime) -> None:
    """A replica has asked the channel: with success, or not and why."""
    row = {"channel": channel, "provider": provider.value, "trouble": ""}
    if not trouble:
        statement = insert(ChannelRow).values(row | {"ok_at": now})
        ok_at = {"ok_at": func.greatest(ChannelRow.ok_at, now)}
        session.execute(statement.on_conflict_do_update(index_elements=["channel"], set_=ok_at))
        return
    row |= {"trouble": fitting(trouble), "trouble_at": now, "trouble_since": now}
    goes_on = case(
        (ChannelRow.trouble_at > func.coalesce(ChannelRow.ok_at, ChannelRow.trouble_since), ChannelRow.trouble_since),
        (ChannelRow.ok_at.is_(None), func.coalesce(ChannelRow.trouble_since, now)),
        else_=now,
    )
    changed = {"trouble": row["trouble"], "trouble_at": now, "trouble_since": goes_on}
    session.execute(insert(ChannelRow).values(row).on_conflict_do_update(index_elements=["channel"], set_=changed))


def _lock_machines(session: Session, names: set[_Name], now: datetime) -> dict[_Name, _Found]:
    """The nodes that these machines are now, locked in order of id, with their open leases."""
    if not names:
        return {}
    wanted = sorted((provider.value, provider_id) for provider, provider_id in names)
    present = tuple_(InstanceRow.provider, InstanceRow.provider_id).in_(wanted) & InstanceRow.released_at.is_(None)
    machines = select(InstanceRow.node_id).where(present, InstanceRow.node_id.is_not(None))
    node_ids = sorted({node_id for node_id in session.scalars(machines) if node_id is not None})
    if not node_ids:
        return {}
    locked = select(NodeRow.node_id).where(NodeRow.node_id.in_(node_ids)).order_by(NodeRow.node_id)
    session.execute(locked.with_for_update(key_share=True)).all()
    # Only now: a report that was at work meanwhile may have changed who is which machine.
    lease = (LeaseRow.instance_id == InstanceRow.instance_id) & LeaseRow.ended_at.is_(None)
    columns = InstanceRow.instance_id, InstanceRow.provider, InstanceRow.provider_id, InstanceRow.node_id
    statement = select(*columns, LeaseRow.lease_id).outerjoin(LeaseRow, lease)
    rows = session.execute(statement.where(present, InstanceRow.node_id.in_(node_ids))).all()
    lives = _lives(session, node_ids, now)
    return {
        (Provider(row.provider), row.provider_id): _Found(row.node_id, row.lease_id, lives.get(row.instance_id))
        for row in rows
    }


def _lives(session: Session, node_ids: Sequence[str], now: datetime) -> dict[int, Life]:
    """Of each machine of these nodes, as far back as messages matter. A lease that begins where one ended goes on with
    its life: the agent has lived on, and so has the machine."""
    columns = LeaseRow.instance_id, LeaseRow.started_at, LeaseRow.ended_at
    found: dict[int, Life] = {}
    ended: dict[int, datetime] = {}
    is_recent = LeaseRow.ended_at.is_(None) | (LeaseRow.ended_at > now - LIVES_KNOWN_FOR)
    rows = select(*columns).where(LeaseRow.node_id.in_(node_ids), is_recent).order_by(LeaseRow.started_at)
    for machine, started_at, ended_at in session.execute(rows):
        if machine not in found or started_at > ended[machine]:
            found[machine] = Life(started_at, ended.get(machine))
        if ended_at is not None:
            ended[machine] = ended_at
    return found


def _machine(notices: Mapping[int, LeaseNotices], found: _Found | None, now: datetime) -> Machine | None:
    if found is None:
        return None
    if found.lease_id is None:
        return Machine(found.node_id, has_lease=False)
    known = notices[found.lease_id].known(now)
    return Machine(found.node_id, has_lease=True, known=known, life=found.life)


def _hearing(
    fact: CloudFact, found: _Found, judgement: Judgement, notices: Mapping[int, LeaseNotices], now: datetime
) -> dict[str, object]:
    notice, occurrence_id = judgement.notice, None
    if notice is not None and found.lease_id is not None:
        occurrence_id = notices[found.lease_id].occurrence_of(notice)
    return {
        "channel": fact.channel,
        "message_id": fact.message_id,
        "provider": fact.provider.value,
        "provider_id": fact.provider_id,
        "node_id": found.node_id,
        "lease_id": found.lease_id,
        "kind": fact.kind.value,
        "said_at": fact.said_at,
        "deadline_at": fact.deadline_at,
        "heard_at": now,
        "disposition": judgement.disposition.value,
        "reason": fitting(judgement.reason),
        "raw": fact.raw,
        "occurrence_id": occurrence_id,
    }


def _hear(session: Session, rows: Sequence[Mapping[str, object]]) -> None:
    if rows:
        # As one statement with so many rows its text would be made anew for each number of rows.
        session.execute(insert(HearingRow).on_conflict_do_nothing(), list(rows))


def _count(
    session: Session,
    counted: Mapping[tuple[str, Disposition], int],
    examples: Mapping[tuple[str, Disposition], str],
    *,
    now: datetime,
) -> None:
    """In order of key, at the end of the transaction: many write the same few rows."""
    rows = [
        {
            "channel": channel,
            "disposition": disposition.value,
            "heard": counted[channel, disposition],
            "last_at": now,
            "example": fitting(examples[channel, disposition]),
        }
        for channel, disposition in sorted(counted)
    ]
    if not rows:
        return
    statement = insert(HearingCountRow).values(rows)
    new = statement.excluded
    added = {"heard": HearingCountRow.heard + new.heard, "last_at": new.last_at, "example": new.example}
    session.execute(statement.on_conflict_do_update(index_elements=["channel", "disposition"], set_=added))
