"""Stores what a node reports about itself, and marks a node gone."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from pydantic import TypeAdapter
from sqlalchemy import bindparam, func, select, text
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.orm import Session
from sqlalchemy.orm.attributes import set_committed_value

from agent.protocol import errors
from agent.protocol.errors import FieldProblem, Problem
from agent.protocol.sync import NodeInfo, RankStatus, SyncReport
from service.db.base import among
from service.leases.queries import open_lease
from service.ledger.operations import close_lease
from service.ledger.rules import OVER, Spent
from service.ledger.tables import Cause
from service.ledger.witnesses import settle_gone
from service.nodes.rules import announces_its_end, has_outlived_its_end
from service.nodes.skew import Skew, measured
from service.nodes.tables import IncarnationRow, NodeRow, NodeState
from service.problems import ProblemError

LOCK_WAIT_TOGETHER = "250ms"
STARTS_KEPT_MAX = 64
"""Starts of a node's agent that are known, the newest: a report of one before them counts as that of another start."""
_LOCK = (
    select(NodeRow)
    .where(NodeRow.node_id == bindparam("node_id"))
    .with_for_update(key_share=True)
    .execution_options(populate_existing=True)
)
_FORGET_STARTS = text(
    """
    DELETE FROM agent_incarnations WHERE incarnation IN (
        SELECT incarnation FROM agent_incarnations WHERE node_id = :node_id AND incarnation <> :incarnation
         ORDER BY first_seen_at DESC, incarnation OFFSET :kept)
    """
)
_LOCK_FREE = (
    select(
        NodeRow,
        # Seen before any other statement: nobody may hold up the reports of all the others for long.
        func.set_config("lock_timeout", LOCK_WAIT_TOGETHER, True),
    )
    .where(among(NodeRow.node_id, "node_ids"))
    .order_by(NodeRow.node_id)
    .with_for_update(key_share=True, skip_locked=True, of=NodeRow)
    .execution_options(populate_existing=True)
)
_RANKS = TypeAdapter(tuple[RankStatus, ...])
_STORE_HEARD = text(
    """
    UPDATE nodes
       SET report_seq = said.report_seq, last_seen_at = :now, excused_until = NULL,
           ranks = CAST(said.ranks AS jsonb), clock_ahead_s = said.clock_ahead_s, clock_at = said.clock_at
      FROM unnest(CAST(:node_ids AS text[]), CAST(:report_seqs AS bigint[]), CAST(:ranks AS text[]),
                  CAST(:clocks_ahead_s AS float8[]), CAST(:clocks_at AS timestamptz[]))
           AS said (node_id, report_seq, ranks, clock_ahead_s, clock_at)
     WHERE nodes.node_id = said.node_id
    """
)


@dataclass(frozen=True, slots=True)
class Heard:
    """What a report changes of a node of which it says nothing new."""

    node_id: str
    report_seq: int
    ranks: tuple[RankStatus, ...]
    clock: Skew

    def show(self, node: NodeRow) -> None:
        """In a row that was read before, for an answer: what is stored already is not stored again."""
        set_committed_value(node, "report_seq", self.report_seq)
        set_committed_value(node, "clock_ahead_s", self.clock.ahead_s)


@dataclass(frozen=True, slots=True)
class Reporter:
    """The node that reports, its row locked. `is_new`: its first report ever. `is_news`: the report is not a repeat.
    `was_away`: it counted as gone, but its agent has lived on."""

    node: NodeRow
    is_new: bool
    is_news: bool
    was_away: bool


def lock_node(session: Session, report: SyncReport, *, now: datetime) -> Reporter:
    """The node's row, locked; created at the first report.

    Raises 409 for a report of an agent start that a later one has replaced: a second agent with the same name, or a
    delayed message, must not overwrite the report of the present agent.
    """
    key = {"node_id": report.node.node_id}
    node = session.scalars(_LOCK, key).one_or_none()
    is_new = node is None
    was_away = node is not None and node.state == NodeState.GONE and node.agent_incarnation == report.agent_incarnation
    if node is None:
        session.execute(insert(NodeRow).values(_columns(report, now)).on_conflict_do_nothing())
        node = session.scalars(_LOCK, key).one()
        _remember(session, report, now=now)
    elif node.agent_incarnation != report.agent_incarnation:
        if session.get(IncarnationRow, report.agent_incarnation) is not None:
            raise _replaced(node, report)
        _remember(session, report, now=now)
        node.agent_incarnation = report.agent_incarnation
        node.report_seq = 0
    return Reporter(node, is_new=is_new, is_news=report.report_seq > node.report_seq, was_away=was_away)


