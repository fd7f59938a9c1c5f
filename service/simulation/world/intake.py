"""Takes what agents report into the rows of a simulated service, as `service.sync` takes it into the database. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from operator import attrgetter
from typing import Any

from agent.protocol.values import HandoffState
from liver_core.handoff import RankStage
from service.jobs.causes import (
    FailedPart,
    FirstCause,
    at_store,
    blamed_in,
    cause_of_attempt,
    cause_of_rank,
    end_of,
    first_cause,
    said_of,
    stood_in_the_way,
    stopped_among,
)
from service.jobs.tables import ENDED, JobState
from service.ledger.rules import LOST, OVER
from service.nodes.tables import NodeState
from service.simulation.world.job_rows import JobRows
from service.simulation.world.reports import AgentReport, Mirror, RankSays, Taken
from service.sync.reach import GENERATIONS_AHEAD_MAX

Standing = tuple[int, int, str]
"""Generation, number and stage of a rank; all stages of one that lives are one."""


@dataclass(slots=True)
class Intake:
    """One report. `restated`: agents are to be told something else now; `is_due`: the job is to be looked at."""

    rows: JobRows
    report: AgentReport
    now: datetime
    restated: bool = False
    is_due: bool = False

    def take(self) -> Taken:
        """Store what is news."""
        report, nodes = self.report, self.rows.nodes
        is_new = report.node not in nodes.names()
        before = {_standing(rank) for rank in nodes.ranks_of(report.node)}
        was = None if is_new else nodes.state_of(report.node)
        if not nodes.hear(report, self.now):
            return Taken(is_news=False)
        if is_new or was is not NodeState.READY:
            self.restated = self.is_due = True
        refused = self._take_mirrors()
        for declined in report.declined:
            if self.rows.handoffs.decline(declined.handoff_id, report.node, declined.reason, self.now):
                self.restated = True
        for fact in report.notices:
            told_in = None if fact.node_id == report.node else self.rows.job_id
            if self.rows.nodes.hear_notice(fact, self.now, told_in=told_in):
                self.restated = True
        own = tuple(rank for rank in report.ranks if self._may_be_its_own(rank))
        if len(own) != len(report.ranks):
            nodes.keep_ranks(report.node, own)
        for rank in own:
            self._note_progress(rank)
        ranks = nodes.ranks_of(report.node)
        after = {_standing(rank) for rank in ranks}
        self.is_due = self.is_due or before != after
        self._note_errors([rank for rank in ranks if rank["stage"] in LOST and _standing(rank) not in before])
        return Taken(is_news=True, acknowledged=report.mirrors, refused=refused)

    # Handoffs.

    def _take_mirrors(self) -> tuple[tuple[str, str], ...]:
        """Oldest generation first: each may be the parent of the next."""
        refused = []
        for mirror in sorted(self.report.mirrors, key=attrgetter("generation", "mirror_seq")):
            refusal = self._take_mirror(mirror)
            if refusal is not None:
                refused.append((mirror.handoff_id, refusal))
        return tuple(refused)

    def _take_mirror(self, mirror: Mirror) -> str | None:
        """Why it does not count, None if it does."""
        rows = self.rows
        made = rows.generations.get(mirror.generation)
        made_by = None if made is None else made.handoff_id or "a start of the service"
        stored = rows.handoffs.take(mirror, active=rows.generations.active, made_by=made_by, now=self.now)
        self.restated = self.restated or stored.orders_differ
        row = stored.row
        if row is None:
            return stored.refusal
        self.is_due = True
        if row.ended_by is None and mirror.state in (HandoffState.ABORTED, HandoffState.BROKEN):
            row.ended_by = self._first_cause(mirror)
        rows.generations.burn(mirror.generation)
        if mirror.parent > (rows.generations.active or mirror.parent) and mirror.source is not None:
            self.restated = rows.adopt_world(mirror.source, "another begins in its world", self.now) or self.restated
        if mirror.state is not HandoffState.ACTIVE:
            return None
        self.restated = self.restated or made is None
        refusal = rows.activate_if_due(row, self.now, store_node=mirror.store_node)
        if refusal is not None:
            row.reason = f"{row.reason}; rejected as the job's generation: {refusal}".removeprefix("; ")
        return refusal

    def _first_cause(self, mirror: Mirror) -> FirstCause | None:
        """What ended an attempt, by the reason of its lead and by what the agents of its nodes report of ranks."""
        is_broken = mirror.state is HandoffState.BROKEN
        if mirror.superseded and not is_broken:
            return None
        rosters = [roster for roster in (mirror.source, mirror.target) if roster is not None]
        wanted = {name for roster in rosters for name in roster.node_ids()}
        nodes = [node for node in self.rows.nodes.seen(self.now) if node.node_id in wanted]
        worlds = (mirror.parent, mirror.generation)
        ranks = [(node.node_id, rank) for node in nodes for rank in node.ranks if rank["generation"] in worlds]
        failed = [each for each in ranks if each[1]["stage"] in LOST]
        parent = self.rows.generations.get(mirror.parent)
        stores = {mirror.parent: parent.store_node if parent is not None else None}
        stores[mirror.generation] = mirror.store_node
        ended = [at_store(_cause_of(node, rank), stores[rank["generation"]]) for node, rank in failed]
        told = None
        if mirror.reason is not None:
            told = cause_of_attempt(mirror.reason, store_node=mirror.store_node, source=mirror.source)
        if (told is not None or is_broken) and parent is not None and parent.ended_by is not None:
            ended.append(parent.ended_by)
        complain = {node for node, _ in failed}
        away = [n.node_id for n in nodes if n.state is not NodeState.READY and n.node_id not in complain]
        stopped = stopped_among(ranks)
        found = first_cause((*ended, told), away=away, stopped=stopped)
        return stood_in_the_way(mirror.reason, away, stopped) if found is None else found

    # Ranks.

    def _may_be_its_own(self, rank: RankSays) -> bool:
        """Whether the node may speak of this rank: once a world has been active, it is known who holds which."""
        row = self.rows.generations.get(rank.generation)
        return row is None or self.report.node in {member.node_id for member in row.roster.members[rank.rank :][:1]}

    def _note_progress(self, rank: RankSays) -> None:
        generations, handoffs = self.rows.generations, self.rows.handoffs
        if rank.generation >= generations.next_number:
            # Of a world that nobody else has told of, no number is used up far beyond the highest that is known.
            known = max(generations.active or 0, handoffs.highest())
            generations.burn(min(rank.generation, known + GENERATIONS_AHEAD_MAX))
        cause = rank.reason.cause if rank.reason is not None else None
        if cause is not None and cause.newer_start is not None:
            generations.burn(cause.newer_start)
        is_known = rank.generation in generations or handoffs.has_generation(rank.generation)
        if is_known and rank.step > 0 and rank.stage is not RankStage.STARTING:
            self._advance(rank.generation, rank.step)

    def _advance(self, generation: int, step: int) -> None:
        """The job has made `step` in `generation`."""
        job, generations = self.rows.job, self.rows.generations
        if job.state in ENDED:
            return
        is_active = generation == generations.active
        # The job has got as far as the world of a handoff that is not reported yet, unless a start has replaced it.
        is_later = generation > (generations.active or 0) and not generations.has_later_start(generation)
        if (is_active or is_later) and step > job.last_step:
            job.last_step, job.last_step_at = step, self.now
        row = generations.get(generation)
        if not is_active or row is None:
            return
        if row.first_step_at is None and step > row.checkpoint_step:
            row.first_step_at = self.now
        if job.state is JobState.STARTING and step > row.checkpoint_step:
            job.set_state(JobState.RUNNING, f"training since step {step}; {job.reason}", self.now)
            job.failed_starts = 0
            self.restated = True

    def _note_errors(self, news: list[dict[str, Any]]) -> None:
        """When the first rank of the world failed; and how one ended, for an attempt that others say it ended."""
        job, generations = self.rows.job, self.rows.generations
        for rank in news:
            is_active = rank["generation"] == generations.active
            if job.error_at is None and is_active:
                job.error_at = self.now
            cause = _cause_of(self.report.node, rank)
            if not cause.is_felt:
                row = generations.get(rank["generation"]) if cause.what is FailedPart.STORE else None
                cause = at_store(cause, None if row is None else row.store_node)
                since = job.error_at if is_active else None
                self.rows.handoffs.name_cause(cause, since or self.now)


def _cause_of(node: str, rank: Mapping[str, Any]) -> FirstCause:
    return cause_of_rank(node, rank["rank"], rank["step"], said_of(rank), end_of(rank), blamed=blamed_in(rank))


def _standing(rank: Mapping[str, Any]) -> Standing:
    stage = rank["stage"]
    return rank["generation"], rank["rank"], stage if stage in OVER else "alive"
