"""Decides what to do with a job next: one function from all known facts to one action with its reason. Pure."""

from dataclasses import replace
from datetime import datetime, timedelta

from agent.protocol.values import HandoffState, Placement
from liver_core.handoff.generations import StartWait
from liver_core.handoff.suspending import COMMITTED_S, EndTimes, begins_at
from liver_core.layout import Member
from liver_core.layout.limits import fitting, listed
from service.handoffs.older_worlds import OLDER_MAY_STEP, starting_words, wait_of, waits_s
from service.handoffs.rules import OpenHandoff
from service.handoffs.start_times import next_start_at, start_left
from service.jobs.causes import FailedPart, FirstCause, is_of_nodes
from service.jobs.losses import may_know_more, of_node, why_lost
from service.jobs.stalls import HANGS_MAX, standstill
from service.jobs.tables import JobState
from service.jobs.view import Action, Do, JobLimits, JobView, Leaving, Loss
from service.planner.inputs import PlannerDecision, PlannerVerdict

SUSPENDED_BECAUSE_CHARS_MAX = 500
AWAIT_CAUSE_S = 0.3
AHEAD_BY_OTHERS_S = 120.0
"""So long nodes that are no members are believed that a next world trains, without a report of how it came to be."""
TOLD_WITHIN_S = 10.0
"""A lead that is there tells within this that its handoff has gone through."""


def next_action(view: JobView, limits: JobLimits) -> Action:
    """The one action that is due, given the facts."""
    match view.state:
        case JobState.STOPPED | JobState.FINISHED | JobState.FAILED:
            return Action(Do.NOTHING, "the job has ended")
        case JobState.STOPPING:
            return _end_when_quiet(view, limits, JobState.STOPPED, "stopped on request")
        case _ if view.finished is not None:
            return _settle(JobState.FINISHED, view.finished)
        case _ if view.stop_requested and view.state in (JobState.PENDING, JobState.SUSPENDED):
            return _settle(JobState.STOPPED, "stopped on request, nothing was running")
        case _ if view.stop_requested:
            return _settle(JobState.STOPPING, "stop requested", look_again_s=limits.stop_within_s)
        case JobState.SUSPENDING:
            return _end_when_quiet(view, limits, JobState.SUSPENDED, _why_suspended(view) or "too few nodes")
        case JobState.PENDING | JobState.SUSPENDED if view.paused_because:
            return Action(Do.NOTHING, f"paused because {view.paused_because}; waiting for somebody to resume it")
        case JobState.PENDING | JobState.SUSPENDED if view.overspent:
            return Action(Do.NOTHING, f"{view.overspent}; it goes on when budget_usd is raised")
        case JobState.PENDING | JobState.SUSPENDED:
            return _start_if_possible(view, limits)
        case JobState.STARTING | JobState.RUNNING if because := view.paused_because or view.overspent:
            return _pause(view, limits, because)
        case JobState.STARTING | JobState.RUNNING:
            return _keep_running(view, limits)


def _pause(view: JobView, limits: JobLimits, why: str) -> Action:
    """Whatever the job was about to do, its ranks end; with a checkpoint, where the world still lives."""
    if _is_untold(view) or _is_ahead(view):
        return _keep_running(view, limits)
    loss = why_lost(view, limits)
    reason = f"{loss.reason}; not started again, since {why}" if loss else why
    because = fitting(why, SUSPENDED_BECAUSE_CHARS_MAX)
    return Action(Do.SUSPEND, reason, suspended_because=because, cause=loss.cause if loss else None)


def _keep_running(view: JobView, limits: JobLimits) -> Action:
    """For a job that has ranks or should have them: losses first, then notices, then growth."""
    if _is_untold(view):
        text = f"every rank of generation {view.ahead} trains, and nobody tells that its handoff went through"
        return Action(Do.ADOPT_WORLD, text, generation=view.ahead)
    if _is_ahead(view):
        # The agents completed a handoff while the service was down. By the old roster a healthy job would be restarted.
        return Action(Do.NOTHING, f"generation {view.ahead} trains, its handoff is not reported yet", look_again_s=1.0)
    if view.suspends_at is not None and view.suspends_at <= view.now and not _is_held(view):
        # Its agents end the ranks now, or have ended them while the service was away.
        return _suspend(_why_it_will_stand(view), view.decision)
    loss = why_lost(view, limits)
    if loss is not None:
        if may_know_more(view, limits):
            return Action(Do.NOTHING, f"{loss.reason}; its agents will say what failed", look_again_s=AWAIT_CAUSE_S)
        return _fall_back(view, limits, loss)
    if view.suspends_at is not None and (action := _keep_or_call_off(view, view.suspends_at)):
        return action
    if view.handoff is not None:
        return _watch_handoff(view, view.handoff, limits)
    if view.state is JobState.STARTING:
        return _carry_through_or_not(view, limits)
    if view.leaving:
        return _answer_notices(view, limits)
    if (still := standstill(view)) is not None:
        return Action(Do.NOTHING, still.because, look_again_s=1.0)
    action = _grow_or_stay(view, limits)
    watched = (view.gone or view.silent) and action.look_again_s is None
    return replace(action, look_again_s=1.0) if watched else action


