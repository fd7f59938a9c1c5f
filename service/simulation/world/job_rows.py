"""All that a simulated service has stored of its one job, and what its rule is told of that. Pure.

The view has what `service.jobs.queries.situation` reads from the database, as far as it exists in a simulated world.
"""

from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from operator import attrgetter

from agent.protocol.values import HandoffState
from liver_core.layout import Roster
from service.handoffs.rules import OpenHandoff
from service.jobs import reported
from service.jobs.crashes import Crashes, RankError
from service.jobs.stalls import STALL_LEAST_S
from service.jobs.tables import ENDED, JobState, SourceKind
from service.jobs.view import Checkpoint, JobView
from service.nodes.listening import Listening
from service.nodes.tables import NodeState
from service.planner.inputs import World
from service.simulation.world.generation_rows import GenerationRow, GenerationRows
from service.simulation.world.handoff_rows import HandoffRow, HandoffRows
from service.simulation.world.moments import utc, utc_or_none
from service.simulation.world.node_rows import NodeRows
from service.simulation.world.reports import Planned, Steps

HAS_RANKS = (JobState.STARTING, JobState.RUNNING, JobState.SUSPENDING, JobState.STOPPING)
ENDING = (JobState.SUSPENDING, JobState.STOPPING)


@dataclass(slots=True)
class JobRow:
    """The job. `orders_seq` grows with each change of what agents are told. `error_at`: when the first rank of the
    present world failed. `revoked`: when keys of nodes were. `asked`, `answered`: numbers of checkpoints
    that were asked for, and written for that."""

    state_changed_at: datetime
    state: JobState = JobState.PENDING
    reason: str = ""
    orders_seq: int = 0
    last_step: int = 0
    last_step_at: datetime | None = None
    error_at: datetime | None = None
    crashes: Crashes = field(default_factory=Crashes)
    failed_starts: int = 0
    suspended_because: str = ""
    suspends_at: datetime | None = None
    stop_requested: bool = False
    revoked: dict[str, datetime] = field(default_factory=dict)
    checkpoint: Checkpoint | None = None
    asked: int = 0
    answered: int = 0

    def set_state(self, state: JobState, reason: str, now: datetime) -> None:
        """The time counts from where the state is another one."""
        if self.state is not state:
            self.state, self.state_changed_at = state, now
        self.reason = reason


