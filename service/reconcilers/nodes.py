"""The node reconciler: marks nodes silent, then gone, closes their leases and the ledger, makes their jobs due."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

from sqlalchemy import func, select
from sqlalchemy.orm import Session, aliased

from liver_core.layout.limits import listed
from service.context import Context
from service.jobs.operations import lock_jobs, touch
from service.jobs.tables import ENDED, JobMemberRow, JobRow, MemberRole
from service.nodes.operations import mark_gone, note_tries
from service.nodes.rules import DEAF_MOST_S, TOGETHER_S, answers, are_many, heard_until, state_of
from service.nodes.tables import NodeRow, NodeState
from service.notices.queries import open_notices

BATCH = 256
MISSED_TICKS_MAX = 5.0
_LAST_AT = func.greatest(NodeRow.last_seen_at, NodeRow.tried_at)
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Unheard:
    """One node that has not reported for a while: when it last did or tried to, and how long that counts."""

    node: NodeRow
    last_at: datetime
    counted_s: float


class NodeWatch:
    """Judges silence, by what the service's `Listening` says of the time in which it could not hear. `doubt`: why some
    nodes that are not heard do not count as lost; empty while there are none."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._listening = context.listening
        self._listening.begins(context.clock())
        self._last_tick = self._listening.since
        self._has_failed = False
        self._is_deaf = False
        self.doubt = ""

    def tick(self) -> int:
        """Check every node that has not reported for a while. Returns how many changed."""
        now = self._context.clock()
        self._note_gap(now)
        self._has_failed = True
        changed = self._look(now)
        # Only now: a tick that fails has heard nobody.
        self._last_tick, self._has_failed = now, False
        return changed

    def _note_gap(self, now: datetime) -> None:
        """What lies between the last look and this one, if that is too long or a look failed, could not be heard."""
        if (now - self._last_tick).total_seconds() > max(MISSED_TICKS_MAX, 4 * self._context.settings.reconcile_s):
            self._listening.begins(now)
        elif self._has_failed:
            self._listening.was_deaf(self._last_tick, now)

    def _look(self, now: datetime) -> int:
        settings = self._context.settings
        with self._context.sessions.begin() as session:
            note_tries(session, self._listening.take_tried(now))
            horizon = now - timedelta(seconds=settings.silent_after_s)
            living = select(func.max(_LAST_AT), func.count(), func.count().filter(horizon <= _LAST_AT))
            newest_at, nodes, heard = session.execute(living.where(NodeRow.state != NodeState.GONE)).one()
            until = heard_until(newest_at, nodes=nodes, now=now, silent_after_s=settings.silent_after_s)
            if self._is_deaf and until == now:
                # The others may need a moment longer than the first: they did not stop the job's ranks meanwhile.
                self._listening.begins(now)
            self._say_deaf(until < now, nodes)
            found = self._silences(session, now, until, horizon)
            self._excuse(session, found, heard=heard, now=now)
            judged = [(item.node, self._state_of(item, now)) for item in found]
            fallen = [(node, state) for node, state in judged if state not in (node.state, NodeState.READY)]
            # Before the ledger, as whoever stores a report does: else each could wait for the other.
            jobs = _jobs_of(session, [node.node_id for node, _ in fallen])
            for node, state in fallen:
                _log.warning("node %s is %s, last report %s", node.node_id, state, node.last_seen_at.isoformat())
                if state is NodeState.GONE:
                    mark_gone(session, node, reason=f"no report since {node.last_seen_at.isoformat()}", now=now)
                else:
                    node.state = state
            for job in jobs:
                if job.state not in ENDED:
                    touch(session, job, now=now, is_urgent=False)
        return len(fallen)

    def _silences(self, session: Session, now: datetime, until: datetime, horizon: datetime) -> list[Unheard]:
        # Whom nothing can happen to yet does not stand before others.
        may_change = (NodeRow.state == NodeState.READY) | func.coalesce(NodeRow.excused_until <= now, True)
        statement = (
            select(NodeRow)
            .where(NodeRow.state != NodeState.GONE, NodeRow.last_seen_at < horizon, horizon > _LAST_AT, may_change)
            .order_by(NodeRow.last_seen_at)
            .limit(BATCH)
            .with_for_update(skip_locked=True, key_share=True)
        )
        found = []
        for node in session.scalars(statement).all():
            last_at = max(node.last_seen_at, node.tried_at or node.last_seen_at)
            found.append(Unheard(node, last_at, self._listening.silence_s(last_at, until)))
        return found

    def _state_of(self, silence: Unheard, now: datetime) -> NodeState:
        node, settings = silence.node, self._context.settings
        if node.excused_until is not None and now < node.excused_until:
            gone_after_s = float("inf")
        else:
            gone_after_s = settings.stuck_after_s if answers(node.answered_at, now) else settings.gone_after_s
        return state_of(silence.counted_s, silent_after_s=settings.silent_after_s, gone_after_s=gone_after_s)

    def _excuse(self, session: Session, found: Sequence[Unheard], *, heard: int, now: datetime) -> None:
        """Many nodes that fall silent together do not count as lost for a while, where nobody else can tell."""
        silent_s = self._context.settings.silent_after_s
        fallen = [item for item in found if silent_s <= item.counted_s < silent_s + TOGETHER_S]
        if not are_many(len(fallen), heard=heard):
            if not self._is_deaf and self.doubt and not _excused(session, now):
                self.doubt = ""
            return
        certain = _known_by_others(session, [item.node.node_id for item in fallen], now=now, silent_s=silent_s)
        news = [item for item in fallen if item.node.excused_until is None and item.node.node_id not in certain]
        if not news:
            return
        for item in news:
            item.node.excused_until = item.last_at + timedelta(seconds=DEAF_MOST_S)
        session.flush()
        until = max(item.last_at for item in news) + timedelta(seconds=DEAF_MOST_S)
        self.doubt = (
            f"{len(fallen)} of {len(fallen) + heard} nodes fell silent within {TOGETHER_S:.0f} s: this service may be "
            f"cut off from them. Those of which no other node tells do not count as lost before {until:%H:%M:%S} UTC"
        )
        _log.warning("%s: %s", self.doubt, listed(sorted(item.node.node_id for item in news)))

    def _say_deaf(self, is_deaf: bool, nodes: int) -> None:
        if is_deaf and not self._is_deaf:
            self.doubt = (
                f"none of {nodes} nodes is heard any more: this service may be cut off. None counts as lost for "
                f"{DEAF_MOST_S:.0f} s"
            )
            _log.warning("%s", self.doubt)
        elif self._is_deaf and not is_deaf:
            self.doubt = ""
        self._is_deaf = is_deaf


