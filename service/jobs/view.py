"""What the rule for a job is given and what it may answer: facts, limits, actions. Pure."""

from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum

from agent.protocol.sync import LEASE_SHARE
from agent.protocol.values import Placement
from service.handoffs.rules import Declined, OpenHandoff
from service.handoffs.start_times import Starts
from service.jobs.causes import FIRST_CAUSE_WITHIN_S, FirstCause
from service.jobs.crashes import Crashes, RankError
from service.jobs.tables import JobState, SourceKind
from service.planner.inputs import PlannerDecision, World


@dataclass(frozen=True, slots=True)
class JobLimits:
    """How long to wait for agents before acting for them, in seconds (see Settings)."""

    propose_after_s: float = 3.0
    open_within_s: float = 15.0
    propose_again_s: float = 60.0
    handoff_quiet_s: float = 240.0
    grow_settle_s: float = 3.0
    lost_after_s: float = 20.0
    start_within_s: float = 270.0
    stop_within_s: float = 60.0
    checkpoint_within_s: float = 120.0
    stall_after_s: float = 20.0
    stall_steps: int = 5
    first_cause_within_s: float = FIRST_CAUSE_WITHIN_S
    starts_max: int = 3
    start_guess_s: float = 55.0
    crashes_max: int = 3

    @property
    def lease_s(self) -> float:
        """What an answer of the service is worth as a step lease."""
        return LEASE_SHARE * self.lost_after_s


@dataclass(frozen=True, slots=True)
class Leaving:
    """A member that will go, according to a notice that the service stored at `noticed_at`."""

    node_id: str
    noticed_at: datetime
    deadline_at: datetime | None


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """The newest checkpoint that a start may use. `finished_at`: None for one of another job. `seconds`: it took to
    write it, where somebody said so."""

    path: str
    step: int
    finished_at: datetime | None = None
    seconds: float | None = None


@dataclass(frozen=True, slots=True)
class Damaged:
    """The steps of a job's damaged checkpoints. `of_start`: whether the one that its present world was to begin from is
    among them, as its own ranks found."""

    steps: tuple[int, ...] = ()
    of_start: bool = False


@dataclass(frozen=True, slots=True)
class Loss:
    """Why the live world cannot continue, in words and typed. `may_pass`: its ranks may all live behind nodes that are
    silent so far. `is_hang`: all of them are heard, and make no step. `since`: when it was reported."""

    reason: str
    cause: FirstCause | None
    may_pass: bool = False
    is_hang: bool = False
    since: datetime | None = None


@dataclass(frozen=True, slots=True)
class RankAt:
    """Where a rank of the world is that makes no step, by its agent: in a `hook` of the job for so long, or in this
    function (`at`), which waits for other ranks or does not. `is_stopped`: its process is, so that it cannot say."""

    node: str
    rank: int
    hook: str = ""
    hook_s: float = 0.0
    at: str = ""
    waits: bool = False
    is_stopped: bool = False