def _is_untold(view: JobView) -> bool:
    """Whether the job has a next world whose lead was lost before it could say so."""
    if view.told_at is None:
        return False
    since = max(at for at in (view.told_at, view.listening_since) if at is not None)
    return (view.now - since).total_seconds() >= TOLD_WITHIN_S


def _is_ahead(view: JobView) -> bool:
    """Whether to wait for the report of a handoff. A spare may be one of its targets, or only say so: where no member
    says it too, it is believed for a while."""
    if view.ahead is None or view.ahead_by_member:
        return view.ahead is not None
    since = max(at for at in (view.state_changed_at, view.last_step_at, view.listening_since) if at is not None)
    return (view.now - since).total_seconds() < AHEAD_BY_OTHERS_S


def _fall_back(view: JobView, limits: JobLimits, lost: Loss) -> Action:
    """The checkpoint rung: start a generation from the last checkpoint; else suspend the job, or fail it."""
    if lost.may_pass and view.restart.target is None:
        # Nothing could start without them, so that waiting costs nothing.
        return Action(Do.NOTHING, f"{lost.reason}; they may come back: {view.restart.reason}", look_again_s=1.0)
    return _start_again(view, limits, lost)


def _start_again(view: JobView, limits: JobLimits, lost: Loss) -> Action:
    if nothing := _nothing_to_load(view, lost.cause):
        reason = f"{lost.reason}; {nothing}"
        return Action(Do.SETTLE, reason, state=JobState.FAILED, failed_start=True, cause=lost.cause)
    action = _restart(view, limits, lost, failed_start=_fails(view, lost.cause))
    return replace(action, cause=lost.cause, is_hang=lost.is_hang)


def _fails(view: JobView, cause: FirstCause | None) -> bool:
    """Whether this is a start that failed, and not only one whose nodes were taken or whose checkpoint is damaged: the
    next one begins from another."""
    if cause is not None and cause.what is FailedPart.CHECKPOINT and view.damaged.of_start:
        return False
    members, leaving = view.world.node_ids() if view.world else (), {item.node_id for item in view.leaving}
    away = {name for name, _ in view.lost_sight_of} & set(members) - {error.node for error in view.errors}
    return view.state is JobState.STARTING and not is_of_nodes(cause, unheard=away, leaving=leaving)


def _nothing_to_load(view: JobView, cause: FirstCause | None = None) -> str:
    """Why no other start could do better, where checkpoints are damaged: a job that has made steps does not begin anew
    by itself. Empty where one could."""
    if view.checkpoint is None and view.damaged.steps:
        steps = listed(map(str, view.damaged.steps))
        return f"none of its checkpoints can be loaded, of steps {steps}: submit it again, or begin with start_from"
    is_given = view.checkpoint is not None and view.checkpoint.finished_at is None
    if is_given and cause is not None and cause.what is FailedPart.CHECKPOINT and not view.damaged.of_start:
        return "start_from names it, and there is nothing else to begin from"
    return ""


