"""What to do with a job next: one pure function from everything known to one action with its reason. Pure."""

from dataclasses import dataclass
from datetime import datetime, timedelta
from enum import StrEnum
from uuid import UUID

from agent.protocol.values import HandoffState, Placement
from service.jobs.tables import JobState, SourceKind
from service.planner.inputs import Decision, Verdict, World


@dataclass(frozen=True, slots=True)
class Patience:
    """How long to wait for agents before acting for them, in seconds (see Settings)."""

    propose_after_s: float = 3.0
    open_within_s: float = 15.0
    handoff_quiet_s: float = 240.0
    grow_settle_s: float = 3.0
    start_within_s: float = 270.0
    stop_within_s: float = 60.0
    stall_after_s: float = 20.0
    starts_max: int = 3


@dataclass(frozen=True, slots=True)
class OpenHandoff:
    """A handoff that is neither active nor aborted nor broken. `may_lose_leavers`: a rescue past its boundary, which
    lets leavers go and then builds the next world; where they went too early its ranks say that they are broken."""

    handoff_id: UUID
    state: HandoffState
    leaving: tuple[str, ...]
    target_nodes: tuple[str, ...]
    opened_at: datetime
    changed_at: datetime
    deadline_at: datetime | None
    may_lose_leavers: bool = False


@dataclass(frozen=True, slots=True)
class Leaving:
    """A member that a notice says will go."""

    node_id: str
    heard_at: datetime
    deadline_at: datetime | None


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """The newest complete checkpoint."""

    path: str
    step: int


@dataclass(frozen=True, slots=True)
class JobView:
    """Everything the rule looks at. `decision`: the planner's word on the nodes that are ready and stay, starting from
    the present world; `restart`: its word if that world is given up.

    `gone`, `silent`: members that are; `absent`: targets of the open handoff that are either; `broken`: reasons of
    ranks that failed; `ranks_left`: rank processes of this job that living agents still report; `ahead`: a generation
    that the service was not told of and in which ranks already train.
    """

    state: JobState
    state_changed_at: datetime
    now: datetime
    decision: Decision
    restart: Decision
    stop_requested: bool = False
    world: World | None = None
    source: SourceKind | None = None
    handoff: OpenHandoff | None = None
    last_handoff_at: datetime | None = None
    leaving: tuple[Leaving, ...] = ()
    silent: tuple[str, ...] = ()
    gone: tuple[str, ...] = ()
    absent: tuple[str, ...] = ()
    broken: tuple[str, ...] = ()
    ranks_left: int = 0
    ahead: int | None = None
    last_step: int = 0
    last_step_at: datetime | None = None
    checkpoint: Checkpoint | None = None
    failed_starts: int = 0
    finished: str | None = None


class Do(StrEnum):
    """The kinds of action."""

    NOTHING = "nothing"
    START = "start"
    PROPOSE = "propose"
    DROP_HANDOFF = "drop_handoff"
    SUSPEND = "suspend"
    SETTLE = "settle"


@dataclass(frozen=True, slots=True)
class Action:
    """What to do and why. `look_again_s`: when the same facts could give another answer."""

    do: Do
    reason: str
    target: Placement | None = None
    checkpoint: Checkpoint | None = None
    lost_steps: int = 0
    state: JobState | None = None
    leaving: tuple[Leaving, ...] = ()
    look_again_s: float | None = None
    failed_start: bool = False


def next_action(view: JobView, patience: Patience) -> Action:
    """The one action that is due, given the facts."""
    match view.state:
        case JobState.STOPPED | JobState.FINISHED | JobState.FAILED:
            return Action(Do.NOTHING, "the job has ended")
        case JobState.STOPPING:
            return _end_when_quiet(view, patience, JobState.STOPPED, "stopped as asked")
        case _ if view.finished is not None:
            return _settle(JobState.FINISHED, view.finished)
        case _ if view.stop_requested and view.state in (JobState.PENDING, JobState.SUSPENDED):
            return _settle(JobState.STOPPED, "stopped as asked, nothing was running")
        case _ if view.stop_requested:
            return _settle(JobState.STOPPING, "stop was asked for", look_again_s=patience.stop_within_s)
        case JobState.SUSPENDING:
            return _end_when_quiet(view, patience, JobState.SUSPENDED, "too few nodes")
        case JobState.PENDING | JobState.SUSPENDED:
            return _start_if_possible(view)
        case JobState.STARTING | JobState.RUNNING:
            return _keep_running(view, patience)


