"""Answers to reports: the orders of one node, made once for all nodes of a job and kept while nothing has changed.

Whoever changes a row that orders follow gives the job a new `orders_seq` (`service.jobs.operations.touch`). So orders
are made anew when the job's number is another, when time alone may have changed them, and now and then in any case:
those of large jobs every few seconds, since what can wait gives them no number.
"""

import hashlib
import logging
import threading
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import NamedTuple
from uuid import UUID

from pydantic import TypeAdapter
from sqlalchemy import DateTime, bindparam, text
from sqlalchemy.orm import Session

from agent.protocol.sync import SyncOrders
from agent.protocol.wake_up import WakeOrders
from liver_core.layout.limits import NODES_MAX
from service.jobs.operations import ALL_WOKEN_UP_TO_NODES, note_unmade
from service.jobs.queries import LIST_MAX
from service.nodes.skew import in_node_time, off_by
from service.sync.intake import Intake
from service.sync.orders import OwnPart, SharedOrder, Unmade, own_part, shared_orders

MADE_AGAIN_AFTER = timedelta(seconds=30)
"""However sure it seems that nothing has changed."""
LARGE_MADE_AGAIN_AFTER = timedelta(seconds=2)
"""Of jobs of more than `ALL_WOKEN_UP_TO_NODES`."""
BUILDERS = 64
WAKE_CHARS_MAX = 64 * 1024
"""Of one job in a wake-up. Larger orders are in the answer to the report that the agent is woken for."""
_NEIGHBOURS = {"roster", "peers"}
_OWN = {"standing_plans", "probe"}

_STANDING = text(
    """
    SELECT job_id, orders_seq, next_generation, active_generation, state, checkpoints_asked, checkpoints_answered,
           reason, no_orders_because
      FROM jobs
      JOIN LATERAL (SELECT role, ends_at FROM job_grants
                     WHERE job_grants.job_id = jobs.job_id AND job_grants.node_id = :node_id
                     ORDER BY grant_id DESC LIMIT 1) AS newest ON newest.role IS NOT NULL OR newest.ends_at > :now
     WHERE job_id IN (SELECT unnest(CAST(:job_ids AS text[]))
                      UNION SELECT job_id FROM job_members WHERE node_id = :node_id)
     ORDER BY job_id
    """
).bindparams(bindparam("now", type_=DateTime(timezone=True)))
# Of those whose part has not ended: a later machine with the name of a node may be asked for, too.
_STANDING_NODES = text(
    """
    SELECT asked.node_id, job_id, orders_seq, next_generation, active_generation, state, checkpoints_asked,
           checkpoints_answered, reason, no_orders_because
      FROM unnest(CAST(:node_ids AS text[]), CAST(:job_ids AS text[])) AS asked (node_id, job_id)
      JOIN jobs USING (job_id)
      JOIN LATERAL (SELECT role FROM job_grants
                     WHERE job_grants.job_id = jobs.job_id AND job_grants.node_id = asked.node_id
                     ORDER BY grant_id DESC LIMIT 1) AS newest ON newest.role IS NOT NULL
    """
)
_OWN_PART = TypeAdapter(OwnPart)
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Rendered:
    """A job's order as text. `rest`: without what it has of its neighbours, and without what is a node's own."""

    shared: SharedOrder
    rest: str
    neighbours: str
    neighbours_digest: str
    digest: str


class _Kept(NamedTuple):
    key: tuple[object, ...]
    made_at: datetime
    rendered: Rendered | Unmade