def _restart(view: JobView, limits: JobLimits, why: Loss, *, failed_start: bool) -> Action:
    loss = why.reason
    if failed_start and view.failed_starts + 1 >= limits.starts_max:
        reason = f"{limits.starts_max} starts in a row failed; the last one: {loss}"
        return Action(Do.SETTLE, reason, state=JobState.FAILED, failed_start=True)
    crashes = view.crashes
    if view.errors and view.state is JobState.RUNNING:
        crashes = crashes.after(view.last_step, view.errors, view.world.node_ids() if view.world else ())
    if why.is_hang:
        crashes = crashes.hung(view.last_step, loss)
        if crashes.hangs >= HANGS_MAX:
            reason = f"the job hung {crashes.hangs} times after step {crashes.step}; the last time: {loss}"
            return Action(Do.SETTLE, reason, state=JobState.FAILED, crashes=crashes)
    if cause := crashes.cause(limits.crashes_max):
        reason = f"the same error ended the job {limits.crashes_max} times after step {crashes.step}: {cause}"
        return Action(Do.SETTLE, reason, state=JobState.FAILED, crashes=crashes)
    if view.restart.target is None:
        return replace(_suspend(loss, view.restart), crashes=crashes)
    if early := _too_early(view, limits, loss):
        return early
    # One of them may be what was lost. It reports, or counts as silent and is left out, within seconds.
    may_be_lost = {*view.unheard, *(view.unconfirmed if why.cause is not None and why.cause.is_felt else ())}
    if unheard := [node for node in view.restart.target.node_ids() if node in may_be_lost]:
        return Action(Do.NOTHING, f"{loss}; a restart waits for news from {listed(unheard)}", look_again_s=0.5)
    wait = _wait_of(view, view.restart.target, limits)
    if wait.leased:
        text = f"{loss}; a restart waits until the step leases of {listed(wait.leased)} are over"
        return Action(Do.NOTHING, text, look_again_s=0.5)
    checkpoint = view.checkpoint
    source = f"checkpoint of step {checkpoint.step}" if checkpoint else "its beginning (there is no checkpoint)"
    lost = lost_steps(view)
    waits = f"; ranks wait {wait.steps_after_s:.0f} s, since {OLDER_MAY_STEP}" if wait.steps_after_s else ""
    return Action(
        Do.START,
        f"{loss}; restart from {source}, {lost} steps lost{waits}; {view.restart.reason}",
        target=view.restart.target,
        checkpoint=checkpoint,
        lost_steps=lost,
        failed_start=failed_start,
        crashes=crashes,
        look_again_s=limits.start_within_s,
        steps_after_s=wait.steps_after_s,
    )


def _too_early(view: JobView, limits: JobLimits, why: str) -> Action | None:
    """What to do instead of a start where several in a row have made no step, and the next one has to wait."""
    begins_at = next_start_at(view.starts, view.state_changed_at, starts_max=limits.starts_max)
    if begins_at <= view.now:
        return None
    text = f"{view.starts.stepless} starts in a row made no step; the next one begins at {begins_at:%H:%M:%S} UTC"
    return Action(Do.NOTHING, f"{why}; {text}", look_again_s=(begins_at - view.now).total_seconds())


def _carry_through_or_not(view: JobView, limits: JobLimits) -> Action:
    """A start that has made no step yet, and perhaps will lose a node. No agent hands it over before its first step, so
    that one which comes too late for that is replaced at once."""
    words, names = starting_words(view.steps_from_at), listed(item.node_id for item in view.leaving)
    look_s = limits.start_within_s + waits_s(view.now, view.steps_from_at)
    if view.leaving and view.decision.target is None and not view.silent:
        return _suspend(f"{names} will go", view.decision)
    end_at = deadline_of(view.leaving)
    if end_at is None:
        return Action(Do.NOTHING, words, look_again_s=look_s)
    usual_s = limits.start_guess_s if view.starts.usual_s is None else view.starts.usual_s
    takes = {"usual_s": usual_s, "step_s": view.step_s, "steps_from_at": view.steps_from_at}
    left = start_left(view.now, view.state_changed_at, end_at, **takes)
    if not left.is_lost:
        text = f"{words}; {names} will go, not before {end_at:%H:%M:%S} UTC: the first step should come in time"
        return Action(Do.NOTHING, text, look_again_s=min(look_s, left.is_lost_in_s))
    first = next(item.node_id for item in view.leaving if item.deadline_at == end_at)
    needs_s = left.to_step_s + left.step_s
    text = f"{first} goes in {max(0.0, left.to_end_s):.0f} s, and a handoff of this start needs {needs_s:.0f} s"
    return _start_again(view, limits, Loss(text, of_node(first, view)))


def _wait_of(view: JobView, target: Placement, limits: JobLimits) -> StartWait:
    """What a start on `target` waits for, since an older world might step on beside it."""
    worlds = [] if view.world is None or view.errors or view.broken else [view.world.members]
    if view.handoff is not None and not set(view.handoff.target_nodes) & set(target.node_ids()):
        worlds.append(tuple(Member(name, 0) for name in view.handoff.target_nodes))
    when = {"now": view.now, "listening_since": view.listening_since, "waits_s": _older_s(view, limits)}
    return wait_of(worlds, target.members, view.lost_sight_of, lease_s=limits.lease_s, **when)


def _older_s(view: JobView, limits: JobLimits) -> float:
    return waits_s(view.now, view.steps_from_at, unstepped_since=view.unstepped_since, lease_s=limits.lease_s)