def _keep_running(view: JobView, patience: Patience) -> Action:
    """A job that has ranks, or should: losses first, then notices, then growth."""
    if view.ahead is not None:
        # The agents made a handoff while this service was away; judging by the old roster would restart a healthy job.
        return Action(Do.NOTHING, f"generation {view.ahead} trains, its handoff is still to be told", look_again_s=1.0)
    loss = _why_lost(view, patience)
    if loss is not None:
        return _fall_back(view, patience, loss)
    if view.handoff is not None:
        return _watch_handoff(view, view.handoff, patience)
    if view.state is JobState.STARTING and not view.leaving:
        return Action(Do.NOTHING, "starting", look_again_s=patience.start_within_s)
    if view.leaving:
        return _answer_notices(view, patience)
    return _grow_or_stay(view, patience)


def _why_lost(view: JobView, patience: Patience) -> str | None:
    """Why the live world cannot go on; None while it can, or while the agents may still bring it through."""
    if view.broken:
        return view.broken[0]
    gone, silent = _missed(view, view.gone), _missed(view, view.silent)
    if gone:
        return f"{', '.join(gone[:8])} went without a handoff"
    since = view.last_step_at if view.state is JobState.RUNNING else view.state_changed_at
    stalled_s = (view.now - since).total_seconds() if since else 0.0
    if silent and stalled_s > patience.stall_after_s:
        return f"{', '.join(silent[:8])} is silent and no step was made for {stalled_s:.0f} s"
    if view.state is JobState.STARTING and stalled_s > patience.start_within_s:
        return f"the start made no step within {patience.start_within_s:.0f} s"
    return None


def _missed(view: JobView, nodes: tuple[str, ...]) -> tuple[str, ...]:
    """Those of `nodes` that the job cannot do without: not the leavers that a rescue has let go."""
    if view.handoff is None or not view.handoff.may_lose_leavers:
        return nodes
    return tuple(node for node in nodes if node in view.handoff.target_nodes)


def _fall_back(view: JobView, patience: Patience, loss: str) -> Action:
    """The checkpoint rung: another generation from the last checkpoint, or suspension, or the end."""
    failed_start = view.state is JobState.STARTING
    if failed_start and view.failed_starts + 1 >= patience.starts_max:
        reason = f"{patience.starts_max} starts in a row failed; the last one: {loss}"
        return Action(Do.SETTLE, reason, state=JobState.FAILED, failed_start=True)
    if view.restart.target is None:
        return Action(Do.SUSPEND, f"{loss}; {view.restart.reason}")
    checkpoint = view.checkpoint
    source = f"checkpoint of step {checkpoint.step}" if checkpoint else "its beginning (there is no checkpoint)"
    lost = _lost_steps(view)
    return Action(
        Do.START,
        f"{loss}; again from {source}, {lost} steps lost; {view.restart.reason}",
        target=view.restart.target,
        checkpoint=checkpoint,
        lost_steps=lost,
        failed_start=failed_start,
        look_again_s=patience.start_within_s,
    )


def _watch_handoff(view: JobView, handoff: OpenHandoff, patience: Patience) -> Action:
    """An open handoff belongs to the agents; the service only ends one that nobody drives."""
    age_s = (view.now - handoff.opened_at).total_seconds()
    quiet_s = (view.now - handoff.changed_at).total_seconds()
    if handoff.state is HandoffState.PROPOSED and age_s > patience.open_within_s:
        return Action(Do.DROP_HANDOFF, f"no agent opened it within {patience.open_within_s:.0f} s")
    missing = [item for item in view.leaving if item.node_id not in handoff.leaving]
    if handoff.state is HandoffState.PROPOSED and missing:
        names = ", ".join(item.node_id for item in missing[:8])
        return Action(Do.DROP_HANDOFF, f"not opened yet and it does not answer the notice for {names}")
    if handoff.state is HandoffState.PROPOSED and view.absent:
        return Action(Do.DROP_HANDOFF, f"not opened yet and {', '.join(view.absent[:8])} is not heard any more")
    if quiet_s > patience.handoff_quiet_s:
        return Action(Do.DROP_HANDOFF, f"no news of it for {quiet_s:.0f} s")
    return Action(Do.NOTHING, f"handoff {handoff.handoff_id} is {handoff.state}", look_again_s=1.0)