class KeptOrders:
    """The orders of jobs as they were made last, by job; at most `most`."""

    def __init__(self, *, most: int = LIST_MAX) -> None:
        self._most = most
        self._kept: dict[str, _Kept] = {}
        self._lock = threading.Lock()
        # All nodes of a job are woken at once: one of them makes the order, and the others wait for it.
        self._building = tuple(threading.Lock() for _ in range(BUILDERS))

    def of(
        self, session: Session, standing: "StandingNow", *, lost_after_s: float, now: datetime
    ) -> Rendered | Unmade | None:
        """The order of the job that stands so; None if it is gone meanwhile."""
        key = (*standing.of_orders, lost_after_s)
        found = self._find(key, now)
        if found is not None:
            return found
        with self._building[hash(standing.job_id) % BUILDERS]:
            found = self._find(key, now)
            if found is not None:
                return found
            made = shared_orders(session, (standing.job_id,), lost_after_s=lost_after_s, now=now)
            if not made:
                return None
            return self._keep(key, made[standing.job_id], now)

    def make(self, session: Session, standing: Iterable["StandingNow"], *, lost_after_s: float, now: datetime) -> None:
        """Make what is not kept of the jobs that stand so, all of it together."""
        keys = {row.job_id: (*row.of_orders, lost_after_s) for row in standing}
        wanted = [job_id for job_id, key in keys.items() if self._find(key, now) is None]
        for job_id, shared in shared_orders(session, wanted, lost_after_s=lost_after_s, now=now).items():
            self._keep(keys[job_id], shared, now)

    def _find(self, key: tuple[object, ...], now: datetime) -> Rendered | Unmade | None:
        kept = self._kept.get(str(key[0]))
        if kept is None or kept.key != key:
            return None
        is_over, holds = False, MADE_AGAIN_AFTER
        if isinstance(kept.rendered, Rendered):
            shared = kept.rendered.shared
            is_over = shared.changes_at is not None and now >= shared.changes_at
            holds = LARGE_MADE_AGAIN_AFTER if len(shared.order.peers) > ALL_WOKEN_UP_TO_NODES else holds
        return kept.rendered if timedelta(0) <= now - kept.made_at < holds and not is_over else None

    def _keep(self, key: tuple[object, ...], made: SharedOrder | Unmade, now: datetime) -> Rendered | Unmade:
        job_id = str(key[0])
        if isinstance(made, Unmade):
            _log.error("job %s: its nodes get no orders, since none can be made: %s", job_id, made.because)
        rendered = made if isinstance(made, Unmade) else render(made)
        with self._lock:
            self._kept.pop(job_id, None)
            if len(self._kept) >= self._most:
                del self._kept[next(iter(self._kept))]
            self._kept[job_id] = _Kept(key, now, rendered)
        return rendered


class Told(NamedTuple):
    """What the last answer to a node said, where that was the order of one job. `neighbours`: their digest. `ahead`: by
    how much the node's clock is."""

    job_id: str
    orders_seq: int
    neighbours: str
    ahead: timedelta


class ToldOrders:
    """The newest orders that this process told each node, by which it knows what is news to it; of at most `most`."""

    def __init__(self, *, most: int = NODES_MAX) -> None:
        self._most = most
        self._told: dict[str, Told] = {}
        self._lock = threading.Lock()

    def of(self, node_id: str) -> Told | None:
        """None: nothing yet, or the orders of no job, or of several."""
        return self._told.get(node_id)

    def note(self, node_id: str, told: Told | None) -> None:
        """The node is told this."""
        with self._lock:
            self._told.pop(node_id, None)
            if told is None:
                return
            if len(self._told) >= self._most:
                del self._told[next(iter(self._told))]
            self._told[node_id] = told


def answer(intake: Intake, kept: KeptOrders, told: ToldOrders, *, poll_s: float, lost_after_s: float) -> str:
    """The answer to a report that is committed, as JSON: orders for all jobs that the node is a member of or still has
    ranks of. What the report names as known is left out, and so is a job whose order cannot be made: that is noted."""
    node, report = intake.node, intake.report
    standing = standing_of(intake)
    ahead = off_by(node.clock_ahead_s)
    found: list[tuple[Rendered, str]] = []
    news: dict[str, str] = {}
    for row in standing:
        made = kept.of(intake.session, row, lost_after_s=lost_after_s, now=intake.now)
        if isinstance(made, Rendered):
            found.append(_for_node(made, node.node_id, ahead))
        because = made.because if isinstance(made, Unmade) else ""
        if because != row.no_orders_because:
            news[row.job_id] = because
    if news:
        note_unmade(intake.session, news)
        intake.session.commit()
    digest = _digest(*(part for rendered, own in found for part in (rendered.digest, own)))
    is_one = len(standing) == len(found) == 1
    neighbours = found[0][0].neighbours_digest if is_one else ""
    told.note(node.node_id, Told(standing[0].job_id, standing[0].orders_seq, neighbours, ahead) if is_one else None)
    is_known = digest == report.orders_known
    envelope = SyncOrders(
        orders_seq=max((row.orders_seq for row in standing), default=0),
        issued_utc=intake.now,
        accepted_incarnation=UUID(str(node.agent_incarnation)),
        accepted_report_seq=node.report_seq,
        orders_digest=digest,
        unchanged=is_known,
        refusals=tuple(intake.refusals),
        poll_s=poll_s,
        progress_s=poll_s,
    )
    jobs = () if is_known else (_text(rendered, own, report.neighbours_known) for rendered, own in found)
    return f'{envelope.model_dump_json(exclude={"jobs"})[:-1]},"jobs":[{",".join(jobs)}]}}'