@dataclass(frozen=True, slots=True)
class JobView:
    """Everything the rule needs. `decision`: the planner's decision for the nodes that stay, starting from the present
    world; `restart`: its decision without that world.

    `revoked`: members whose keys were revoked, of this world; `gone`, `silent`: members in that state; `answering`:
    those whose machines answer other agents all the same; `absent`: targets in either state, of the open handoff or of
    those that are `broken`; `unheard`: ready nodes whose report is overdue; `unconfirmed`: members that may be late,
    not heard since the loss was reported; `broken`: handoffs that failed; `errors`: those of ranks, the first reported
    at `error_at`; `clues`: those of ranks of a next world, which tell what failed, and not that this world is lost;
    `stopped`: node and number of each rank that has no error, and whose process is stopped by the word of its agent;
    `crashes`: what ended the job before; `ranks_left`: rank processes of this job that living agents still report;
    `ahead`: a generation in which ranks already train, but whose handoff no agent has reported yet; `ahead_by_member`:
    a node of the present world says so, and not only others; `told_at`: when its handoff was told of last, where every
    rank of its target trains; `step_s`: seconds of a usual step, 0 if not known;
    `saves_at_end`: ranks that end write a checkpoint first; `saves_soon`: one has been asked for; `suspended_because`:
    why the job was suspended, empty if it was not; `listening_since`: before, the service could not hear of any step.
    `lost_sight_of`: nodes of this world, or of the open handoff's, that are not heard, and when they last were.
    `steps_from_at`: before, ranks of this world make no step, since an older one was heard when it was started.
    `unstepped_since`: when it was started, if it has made no step and is not the job's first.
    `damaged`: which of its checkpoints no start uses. `starts`: what those of this job took; `failed_starts`: those in
    a row that failed by no fault of their nodes.
    `paused_because`: who asked that it stands until it is resumed, empty if nobody did. `overspent`: its budget is
    spent; empty if it is not, or if there is none. `at_work`: where the ranks of this world are; `longest_s`: seconds
    of the longest of the newest steps; both are read where the next step is late. `hang_restart_s`, `hook_s_max`: as in
    the job file. `suspends_at`: when agents end its ranks, since nothing fits what will be left; None where that is not
    planned.
    """

    state: JobState
    state_changed_at: datetime
    now: datetime
    decision: PlannerDecision
    restart: PlannerDecision
    stop_requested: bool = False
    world: World | None = None
    source: SourceKind | None = None
    handoff: OpenHandoff | None = None
    last_handoff_at: datetime | None = None
    declined: Declined | None = None
    leaving: tuple[Leaving, ...] = ()
    revoked: tuple[str, ...] = ()
    silent: tuple[str, ...] = ()
    gone: tuple[str, ...] = ()
    answering: tuple[str, ...] = ()
    absent: tuple[str, ...] = ()
    unheard: tuple[str, ...] = ()
    unconfirmed: tuple[str, ...] = ()
    lost_sight_of: tuple[tuple[str, datetime], ...] = ()
    steps_from_at: datetime | None = None
    unstepped_since: datetime | None = None
    broken: tuple[Loss, ...] = ()
    errors: tuple[RankError, ...] = ()
    clues: tuple[RankError, ...] = ()
    stopped: tuple[tuple[str, int], ...] = ()
    at_work: tuple[RankAt, ...] = ()
    error_at: datetime | None = None
    crashes: Crashes = field(default_factory=Crashes)
    ranks_left: int = 0
    ahead: int | None = None
    ahead_by_member: bool = True
    told_at: datetime | None = None
    last_step: int = 0
    last_step_at: datetime | None = None
    step_s: float = 0.0
    longest_s: float = 0.0
    hang_restart_s: float | None = None
    hook_s_max: float | None = None
    checkpoint: Checkpoint | None = None
    damaged: Damaged = field(default_factory=Damaged)
    failed_starts: int = 0
    starts: Starts = field(default_factory=Starts)
    finished: str | None = None
    saves_at_end: bool = False
    saves_soon: bool = False
    suspended_because: str = ""
    suspends_at: datetime | None = None
    listening_since: datetime | None = None
    paused_because: str = ""
    overspent: str = ""

    @property
    def lost_at(self) -> datetime | None:
        """When it was first reported that this world is lost, None where nobody has."""
        return min(
            (at for at in (self.error_at, *(loss.since for loss in self.broken)) if at is not None), default=None
        )


class Do(StrEnum):
    """The kinds of action."""

    NOTHING = "nothing"
    START = "start"
    PROPOSE = "propose"
    DROP_HANDOFF = "drop_handoff"
    ADOPT_WORLD = "adopt_world"
    SUSPEND = "suspend"
    SUSPEND_LATER = "suspend_later"
    SETTLE = "settle"


@dataclass(frozen=True, slots=True)
class Action:
    """What to do and why. `look_again_s`: time after which the same facts may lead to another action. `save`: ranks are
    asked for a checkpoint, since the rest may fail. `crashes`, `suspended_because`: to be remembered. `cause`: what
    ended the world that the job has had; `is_hang`: it stood still. `suspends_at`: when agents are to end the ranks;
    None: not any more. `generation`: of the world that its agents have made."""

    do: Do
    reason: str
    target: Placement | None = None
    checkpoint: Checkpoint | None = None
    lost_steps: int = 0
    state: JobState | None = None
    leaving: tuple[Leaving, ...] = ()
    look_again_s: float | None = None
    failed_start: bool = False
    save: bool = False
    crashes: Crashes | None = None
    cause: FirstCause | None = None
    is_hang: bool = False
    suspended_because: str = ""
    steps_after_s: float = 0.0
    suspends_at: datetime | None = None
    generation: int | None = None