def _jobs_of(session: Session, node_ids: Sequence[str]) -> Sequence[JobRow]:
    """The jobs that these nodes have a part in, locked."""
    if not node_ids:
        return ()
    members = select(JobMemberRow.job_id).where(JobMemberRow.node_id.in_(node_ids))
    return lock_jobs(session, set(session.scalars(members)))


def _excused(session: Session, now: datetime) -> bool:
    excused = select(NodeRow.node_id).where(NodeRow.state == NodeState.SILENT, NodeRow.excused_until > now)
    return session.scalars(excused.limit(1)).first() is not None


def _known_by_others(session: Session, names: Sequence[str], *, now: datetime, silent_s: float) -> set[str]:
    """The nodes that were announced to go, and those of a job of which another node is still heard: it trains on, or
    says what became of them."""
    mine, mate, heard = aliased(JobMemberRow), aliased(JobMemberRow), aliased(NodeRow)
    statement = (
        select(mine.node_id)
        .join(mate, (mate.job_id == mine.job_id) & (mate.node_id != mine.node_id))
        .join(heard, heard.node_id == mate.node_id)
        .where(mine.node_id.in_(names), mine.role != MemberRole.SPARE, mate.role != MemberRole.SPARE)
        .where(heard.last_seen_at >= now - timedelta(seconds=silent_s))
    )
    announced = {row.node_id for row in open_notices(session, now=now, node_ids=names)}
    return announced | set(session.scalars(statement))