def news_for(node_id: str, told: Told, standing: "StandingNow", rendered: Rendered, *, now: datetime) -> str | None:
    """The orders of a node that was told only of this job, as JSON of `WakeOrders`; None where they are no news, and
    where they are large."""
    if standing.orders_seq <= told.orders_seq:
        return None
    moved, own = _for_node(rendered, node_id, told.ahead)
    job = _text(moved, own, (told.neighbours,))
    if len(job) > WAKE_CHARS_MAX:
        return None
    digest = _digest(moved.digest, own)
    head = WakeOrders(orders_seq=standing.orders_seq, issued_utc=now, orders_digest=digest, jobs=())
    return f'{head.model_dump_json(exclude={"jobs"})[:-1]},"jobs":[{job}]}}'


class StandingNow(NamedTuple):
    """Whatever changes with the orders of a job, and why it has none."""

    job_id: str
    orders_seq: int
    next_generation: int
    active_generation: int | None
    state: str
    checkpoints_asked: int
    checkpoints_answered: int
    reason: str
    no_orders_because: str

    @property
    def of_orders(self) -> tuple[object, ...]:
        """While it stays, so do the orders."""
        return self[:-1]


def standing_of(intake: Intake) -> tuple[StandingNow, ...]:
    """How each job stands that the node is a member of, or reports ranks of. It needs a grant for either."""
    if intake.standing is not None:
        # What was committed since then wakes the agent once more.
        jobs = [item.job for item in intake.standing if item.is_granted]
        return tuple(StandingNow(*(getattr(job, name) for name in StandingNow._fields)) for job in jobs)
    job_ids = list({rank.job_id for rank in intake.report.ranks})
    values = {"node_id": intake.node.node_id, "job_ids": job_ids, "now": intake.now}
    return tuple(StandingNow(*row) for row in intake.session.execute(_STANDING, values))


def standing_nodes(session: Session, asked: Iterable[tuple[str, str]]) -> dict[tuple[str, str], StandingNow]:
    """How these jobs stand, for those of the nodes that have a part in them. `asked`: nodes and jobs."""
    node_ids, job_ids = (list(names) for names in zip(*asked, strict=True))
    rows = session.execute(_STANDING_NODES, {"node_ids": node_ids, "job_ids": job_ids})
    return {(row.node_id, row.job_id): StandingNow(*row[1:]) for row in rows}


def render(shared: SharedOrder) -> Rendered:
    """The text of a job's order, and the digests of its parts."""
    order = shared.order
    neighbours = order.model_dump_json(include=_NEIGHBOURS)[1:-1] if order.roster is not None else ""
    digest = _digest(neighbours) if neighbours else ""
    # Without a roster there are few neighbours, if any: they are not worth a digest.
    named = order.model_copy(update={"neighbours": digest})
    rest = named.model_dump_json(exclude=_OWN | (_NEIGHBOURS if neighbours else set()))[1:-1]
    return Rendered(shared, rest, neighbours, digest, _digest(rest))


def _for_node(rendered: Rendered, node_id: str, ahead: timedelta) -> tuple[Rendered, str]:
    """The order by the node's own clock, and what only this node is told, as JSON."""
    moved = _in_node_time(rendered, ahead)
    return moved, _OWN_PART.dump_json(own_part(moved.shared, node_id)).decode()


def _in_node_time(rendered: Rendered, ahead: timedelta) -> Rendered:
    """By the node's own clock, where that is off."""
    order = rendered.shared.order
    if not ahead or (not order.notices and order.handoff is None and order.steps_from_utc is None):
        return rendered
    shared = rendered.shared
    return render(SharedOrder(in_node_time(order, ahead), shared.ready, shared.silent, shared.changes_at))


def _text(rendered: Rendered, own: str, known: tuple[str, ...]) -> str:
    is_known = rendered.neighbours_digest in known
    parts = (rendered.rest, "" if is_known else rendered.neighbours, own[1:-1])
    return "{" + ",".join(part for part in parts if part) + "}"


def _digest(*parts: str) -> str:
    found = hashlib.blake2b(digest_size=16)
    for part in parts:
        found.update(f"{len(part)}:{part}".encode())
    return found.hexdigest()