def _remember(session: Session, report: SyncReport, *, now: datetime) -> None:
    values = {"incarnation": report.agent_incarnation, "node_id": report.node.node_id, "first_seen_at": now}
    session.execute(insert(IncarnationRow).values(values).on_conflict_do_nothing())
    session.execute(_FORGET_STARTS, {**values, "kept": STARTS_KEPT_MAX - 1})


def store_node(node: NodeRow, report: SyncReport, *, now: datetime) -> bool:
    """Replace the node's previous report. Returns whether anything that plans depend on has changed."""
    before = _matters(node)
    for name, value in _columns(report, now).items():
        if name != "first_seen_at":
            setattr(node, name, value)
    node.report_seq = report.report_seq
    return before != _matters(node)


def lock_free_nodes(session: Session, node_ids: Iterable[str]) -> list[NodeRow]:
    """Those of these nodes whose rows nobody else has locked; they are locked, in order of id. From here on, the
    transaction waits for nobody for long."""
    return [node for node, _ in session.execute(_LOCK_FREE, {"node_ids": list(node_ids)})]


def heard_of(node: NodeRow, report: SyncReport, *, arrived: datetime) -> Heard:
    """What this report changes."""
    return Heard(node.node_id, report.report_seq, report.ranks, skew_of(node, report, arrived=arrived))


def store_heard(session: Session, heard: Sequence[Heard], *, now: datetime) -> None:
    """Store what reports of locked nodes change, all in one statement."""
    if heard:
        values = {
            "node_ids": [item.node_id for item in heard],
            "report_seqs": [item.report_seq for item in heard],
            "ranks": [_RANKS.dump_json(item.ranks).decode() for item in heard],
            "clocks_ahead_s": [item.clock.ahead_s for item in heard],
            "clocks_at": [item.clock.at for item in heard],
        }
        session.execute(_STORE_HEARD, values | {"now": now})


def skew_of(node: NodeRow, report: SyncReport, *, arrived: datetime) -> Skew:
    """How far the node's clock is ahead, by all that it has reported up to this."""
    known = None
    if node.clock_ahead_s is not None and node.clock_at is not None:
        known = Skew(node.clock_ahead_s, node.clock_at)
    answer = {"answered": report.answered_utc, "ago_s": report.answered_ago_s}
    return measured(known, issued=report.issued_utc, arrived=arrived, **answer)


def has_changed(node: NodeRow, report: SyncReport) -> bool:
    """Whether the node says anything of itself that it did not say last time, but how its ranks are."""
    info = report.node
    if info.provider_id is not None and (info.provider_id, info.zone) != (node.provider_id, node.zone):
        return True
    known = node.provider, node.private_address, node.device, node.job_user, node.agent_version
    said = info.provider.value, info.private_address, info.device, info.job_user, report.agent_version
    return known != said or differs(node, info)


def differs(node: NodeRow, info: NodeInfo) -> bool:
    """Whether the node has more to say than how its ranks are: it was silent or gone, is reached elsewhere, has other
    slots, or its notice source stands otherwise. That concerns every job that it is a member of."""
    source = info.notice_source
    same = (node.state, node.slots, node.pool, node.peer_url) == (NodeState.READY, info.slots, info.pool, info.peer_url)
    return not same or (source is not None and source.model_dump(mode="json") != node.notice_source)


def _matters(node: NodeRow) -> tuple[object, ...]:
    end = announces_its_end(node.notice_source), has_outlived_its_end(node.notice_source)
    return node.state, node.slots, node.pool, node.peer_url, *end


