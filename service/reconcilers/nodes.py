"""The node reconciler: marks nodes silent, then gone, closes their leases and the ledger, makes their jobs due."""

import logging
from datetime import datetime, timedelta

from sqlalchemy import func, select
from sqlalchemy.orm import Session

from service.context import Context
from service.jobs.operations import lock_job, touch
from service.jobs.tables import ENDED, JobMemberRow
from service.nodes.operations import mark_gone
from service.nodes.rules import DEAF_MOST_S, answers, heard_until, state_of
from service.nodes.tables import NodeRow, NodeState

BATCH = 256
MISSED_TICKS_MAX = 5.0
_log = logging.getLogger(__name__)


class NodeWatch:
    """Knows since when this process receives reports: a node's silence before that does not count."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._listening_since = context.clock()
        self._last_tick = self._listening_since
        self._is_deaf = False

    def tick(self) -> int:
        """Check every node that has not reported for a while. Returns how many changed."""
        now = self._context.clock()
        settings = self._context.settings
        if (now - self._last_tick).total_seconds() > max(MISSED_TICKS_MAX, 4 * settings.reconcile_s):
            self._listening_since = now
        self._last_tick = now
        changed = 0
        with self._context.sessions.begin() as session:
            living = select(func.max(NodeRow.last_seen_at), func.count()).where(NodeRow.state != NodeState.GONE)
            newest_at, nodes = session.execute(living).one()
            until = heard_until(newest_at, nodes=nodes, now=now, silent_after_s=settings.silent_after_s)
            if self._is_deaf and until == now:
                # The others may need a moment longer than the first: they did not stop the job's ranks meanwhile.
                self._listening_since = now
            self._say_deaf(until < now)
            horizon = now - timedelta(seconds=settings.silent_after_s)
            statement = (
                select(NodeRow)
                .where(NodeRow.state != NodeState.GONE, NodeRow.last_seen_at < horizon)
                .order_by(NodeRow.last_seen_at)
                .limit(BATCH)
                .with_for_update(skip_locked=True, key_share=True)
            )
            due: set[str] = set()
            for node in session.scalars(statement).all():
                state = state_of(
                    last_seen_at=node.last_seen_at,
                    listening_since=self._listening_since,
                    until=until,
                    silent_after_s=settings.silent_after_s,
                    gone_after_s=settings.stuck_after_s if answers(node.answered_at, now) else settings.gone_after_s,
                )
                if state in (node.state, NodeState.READY):
                    continue
                _log.warning("node %s is %s, last report %s", node.node_id, state, node.last_seen_at.isoformat())
                changed += 1
                due |= self._apply(session, node, state, now)
            for job_id in sorted(due):
                job = lock_job(session, job_id)
                if job.state not in ENDED:
                    touch(session, job, now=now)
        return changed

    def _say_deaf(self, is_deaf: bool) -> None:
        if is_deaf and not self._is_deaf:
            _log.warning(
                "no node is heard any more: this service may be cut off; for %.0f s no node counts as lost", DEAF_MOST_S
            )
        self._is_deaf = is_deaf

    def _apply(self, session: Session, node: NodeRow, state: NodeState, now: datetime) -> set[str]:
        if state is NodeState.GONE:
            mark_gone(session, node, reason=f"no report since {node.last_seen_at.isoformat()}", now=now)
        else:
            node.state = state
        return set(session.scalars(select(JobMemberRow.job_id).where(JobMemberRow.node_id == node.node_id)))