def _answer_notices(view: JobView, patience: Patience) -> Action:
    """Members will go and no handoff is open: propose one for all of them, after the agents had their chance."""
    heard_at = max(item.heard_at for item in view.leaving)
    # The agents' own handoff may have just been aborted as superseded; they get the same time to open the next.
    since = max(heard_at, view.last_handoff_at) if view.last_handoff_at else heard_at
    waited_s = (view.now - since).total_seconds()
    if waited_s < patience.propose_after_s:
        return Action(Do.NOTHING, "the agents act on the notice", look_again_s=patience.propose_after_s - waited_s)
    if view.decision.target is None:
        return Action(Do.SUSPEND, f"{', '.join(i.node_id for i in view.leaving[:8])} will go; {view.decision.reason}")
    return Action(Do.PROPOSE, view.decision.reason, target=view.decision.target, leaving=view.leaving)


def _grow_or_stay(view: JobView, patience: Patience) -> Action:
    if view.decision.verdict is not Verdict.MOVE or view.decision.target is None:
        return Action(Do.NOTHING, view.decision.reason)
    settled_at = max(view.state_changed_at, view.last_handoff_at or view.state_changed_at)
    waited_s = (view.now - settled_at).total_seconds()
    if waited_s < patience.grow_settle_s or view.silent:
        return Action(Do.NOTHING, "about to move: " + view.decision.reason, look_again_s=patience.grow_settle_s)
    return Action(Do.PROPOSE, view.decision.reason, target=view.decision.target)


def _start_if_possible(view: JobView) -> Action:
    if view.restart.target is None:
        return Action(Do.NOTHING, f"waiting: {view.restart.reason}")
    # A job that has run before goes on from its checkpoint; without one it begins again.
    lost = _lost_steps(view)
    source = f"from checkpoint of step {view.checkpoint.step}, {lost} steps lost; " if view.checkpoint else ""
    return Action(
        Do.START,
        source + view.restart.reason,
        target=view.restart.target,
        checkpoint=view.checkpoint,
        lost_steps=lost,
    )


def _end_when_quiet(view: JobView, patience: Patience, state: JobState, reason: str) -> Action:
    waited_s = (view.now - view.state_changed_at).total_seconds()
    if view.ranks_left == 0:
        return _settle(state, reason)
    if waited_s > patience.stop_within_s:
        return _settle(state, f"{reason}; {view.ranks_left} ranks did not end within {patience.stop_within_s:.0f} s")
    return Action(Do.NOTHING, f"{view.ranks_left} ranks are still ending", look_again_s=1.0)


def _settle(state: JobState, reason: str, *, look_again_s: float | None = None) -> Action:
    return Action(Do.SETTLE, reason, state=state, look_again_s=look_again_s)


def _lost_steps(view: JobView) -> int:
    return max(0, view.last_step - (view.checkpoint.step if view.checkpoint else 0))


def accepts_active(*, active: int | None, parent: int, generation: int, born_here: frozenset[int]) -> str | None:
    """Why a handoff that its agents call active must not become the job's generation; None if it may.

    `born_here`: generations that the service itself started (first start, checkpoint rung). Agents that worked alone
    may have made several handoffs of which only the last is known: its parent may lie above the active generation, as
    long as the service has started nothing in between.
    """
    if active is None:
        return "the job has no active generation"
    if generation <= active:
        return f"generation {active} is already active"
    if parent < active:
        return f"its parent {parent} was replaced by generation {active}"
    overtaken = sorted(number for number in born_here if parent < number or active < number <= parent)
    if overtaken:
        return f"the service started generation {overtaken[-1]} since"
    return None


def deadline_of(leaving: tuple[Leaving, ...]) -> datetime | None:
    """The earliest deadline among members that will go."""
    return min((item.deadline_at for item in leaving if item.deadline_at is not None), default=None)


def seconds(value: float) -> timedelta:
    """Seconds as a timedelta."""
    return timedelta(seconds=value)