def _watch_handoff(view: JobView, handoff: OpenHandoff, limits: JobLimits) -> Action:
    """The agents drive an open handoff; the service only drops one that no agent drives."""
    age_s = (view.now - handoff.opened_at).total_seconds()
    quiet_s = (view.now - handoff.changed_at).total_seconds()
    if handoff.state is HandoffState.PROPOSED and age_s > limits.open_within_s:
        return Action(Do.DROP_HANDOFF, f"no agent opened it within {limits.open_within_s:.0f} s")
    missing = [item for item in view.leaving if item.node_id not in handoff.leaving]
    if handoff.state is HandoffState.PROPOSED and missing:
        names = listed(item.node_id for item in missing)
        return Action(Do.DROP_HANDOFF, f"not opened yet, and it does not answer the notice for {names}")
    if handoff.state is HandoffState.PROPOSED and view.absent:
        return Action(Do.DROP_HANDOFF, f"not opened yet, and no reports come from {listed(view.absent)}")
    if quiet_s > limits.handoff_quiet_s:
        return Action(Do.DROP_HANDOFF, f"no report of it for {quiet_s:.0f} s")
    return Action(Do.NOTHING, f"handoff {handoff.handoff_id} is {handoff.state}", look_again_s=1.0)


def _answer_notices(view: JobView, limits: JobLimits) -> Action:
    """Members will go and no handoff is open: propose one for all of them, after the agents had time to open one. They
    could not or would not, so a checkpoint is written too: if nothing comes of the proposal, little is lost."""
    noticed_at = max(item.noticed_at for item in view.leaving)
    # They open none before the first step, and another one where theirs was just aborted as superseded.
    since = max(noticed_at, view.state_changed_at, view.last_handoff_at or noticed_at)
    waited_s = (view.now - since).total_seconds()
    # Where nothing fits the agents cannot act either: their plans come from here. A silent node may come back.
    hopeless = view.decision.target is None and not view.silent
    if waited_s < limits.propose_after_s and not hopeless:
        return Action(Do.NOTHING, "the agents act on the notice", look_again_s=limits.propose_after_s - waited_s)
    if view.decision.target is None:
        return _suspend_in_time(view, noticed_at)
    return _propose(view, limits, view.decision.target, save=_is_unsaved(view, noticed_at))


def _is_unsaved(view: JobView, since: datetime) -> bool:
    """Whether a checkpoint should be written, for there is none since then, and none is on its way."""
    saved_at = view.checkpoint.finished_at if view.checkpoint else None
    return view.saves_at_end and not view.saves_soon and (saved_at is None or saved_at < since)


def _suspend_in_time(view: JobView, noticed_at: datetime) -> Action:
    """Nothing fits what stays. The job trains on while there is time: a node may come, or the notice be taken back. A
    checkpoint is written at once all the same, for the node may go before its time."""
    times = EndTimes(view.step_s, view.checkpoint.seconds if view.checkpoint else None)
    at = begins_at(tuple(item.deadline_at for item in view.leaving), times, view.suspends_at)
    if at is None or at <= view.now or not view.saves_at_end:
        return _suspend(_why_it_will_stand(view), view.decision)
    text = f"{_why_it_will_stand(view)}; {view.decision.reason}: suspended at {at:%H:%M:%S} UTC unless a node comes"
    wait_s = (at - view.now).total_seconds()
    if at == view.suspends_at:
        return Action(Do.NOTHING, text, look_again_s=wait_s)
    return Action(Do.SUSPEND_LATER, text, suspends_at=at, save=_is_unsaved(view, noticed_at), look_again_s=wait_s)


def _why_it_will_stand(view: JobView) -> str:
    names = listed(item.node_id for item in view.leaving)
    return f"{names} will go" if names else f"suspended at {view.suspends_at:%H:%M:%S} UTC as was planned"


def _is_held(view: JobView) -> bool:
    """Whether agents do not end the ranks for the sake of a handoff."""
    return view.handoff is not None and view.handoff.state is not HandoffState.PROPOSED


def _keep_or_call_off(view: JobView, at: datetime) -> Action | None:
    """What becomes of a suspension that is planned for later: it stands while nothing fits, or while an agent might not
    hear that it does not. None: the rule goes on as if none were planned."""
    left_s = (at - view.now).total_seconds()
    if 0 < left_s <= COMMITTED_S and not _is_held(view):
        return Action(Do.NOTHING, f"{_why_it_will_stand(view)}; its ranks end now", look_again_s=left_s)
    is_hopeless = bool(view.leaving) and view.decision.target is None and view.handoff is None
    if is_hopeless or left_s <= COMMITTED_S or view.silent or view.gone or view.unheard:
        return None
    return Action(Do.SUSPEND_LATER, "it need not be suspended: the job has where to go", look_again_s=0.0)