_NOTE_ANSWERS = text(
    """
    UPDATE nodes SET answered_at = :now
     WHERE node_id IN (SELECT nodes.node_id FROM nodes
                        JOIN job_members ON job_members.node_id = nodes.node_id
                       WHERE (job_members.job_id, nodes.node_id)
                             IN (SELECT * FROM unnest(CAST(:job_ids AS text[]), CAST(:node_ids AS text[])))
                         AND EXISTS (SELECT FROM job_members AS own
                                      WHERE own.job_id = job_members.job_id AND own.node_id = :reporter)
                         AND nodes.state <> 'ready' FOR UPDATE OF nodes SKIP LOCKED)
    """
)


_NOTE_TRIES = text(
    """
    WITH said AS (SELECT * FROM unnest(CAST(:node_ids AS text[]), CAST(:tried AS timestamptz[])) AS said (node_id, at)),
         free AS MATERIALIZED (
              SELECT nodes.node_id, said.at FROM nodes JOIN said ON said.node_id = nodes.node_id
               WHERE nodes.state <> 'gone' AND nodes.last_seen_at < said.at
               ORDER BY nodes.node_id FOR NO KEY UPDATE OF nodes SKIP LOCKED)
    UPDATE nodes SET tried_at = greatest(nodes.tried_at, free.at) FROM free WHERE nodes.node_id = free.node_id
    """
)


def note_answers(session: Session, report: SyncReport, *, now: datetime) -> None:
    """The machines of these nodes answer the reporting one, though the service does not hear their agents. Only what is
    said of a member of a job that the reporting node is a member of too. Never waits for a lock: it is said again."""
    asked = [(item.job_id, item.node_id) for item in report.answering]
    if asked:
        job_ids, node_ids = zip(*asked, strict=True)
        values = {"job_ids": list(job_ids), "node_ids": list(node_ids), "reporter": report.node.node_id, "now": now}
        session.execute(_NOTE_ANSWERS, values)


def note_tries(session: Session, tried: Mapping[str, datetime]) -> None:
    """When these nodes last sent reports that were not taken, or wait, through no fault of theirs. A node that is being
    stored right now is left out."""
    if tried:
        session.execute(_NOTE_TRIES, {"node_ids": list(tried), "tried": list(tried.values())})


def mark_gone(session: Session, node: NodeRow, *, reason: str, now: datetime) -> None:
    """Mark the node gone: its lease ends, and the time since its last report is accounted as lost, to the jobs of its
    ranks. Where others say that it worked, that counts; the rest is put right if its agent reports again."""
    lost = {rank["slot"]: Spent(Cause.LOST, rank["job_id"], rank["generation"]) for rank in _alive(node)}
    node.state = NodeState.GONE
    node.ranks = []
    lease = open_lease(session, node.node_id)
    if lease is not None:
        spent = [lost.get(slot, Spent(Cause.LOST)) for slot in range(lease.slots)]
        close_lease(session, lease=lease, at=now, spent=spent, reason=reason)
        session.flush()
        settle_gone(session, [node.node_id], since=node.last_seen_at)


def _alive(node: NodeRow) -> list[dict[str, Any]]:
    return [rank for rank in node.ranks if rank["stage"] not in OVER]


def _columns(report: SyncReport, now: datetime) -> dict[str, object]:
    node = report.node
    return {
        "node_id": node.node_id,
        "provider": node.provider.value,
        "pool": node.pool,
        "slots": node.slots,
        "peer_url": node.peer_url,
        "private_address": node.private_address,
        "device": node.device,
        "job_user": node.job_user,
        "agent_version": report.agent_version,
        "agent_incarnation": report.agent_incarnation,
        "report_seq": 0,
        "state": NodeState.READY.value,
        "first_seen_at": now,
        "last_seen_at": now,
        "excused_until": None,
        "ranks": [rank.model_dump(mode="json") for rank in report.ranks],
        "notice_source": node.notice_source.model_dump(mode="json") if node.notice_source is not None else None,
    }


def _replaced(node: NodeRow, report: SyncReport) -> ProblemError:
    return ProblemError(
        Problem(
            title="Agent was replaced",
            status=409,
            code=errors.REPLACED,
            detail=(
                f"node {node.node_id} is now served by agent start {node.agent_incarnation}; start "
                f"{report.agent_incarnation} was replaced and must end"
            ),
            errors=(FieldProblem(field="agent_incarnation", rule="must be the newest start of this node's agent"),),
        )
    )
