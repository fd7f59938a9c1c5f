"""One report on its way into the database, with what the service knows of the jobs that it is about."""

from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from sqlalchemy import select
from sqlalchemy.orm import Session, defer

from agent.protocol.sync import REFUSALS_MAX, Refusal, SyncReport
from liver_core.layout.limits import NAME_CHARS_MAX, fitting
from service.handoffs.tables import HandoffRow
from service.jobs.grants import Standing
from service.jobs.tables import GenerationRow, JobMemberRow, JobRow
from service.nodes.tables import NodeRow
from service.sync.reach import Reach
from service.sync.rights import JobFacts, KnownWorld, Seats, seats_of

WORLDS_KEPT_MAX = 1_000
_SEATS: dict[tuple[str, int, str], Seats] = {}
"""Who has which rank, by job, generation and birth: a world that was born never changes."""


@dataclass(slots=True)
class Intake:
    """`silent_after_s`, `gone_after_s`: as in ServiceSettings. `jobs`: those that the node may speak of, locked.
    `with_held`: those of them of which facts wait for a handoff. `changed`: jobs whose orders are different now, and
    perhaps their members too. `described`: jobs whose orders say something else of the same members. `restated`: the
    same, and it can wait for the next report of each. `due`: jobs whose reconciler should look again. `watched`: jobs
    with news for their watchers only. `passed_over`: jobs that may want the node; their reconciler is woken once the
    report is stored. `overstepped`: parts refused because the node has no right to say them, with an example each; the
    audit log gets them. `standing`: only where the report is calm (`service.sync.calm`): all that it
    changes of its jobs is their progress, and their rows were not locked to be read.
    """

    session: Session
    report: SyncReport
    node: NodeRow
    now: datetime
    refusals: list[Refusal]
    silent_after_s: float
    gone_after_s: float
    jobs: dict[str, JobRow] = field(default_factory=dict)
    with_held: set[str] = field(default_factory=set)
    changed: set[str] = field(default_factory=set)
    described: set[str] = field(default_factory=set)
    restated: set[str] = field(default_factory=set)
    due: set[str] = field(default_factory=set)
    watched: set[str] = field(default_factory=set)
    passed_over: tuple[str, ...] = ()
    overstepped: dict[tuple[str, str], str] = field(default_factory=dict)
    generations: dict[tuple[str, int], GenerationRow | None] = field(default_factory=dict)
    worlds: dict[tuple[str, int], KnownWorld | None] = field(default_factory=dict)
    standing: tuple[Standing, ...] | None = None
    memberships: dict[str, frozenset[str]] = field(default_factory=dict)

    def jobs_of(self, node_id: str) -> frozenset[str]:
        """The jobs that the node is a member of, read once: members change only when all is stored."""
        if node_id not in self.memberships:
            mine = select(JobMemberRow.job_id).where(JobMemberRow.node_id == node_id)
            self.memberships[node_id] = frozenset(self.session.scalars(mine))
        return self.memberships[node_id]

    def generation(self, job_id: str, number: int) -> GenerationRow | None:
        """A generation of a locked job, read once between two changes of the job's worlds."""
        key = (job_id, number)
        if key not in self.generations:
            self.generations[key] = self.session.get(GenerationRow, key, options=[defer(GenerationRow.roster)])
        return self.generations[key]

    def world(self, job_id: str, number: int) -> KnownWorld | None:
        """Who holds which rank of a generation, as the service or a handoff that was reported says; read once."""
        key = (job_id, number)
        if key not in self.worlds:
            self.worlds[key] = self._find_world(job_id, number)
        return self.worlds[key]

    def _find_world(self, job_id: str, number: int) -> KnownWorld | None:
        row = self.generation(job_id, number)
        if row is not None:
            return KnownWorld(_seats(row), is_settled=True, store_node=row.store_node)
        is_of_job = HandoffRow.job_id == job_id
        made = self.session.scalars(select(HandoffRow).where(is_of_job, HandoffRow.generation == number)).first()
        if made is not None:
            return KnownWorld(seats_of(made.target), is_settled=False)
        # A world between two that are known: its birth was never reported, its successor's was.
        left = select(HandoffRow).where(is_of_job, HandoffRow.parent == number, HandoffRow.source.is_not(None))
        after = self.session.scalars(left.limit(1)).first()
        return None if after is None else KnownWorld(seats_of(after.source or {}), is_settled=False)

    def keep(self, report: SyncReport) -> None:
        """What is left of the report. The node's row has the same ranks."""
        if report.ranks is not self.report.ranks:
            self.node.ranks = [rank.model_dump(mode="json") for rank in report.ranks]
        self.report = report

    def forget_worlds(self) -> None:
        """A handoff has been stored: worlds are known that were not."""
        self.generations.clear()
        self.worlds.clear()

    def facts_of(self, job: JobRow) -> JobFacts:
        """What decides about a node's right to say something of this job."""
        place = job.spec.get("checkpoint")
        return JobFacts(
            active=job.active_generation,
            world=lambda number: self.world(job.job_id, number),
            checkpoints=place["path"] if place is not None else None,
            is_member=lambda node_id: job.job_id in self.jobs_of(node_id),
        )

    def reaches(self) -> dict[str, Reach]:
        """What the agents of each of the jobs can have reached by now."""
        return {
            job_id: Reach.of(
                next_generation=job.next_generation,
                active_generation=job.active_generation,
                checkpoints_asked=job.checkpoints_asked,
                # The end may have been brought nearer since a step was made.
                last_step=max(int(job.spec["stop"]["steps"]), job.highest_step),
                since=job.created_at,
                now=self.now,
            )
            for job_id, job in self.jobs.items()
        }

    def refuse(self, part: str, key: object, reason: str) -> None:
        """Reject this part. The agent gets the refusal once and must not send the part again."""
        if len(self.refusals) < REFUSALS_MAX:
            self.refusals.append(Refusal(part=part, key=fitting(str(key), NAME_CHARS_MAX), reason=fitting(reason)))

    def overstep(self, part: str, target: str, key: object, reason: str) -> None:
        """Reject this part, since the node has no right to say it. `target`: the job, or the reporting node where the
        job is not one of its own: never what only the report names, for the audit log notes each target."""
        self.refuse(part, key, reason)
        self.overstepped.setdefault((part, target), f"{key}: {reason}")


def _seats(row: GenerationRow) -> Seats:
    key = (row.job_id, row.generation, str(row.origin_id))
    found = _SEATS.get(key)
    if found is None:
        while len(_SEATS) >= WORLDS_KEPT_MAX:
            _SEATS.pop(next(iter(_SEATS)), None)
        found = _SEATS[key] = seats_of(row.roster)
    return found


def key_of(part: str, item: Any) -> str:
    """What names an element of a part of a report for people."""
    match part:
        case "handoffs" | "declined":
            return str(item.handoff_id)
        case "ranks" | "logs":
            return f"{item.job_id}/{item.generation}/{item.rank}"
        case "checkpoints":
            return f"{item.job_id}/{item.path}"
        case "wires":
            return f"{item.job_id}/{item.source}/{item.target}"
        case "answering":
            return f"{item.job_id}/{item.node_id}"
    return f"{item.job_id}/{item.generation}"