@dataclass(slots=True)
class JobRows:
    """The job and all rows beside it. `overdue_after_s`: a node that has not reported for so long may be gone;
    `usual_step_s`: of a step; `saves_at_end`: ranks that end write a checkpoint first."""

    job_id: str
    job: JobRow
    nodes: NodeRows
    generations: GenerationRows
    handoffs: HandoffRows
    listening: Listening
    overdue_after_s: float
    usual_step_s: float
    saves_at_end: bool

    @property
    def known(self) -> reported.ActiveWorld:
        """The world that the job has."""
        return reported.ActiveWorld(self.job_id, self.generations.active)

    def world(self) -> World | None:
        """The same with its members, where it has ranks or should have."""
        row = self.generations.active_row
        if row is None or self.job.state not in HAS_RANKS:
            return None
        return World(row.generation, row.roster.layout, tuple(row.roster.members))

    def view(self, planned: Planned, now: datetime, steps: Steps | None) -> JobView:
        """Everything that the rule needs, at this moment. `steps`: where ranks do not report each of theirs."""
        job, row, world, known = self.job, self.generations.active_row, self.world(), self.known
        members = set(world.node_ids() if world else ())
        seen = sorted(self.nodes.seen(now), key=attrgetter("node_id"))
        heard_since = now - timedelta(seconds=self.overdue_after_s)
        handoff, ended = self.handoffs.open_row(), self.handoffs.last_ended()
        targets = set(handoff.target.node_ids() if handoff is not None else ())
        broken = self.handoffs.broken_by(known.generation, "" if row is None else row.handoff_id)
        towards = targets.union(*(each.target.node_ids() for each in broken))
        ahead, ahead_by_member = reported.ahead_of(seen, known, members, heard_since)
        made_none = row is not None and row.first_step_at is None and row.generation > 1
        view = JobView(
            state=job.state,
            state_changed_at=job.state_changed_at,
            now=now,
            decision=planned.decision,
            restart=planned.restart,
            stop_requested=job.stop_requested,
            revoked=() if row is None else self._revoked(members, row.created_at),
            world=world,
            source=None if row is None else row.source,
            handoff=None if handoff is None else self._as_open(handoff, seen),
            last_handoff_at=None if ended is None else ended.recorded_at,
            declined=self.handoffs.declined(self.generations.active),
            leaving=reported.leaving_of(self.nodes.noticed(now), members),
            silent=reported.in_state(seen, members, NodeState.SILENT),
            gone=reported.in_state(seen, members, NodeState.GONE),
            absent=tuple(
                each.node_id for each in seen if each.node_id in towards and each.state is not NodeState.READY
            ),
            unheard=reported.unheard(seen, heard_since),
            lost_sight_of=_lost_sight_of(seen, members | targets, heard_since),
            steps_from_at=None if row is None else row.steps_from_at,
            unstepped_since=row.created_at if row is not None and made_none else None,
            broken=tuple(each.as_loss() for each in broken),
            errors=reported.errors_of(seen, known),
            clues=self._clues(seen, handoff, broken),
            stopped=reported.stopped(seen, known),
            error_at=job.error_at,
            crashes=job.crashes,
            ranks_left=_ranks_left(seen, self.job_id) if job.state in ENDING else 0,
            ahead=ahead,
            ahead_by_member=ahead_by_member,
            last_step=job.last_step,
            last_step_at=job.last_step_at,
            step_s=self.usual_step_s,
            longest_s=self.usual_step_s,
            checkpoint=job.checkpoint,
            failed_starts=job.failed_starts,
            saves_at_end=self.saves_at_end,
            saves_soon=job.asked > job.answered,
            suspended_because=job.suspended_because,
            suspends_at=job.suspends_at,
            listening_since=self.listening.since,
        )
        unconfirmed = reported.unconfirmed(seen, view.lost_at, heard_since)
        view = replace(view, unconfirmed=unconfirmed, told_at=self._told_at(seen, ahead))
        return self._with_what_counts_now(view if steps is None else _with_steps(view, steps), seen)

    def _with_what_counts_now(self, view: JobView, seen: list[reported.NodeSeen]) -> JobView:
        """The view with what is looked at in some states only."""
        if view.state in (JobState.STARTING, JobState.SUSPENDED):
            view = replace(view, starts=self.generations.starts())
        since, runs = view.last_step_at, view.state is JobState.RUNNING
        if runs and since is not None and (view.now - since).total_seconds() > STALL_LEAST_S:
            view = replace(view, at_work=reported.at_work(seen, self.known))
        return view

    def adopt_world(self, world: Roster, reason: str, now: datetime) -> bool:
        """Whether the handoff to this world counts as active from now on: it went through, and nobody tells."""
        row = self.handoffs.untold(world.generation)
        if row is None:
            return False
        row.target = world
        row.state, row.reason, row.recorded_at = HandoffState.ACTIVE, reason, now
        self.activate_if_due(row, now)
        return True

    def _as_open(self, row: HandoffRow, seen: list[reported.NodeSeen]) -> OpenHandoff:
        return row.as_open(crosses=reported.crosses(seen, self.job_id, (row.parent, row.generation)))

    def _told_at(self, seen: list[reported.NodeSeen], ahead: int | None) -> datetime | None:
        """When the handoff to generation `ahead` was told of last, if every rank of its world trains there."""
        row = self.handoffs.untold(ahead)
        if ahead is None or row is None or reported.world_of(seen, self.job_id, ahead) is None:
            return None
        return row.recorded_at

    def activate_if_due(self, handoff: HandoffRow, now: datetime, *, store_node: str | None = None) -> str | None:
        """Make an active handoff the job's generation. None if it is (or already was), else why it cannot be."""
        job, generations, roster = self.job, self.generations, handoff.roster
        if roster.generation in generations:
            return None
        if job.state in ENDED:
            return f"the job is {job.state}"
        refusal = generations.refusal(handoff.parent, roster.generation)
        is_past = refusal is not None and generations.went_through(handoff.parent, roster.generation)
        if refusal is not None and not is_past:
            return refusal
        row = GenerationRow(
            roster,
            handoff.parent,
            SourceKind.HANDOFF,
            generations.created_after(roster.generation) or now,
            handoff.why,
            store_node=store_node,
            handoff_id=handoff.handoff_id,
            layout=handoff.layout,
        )
        generations.add(row)
        if is_past:
            return None
        job.error_at, job.suspends_at, generations.active = None, None, roster.generation
        if job.state in (JobState.STARTING, JobState.RUNNING):
            job.set_state(JobState.RUNNING, handoff.why, now)
            job.failed_starts = 0
        return None

    def _revoked(self, members: set[str], since: datetime) -> tuple[str, ...]:
        """Members whose keys were, since they got their place."""
        return tuple(sorted(name for name, at in self.job.revoked.items() if name in members and at >= since))

    def _clues(
        self, seen: list[reported.NodeSeen], handoff: HandoffRow | None, broken: list[HandoffRow]
    ) -> tuple[RankError, ...]:
        """Errors of ranks of each next world that is past its boundary."""
        active, found = self.generations.active, list[RankError]()
        open_ones = () if handoff is None or handoff.state is not HandoffState.CUTTING_OVER else (handoff,)
        for row in (*open_ones, *broken):
            if row.generation is not None and row.parent == active:
                targets = [node for node in seen if node.node_id in row.target.node_ids()]
                found += reported.clues_of(targets, reported.ActiveWorld(self.job_id, row.generation))
        return tuple(found)


def _with_steps(view: JobView, steps: Steps) -> JobView:
    usual_s = {"step_s": steps.usual_s, "longest_s": steps.usual_s}
    return replace(view, last_step=steps.last, last_step_at=utc_or_none(steps.at), **usual_s)


def _ranks_left(seen: list[reported.NodeSeen], job_id: str) -> int:
    return reported.ranks_left((node for node in seen if node.state is not NodeState.GONE), job_id)


def _lost_sight_of(
    seen: list[reported.NodeSeen], wanted: set[str], since: datetime
) -> tuple[tuple[str, datetime], ...]:
    away = (node for node in seen if node.node_id in wanted and node.last_seen_at < since)
    return tuple(sorted((node.node_id, node.last_seen_at) for node in away))


def new_job(at_s: float) -> JobRow:
    """A job that was just submitted."""
    return JobRow(state_changed_at=utc(at_s))
