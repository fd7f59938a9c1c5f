"""Calm reports: of nodes whose ranks, if any, stand as they stood, and that say nothing but steps, logs and metrics of
a world at work. Nearly all are calm, so those of many nodes are stored in one transaction: a statement is one for all.

Whoever says anything else is left out here and stored alone (`service.sync.operations`), with the same result. So is
whoever would have to be waited for, if that lasts. What presses goes first (`service.pressing`). Locks are taken in the
same order: nodes, jobs, steps, ledger.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence
from datetime import datetime
from enum import Enum, auto
from functools import partial
from typing import Any, NamedTuple

from sqlalchemy import text
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.orm import Session, sessionmaker

from agent.protocol.sync import SyncReport
from liver_core.handoff import RankStage
from service.gathering import Gathering
from service.jobs.grants import Standing, read_standing
from service.jobs.tables import JobState
from service.lanes import Lane
from service.ledger.operations import OpenLease, grow, open_leases
from service.metrics.operations import store_metrics
from service.nodes.operations import Heard, has_changed, heard_of, lock_free_nodes, store_heard
from service.nodes.skew import in_service_time, off_by
from service.nodes.tables import NodeRow
from service.pressing import Pressing
from service.problems import ProblemError
from service.settings import ServiceSettings
from service.sync.accounts import only_grows
from service.sync.answers import KeptOrders, ToldOrders, answer, standing_of
from service.sync.facts import store_rows
from service.sync.intake import Intake
from service.sync.reading import Reading
from service.sync.sifting import is_all_taken

TOGETHER_S = 0.08
"""Reports that come within it are stored together. Nobody waits for what is in their answers, and one transaction takes
as much processor time as seven reports (docs/benchmarks.md)."""
FACTS_MAX = 256
LOG_CHARS_MAX = 64 * 1024
_MORE = ("notices", "handoffs", "declined", "checkpoints", "stores", "finished", "answering", "wires", "peer_keys")
# A job that is locked by somebody else, whose world is another one by now, or that has ended, is named: what is said of
# it has to be looked at again. `is_busy`: only the lock is in the way.
_PROGRESS = text(
    """
    WITH made AS (SELECT * FROM unnest(CAST(:job_ids AS text[]), CAST(:generations AS bigint[]),
                                       CAST(:steps AS bigint[])) AS made (job_id, generation, step)),
         free AS MATERIALIZED (
              SELECT jobs.job_id, made.step FROM jobs JOIN made ON made.job_id = jobs.job_id
               WHERE jobs.active_generation = made.generation AND jobs.state = 'running' AND jobs.last_step < made.step
               ORDER BY jobs.job_id FOR NO KEY UPDATE OF jobs SKIP LOCKED),
         more AS (UPDATE jobs SET last_step = free.step, last_step_at = :now, standstill = NULL,
                                  highest_step = greatest(jobs.highest_step, free.step)
                    FROM free WHERE jobs.job_id = free.job_id RETURNING jobs.job_id)
    SELECT made.job_id, jobs.job_id IS NOT NULL AS is_busy
      FROM made LEFT JOIN jobs ON jobs.job_id = made.job_id AND jobs.active_generation = made.generation
                              AND jobs.state = 'running'
     WHERE made.job_id NOT IN (SELECT job_id FROM more) AND (jobs.job_id IS NULL OR jobs.last_step < made.step)
    """
)
# Whoever waits in line gets each job in turn, also where somebody has it at every moment.
_LOCK_IN_TURN = text("SELECT FROM jobs WHERE job_id = ANY(CAST(:job_ids AS text[])) ORDER BY job_id FOR NO KEY UPDATE")
BUSY_WAITS_S = (0.01, 0.02, *[0.03] * 6)
"""Who changes a job has it for some milliseconds, and then all of its nodes report at the same time. One that is stored
alone keeps it from the others, which would be stored alone then as well, one after the other: after so many looks
they wait in line together."""
_log = logging.getLogger(__name__)


class Unsettled(Exception):
    """Something has changed since it was read: these reports have to be stored one by one."""


class Left(Enum):
    """Why a report is not stored with others. Not calm: it never will be. Busy: somebody else has its node or job."""

    NOT_CALM = auto()
    BUSY = auto()


class CalmAsk(NamedTuple):
    """One report that may be calm. `is_gone`: whether nobody waits for the answer any more."""

    reading: Reading
    arrived: datetime
    is_gone: Callable[[], bool]


class CalmReports:
    """Those that come while others are stored are stored together, after them."""

    def __init__(
        self,
        lane: Lane,
        orders: KeptOrders,
        told: ToldOrders,
        clock: Callable[[], datetime],
        settings: ServiceSettings,
        pressing: Pressing,
    ) -> None:
        self._lane = lane
        self._orders = orders
        self._told = told
        self._clock = clock
        self._settings = settings
        self._pressing = pressing
        self._gathering: Gathering[CalmAsk, str | Left] = Gathering(self._work, every_s=TOGETHER_S)
        self._in_line: Gathering[CalmAsk, str | Left] = Gathering(partial(self._work, in_turn=True))

    async def answer(self, ask: CalmAsk) -> str | None:
        """The orders, as JSON. None: nothing is stored, and the report has to be stored alone. Raises 503 where too
        many others are at work, and never for what a report says."""
        if not may_be_calm(ask.reading.report):
            return None
        for wait_s in BUSY_WAITS_S:
            found = await self._gathering.ask(ask)
            if found is not Left.BUSY:
                return None if isinstance(found, Left) else found
            await asyncio.sleep(wait_s)
        found = await self._in_line.ask(ask)
        return None if isinstance(found, Left) else found

    async def _work(self, asks: Sequence[CalmAsk], *, in_turn: bool = False) -> Sequence[str | Left]:
        try:
            return await self._lane.run(self._answers, self._lane.sessions, asks, in_turn)
        except (SQLAlchemyError, Unsettled) as error:
            _log.debug("%d reports are stored one by one: %s", len(asks), error)
        except ProblemError:
            raise
        except Exception:
            # Whoever sent what nobody expected must not hurt the others: alone, it is the only one that fails.
            _log.exception("%d reports are stored one by one", len(asks))
        return [Left.NOT_CALM] * len(asks)

    def _answers(self, sessions: sessionmaker[Session], asks: Sequence[CalmAsk], in_turn: bool) -> list[str | Left]:
        settings = self._settings
        limits = {"poll_s": settings.agent_poll_s, "lost_after_s": settings.lost_after_s}
        silences = {"silent_after_s": settings.silent_after_s, "gone_after_s": settings.gone_after_s}
        pause = self._pressing.let_pass()
        pause()
        with sessions() as session:
            now = self._clock()
            with session.begin():
                stored = store_calm(session, asks, **silences, now=now, in_turn=in_turn, pause=pause)
            # Nobody waits for a lock while orders are made.
            intakes = [item for item in stored if isinstance(item, Intake)]
            standing = (row for intake in intakes for row in standing_of(intake))
            self._orders.make(session, standing, lost_after_s=settings.lost_after_s, now=now)
            return [
                item if isinstance(item, Left) else answer(item, self._orders, self._told, **limits) for item in stored
            ]


def may_be_calm(report: SyncReport) -> bool:
    """Whether it has no part that never is, and is small: nobody waits for the work of a large one."""
    if any(getattr(report, part) for part in _MORE):
        return False
    facts = len(report.ranks) + len(report.steps) + len(report.logs) + len(report.metrics)
    return facts <= FACTS_MAX and sum(len(chunk.text) for chunk in report.logs) <= LOG_CHARS_MAX


def store_calm(
    session: Session,
    asks: Sequence[CalmAsk],
    *,
    silent_after_s: float,
    gone_after_s: float,
    now: datetime,
    in_turn: bool = False,
    pause: Callable[[], None] = lambda: None,
) -> list[Intake | Left]:
    """Store those reports that are calm. `in_turn`: wait for their jobs. `pause`: called where others may go first, as
    `service.pressing` says. Raises Unsettled, and nothing is stored."""
    by_node = {ask.reading.report.node.node_id: ask for ask in asks if not ask.is_gone()}
    found: list[_Calm] = []
    # The first report of an agent may be the first of its node, whose row nobody can have.
    outcome: dict[str, Intake | Left] = {
        name: Left.BUSY for name, ask in by_node.items() if ask.reading.report.report_seq > 1
    }
    for node in lock_free_nodes(session, by_node):
        ask = by_node[node.node_id]
        outcome[node.node_id] = Left.NOT_CALM
        if _says_nothing_new(node, ask.reading.report):
            heard = heard_of(node, ask.reading.report, arrived=ask.arrived)
            report = in_service_time(ask.reading.report, off_by(heard.clock.ahead_s))
            intake = Intake(session, report, node, now, list(ask.reading.refusals), silent_after_s, gone_after_s)
            found.append(_Calm(intake, heard))
    pause()
    found = _at_work(session, found, now=now)
    leases = open_leases(session, [item.node_id for item in found])
    found = [item for item in found if _goes_on(item.intake, leases.get(item.node_id))]
    pause()  # For the last time: jobs are locked from here on, which others wait for.
    behind = _store_progress(session, found, now=now, in_turn=in_turn)
    for item in found:
        in_the_way = [is_busy for job_id, is_busy in behind.items() if job_id in item.intake.jobs]
        if in_the_way and all(in_the_way):
            outcome[item.node_id] = Left.BUSY
    found = [item for item in found if not behind.keys() & item.intake.jobs.keys()]
    reports = [item.intake.report for item in found]
    store_rows(session, _all(reports, "steps"), _all(reports, "logs"), now=now)
    store_metrics(session, _all(reports, "metrics"))
    if not grow(session, [tail for item in found for tail in leases[item.node_id].tails], until=now):
        raise Unsettled("somebody else has written to the ledger of these nodes")
    store_heard(session, [item.heard for item in found], now=now)
    for item in found:
        item.heard.show(item.intake.node)
    outcome |= {item.node_id: item.intake for item in found}
    return [outcome.get(ask.reading.report.node.node_id, Left.NOT_CALM) for ask in asks]


class _Calm(NamedTuple):
    intake: Intake
    heard: Heard

    @property
    def node_id(self) -> str:
        return self.heard.node_id


def _all(reports: Sequence[SyncReport], part: str) -> list[Any]:
    return [item for report in reports for item in getattr(report, part)]


def _says_nothing_new(node: NodeRow, report: SyncReport) -> bool:
    if node.agent_incarnation != report.agent_incarnation or report.report_seq <= node.report_seq:
        return False
    if not may_be_calm(report) or has_changed(node, report):
        return False
    worlds = {(rank.job_id, rank.generation) for rank in report.ranks}
    facts = (*report.steps, *report.logs, *report.metrics)
    if any((fact.job_id, fact.generation) not in worlds for fact in facts):
        return False
    before = {(rank["job_id"], rank["generation"], rank["rank"], rank["slot"], rank["stage"]) for rank in node.ranks}
    return before == {(rank.job_id, rank.generation, rank.rank, rank.slot, rank.stage.value) for rank in report.ranks}


def _at_work(session: Session, found: Sequence[_Calm], *, now: datetime) -> list[_Calm]:
    """Those whose ranks are of worlds at work that their nodes may speak of; their jobs are read."""
    named = {(item.node_id, rank.job_id) for item in found for rank in item.intake.report.ranks}
    standing = read_standing(session, [item.node_id for item in found], named, now=now)
    kept = []
    for item in found:
        intake, of_node = item.intake, standing.get(item.node_id, ())
        by_id = {each.job.job_id: each for each in of_node}
        if all(_is_at_work(by_id.get(rank.job_id), rank.generation) for rank in intake.report.ranks):
            intake.standing = of_node
            intake.jobs = {rank.job_id: by_id[rank.job_id].job for rank in intake.report.ranks}
            intake.generations = {
                (each.job.job_id, each.generation.generation): each.generation
                for each in of_node
                if each.generation is not None
            }
            kept.append(item)
    return kept


def _is_at_work(standing: Standing | None, generation: int) -> bool:
    return (
        standing is not None
        and standing.is_granted
        and not standing.has_held
        and standing.job.state == JobState.RUNNING
        and standing.generation is not None
        and standing.generation.generation == generation
        and standing.generation.first_step_at is not None
    )


def _goes_on(intake: Intake, lease: OpenLease | None) -> bool:
    """Whether the node may say all this, and its slots go on with what they did."""
    info = intake.report.node
    if lease is None or (lease.pool, lease.slots) != (info.pool, info.slots):
        return False
    return is_all_taken(intake) and only_grows(intake, lease)


def _store_progress(session: Session, found: Sequence[_Calm], *, now: datetime, in_turn: bool) -> dict[str, bool]:
    """Count the steps of jobs. Returns those that have to be looked at again, and whether they are just busy."""
    made: dict[tuple[str, int], int] = {}
    for item in found:
        report = item.intake.report
        at_work = [rank for rank in report.ranks if rank.stage is not RankStage.STARTING]
        for fact in (*report.steps, *at_work):
            key = fact.job_id, fact.generation
            made[key] = max(fact.step, made.get(key, 0))
    if not made:
        return {}
    if in_turn:
        session.execute(_LOCK_IN_TURN, {"job_ids": [job_id for job_id, _ in made]})
    values = {
        "job_ids": [job_id for job_id, _ in made],
        "generations": [generation for _, generation in made],
        "steps": list(made.values()),
    }
    return {row.job_id: row.is_busy for row in session.execute(_PROGRESS, values | {"now": now})}