def _grow_or_stay(view: JobView, limits: JobLimits) -> Action:
    if view.decision.verdict is not PlannerVerdict.MOVE or view.decision.target is None:
        return Action(Do.NOTHING, view.decision.reason)
    settled_at = max(view.state_changed_at, view.last_handoff_at or view.state_changed_at)
    waited_s = (view.now - settled_at).total_seconds()
    about = f"about to move: {view.decision.reason}"
    if waited_s < limits.grow_settle_s or view.silent:
        return Action(Do.NOTHING, about, look_again_s=limits.grow_settle_s)
    needed = {*view.decision.target.node_ids(), *(view.world.node_ids() if view.world else ())}
    if unheard := [node for node in view.unheard if node in needed]:
        # After an outage of the service or its database, what they have to tell may be that they go.
        return Action(Do.NOTHING, f"{about}; waits for news from {listed(unheard)}", look_again_s=0.5)
    return _propose(view, limits, view.decision.target)


def _propose(view: JobView, limits: JobLimits, target: Placement, *, save: bool = False) -> Action:
    """Propose the planner's target, unless the same has just been declined or aborted: it would end the same way."""
    past = view.declined
    if past is not None and (past.target, set(past.leaving)) == (target, {item.node_id for item in view.leaving}):
        left_s = past.waits_s(limits.propose_again_s) - (view.now - past.declined_at).total_seconds()
        if left_s > 0:
            return Action(Do.NOTHING, f"{past.reason}; the same is not proposed again yet", look_again_s=left_s)
    return Action(Do.PROPOSE, view.decision.reason, target=target, leaving=view.leaving, save=save)


def _suspend(why: str, decision: PlannerDecision) -> Action:
    """`why` the world cannot go on, and the planner's reason for having no other one."""
    because = fitting(why, SUSPENDED_BECAUSE_CHARS_MAX)
    return Action(Do.SUSPEND, f"{why}; {decision.reason}", suspended_because=because)


def _why_suspended(view: JobView) -> str:
    return f"suspended because {view.suspended_because}" if view.suspended_because else ""


def _start_if_possible(view: JobView, limits: JobLimits) -> Action:
    why = f"{_why_suspended(view)}; ".removeprefix("; ")
    if nothing := _nothing_to_load(view):
        return _settle(JobState.FAILED, why + nothing)
    if view.restart.target is None:
        return Action(Do.NOTHING, f"{why}waiting: {view.restart.reason}")
    if view.suspended_because and (early := _too_early(view, limits, _why_suspended(view))):
        return early
    # A job that has run before continues from its checkpoint; without one it starts over.
    lost = lost_steps(view)
    source = f"from checkpoint of step {view.checkpoint.step}" if view.checkpoint else "from its beginning"
    source = f"{source}, {lost} steps lost; " if view.checkpoint or lost else ""
    return Action(
        Do.START,
        why + source + view.restart.reason,
        target=view.restart.target,
        checkpoint=view.checkpoint,
        lost_steps=lost,
        steps_after_s=_older_s(view, limits),
    )


def _end_when_quiet(view: JobView, limits: JobLimits, state: JobState, reason: str) -> Action:
    waited_s = (view.now - view.state_changed_at).total_seconds()
    limit_s = limits.stop_within_s + (limits.checkpoint_within_s if view.saves_at_end else 0.0)
    if view.ranks_left == 0:
        return _settle(state, reason)
    if waited_s > limit_s:
        return _settle(state, f"{reason}; {view.ranks_left} ranks did not end within {limit_s:.0f} s")
    return Action(Do.NOTHING, f"{view.ranks_left} ranks are still ending", look_again_s=1.0)


def _settle(state: JobState, reason: str, *, look_again_s: float | None = None) -> Action:
    return Action(Do.SETTLE, reason, state=state, look_again_s=look_again_s)


def lost_steps(view: JobView) -> int:
    """Steps of the present world that no checkpoint holds."""
    return max(0, view.last_step - (view.checkpoint.step if view.checkpoint else 0))


def deadline_of(leaving: tuple[Leaving, ...]) -> datetime | None:
    """The earliest deadline among members that will go."""
    return min((item.deadline_at for item in leaving if item.deadline_at is not None), default=None)


def seconds(value: float) -> timedelta:
    """Seconds as a timedelta."""
    return timedelta(seconds=value)
