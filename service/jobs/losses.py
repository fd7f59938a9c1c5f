"""Why the live world of a job cannot go on, if it cannot, and whether somebody is about to know more of that. Pure."""

from agent.protocol.values import HandoffState
from liver_core.layout.limits import listed
from service.jobs.causes import FailedPart, FirstCause, away_of, first_cause, first_of, may_be_of_a_node, ran_out
from service.jobs.stalls import hang_of
from service.jobs.tables import JobState
from service.jobs.view import JobLimits, JobView, Loss

STEPPING_S = 5.0
"""A step this recent shows that every rank of the job lives."""
GONE_PATIENCE_S = 120.0
"""After the last step. A node that is not heard may be cut off, or its agent stopped, while its ranks train; and
suspending the job would save nothing for as long as nothing could start."""
PAUSE_MOST_S = 180.0
"""After the last step. By then the ranks that agreed on a boundary have a decision, or say that they are broken:
targets wait at most two minutes, sources half as long again."""
LEAVER_LOST_S = 5.0
"""After a rank that leaves has died. By then the others say that they are broken, or that the boundary came first."""


def why_lost(view: JobView, limits: JobLimits) -> Loss | None:
    """Why the live world cannot continue; None if it can, or if the agents may still save it."""
    if view.revoked:
        # Also while it trains on: it is not to be believed, and nobody can tell its agent to hand anything over.
        names = listed(view.revoked)
        return Loss(f"the key of {names} was revoked", of_node(view.revoked[0], view))
    if (view.errors or view.broken) and not (_goes_without_leavers(view) and _only_leavers_failed(view)):
        return _as_known(view)
    # Where the machine answers, the agent alone may be stopped or starved: its ranks wait for it, and lose nothing.
    unanswered = tuple(node for node in view.silent if node not in view.answering)
    gone, silent = _needed(view, view.gone), _needed(view, unanswered)
    stepped_at = view.last_step_at if view.state is JobState.RUNNING else None
    stalled_s = (view.now - (stepped_at or view.state_changed_at)).total_seconds()
    # All ranks step together: while steps are made, the ranks of a node live, whatever became of its agent.
    steps = view.state is JobState.RUNNING and stalled_s <= max(STEPPING_S, limits.stall_steps * view.step_s)
    if gone and not steps:
        announced = {item.node_id for item in view.leaving} & set(gone)
        may_pass = view.state is JobState.RUNNING and stalled_s <= GONE_PATIENCE_S and not announced
        text = f"{listed(gone)} disappeared without a handoff"
        return Loss(text, of_node(gone[0], view), may_pass=may_pass)
    # Of steps made before the service listened again, it may not have heard yet.
    heard_s = (view.now - view.listening_since).total_seconds() if view.listening_since else stalled_s
    if silent and min(stalled_s, heard_s) > max(limits.stall_after_s, limits.stall_steps * view.step_s):
        text = f"{listed(silent)} {'is' if len(silent) == 1 else 'are'} silent"
        text = f"{text} and no step was made for {stalled_s:.0f} s"
        return Loss(text, of_node(silent[0], view), may_pass=True)
    from_at = max(view.state_changed_at, view.steps_from_at or view.state_changed_at)
    if view.state is JobState.STARTING and (view.now - from_at).total_seconds() > limits.start_within_s:
        return Loss(f"the start made no step within {limits.start_within_s:.0f} s", FirstCause(FailedPart.START))
    return hang_of(view)


def may_know_more(view: JobView, limits: JobLimits) -> bool:
    """Whether all that is told so far may follow from the end of another rank, which its agent is about to report. Or
    where a start is lost, a node may be gone with what ranks miss: it is heard or overdue within seconds. Or only a
    leaver has failed: the handoff may have passed its boundary, and then it goes without it."""
    if not view.errors and not view.broken:
        return False
    causes = [cause for cause, _ in _said(view)]
    if view.state is JobState.STARTING and view.unconfirmed:
        return all(may_be_of_a_node(cause) for cause in causes)
    age_s = (view.now - view.lost_at).total_seconds() if view.lost_at else limits.first_cause_within_s
    is_open = view.handoff is not None and view.handoff.state is not HandoffState.PROPOSED
    if is_open and _only_leavers_failed(view):
        return age_s < LEAVER_LOST_S
    return all(cause is not None and cause.known.may_follow for cause in causes) and age_s < limits.first_cause_within_s


def _as_known(view: JobView) -> Loss:
    """The loss of which ranks or handoffs tell, with the first cause by all that is known."""
    said = _said(view)
    told = first_of(cause for cause, _ in said)
    shown = next(text for cause, text in said if cause == told)
    due = ran_out(((item.node_id, item.deadline_at) for item in view.leaving), view.now)
    # Targets that are away explain nothing of this world before they have cut over.
    nexts = () if view.handoff is not None and view.handoff.state is not HandoffState.CUTTING_OVER else view.absent
    silent = _needed(view, tuple(dict.fromkeys((*view.gone, *view.silent, *nexts))))
    overdue = _needed(view, (*view.unheard, *view.unconfirmed))
    away = away_of(silent, overdue, due, {error.node for error in (*view.errors, *view.clues)})
    cause = first_cause((cause for cause, _ in said), away=away, stopped=view.stopped)
    if cause is not None and cause != told:
        stands = cause.what is FailedPart.RANK
        who = f"rank {cause.rank} on node {cause.node} stands still" if stands else f"{cause.node} is not heard"
        return Loss(f"{who}; {shown}", cause)
    if cause is not None and cause.is_felt and away:
        return Loss(f"{listed(away)} are not heard; {shown}", cause)
    return Loss(shown, cause)


def _said(view: JobView) -> list[tuple[FirstCause | None, str]]:
    """The causes that ranks and handoffs give, each with its words."""
    of_ranks = ((error.cause, error.shown) for error in (*view.errors, *view.clues))
    return [*of_ranks, *((loss.cause, loss.reason) for loss in view.broken)]


def of_node(node: str, view: JobView) -> FirstCause:
    """That this node is not heard, after the last step of the job."""
    return FirstCause(FailedPart.NODE, node, step=view.last_step)


def _needed(view: JobView, nodes: tuple[str, ...]) -> tuple[str, ...]:
    """The `nodes` that the job still needs: all but leaving nodes that the next world can do without."""
    if view.handoff is None or not _goes_without_leavers(view):
        return nodes
    return tuple(node for node in nodes if node in view.handoff.target_nodes)


def _goes_without_leavers(view: JobView) -> bool:
    """Whether the loss of a leaver does not end the job: the next world no longer needs it, or its ranks are about to
    decide whether they do. If they cannot go on, they say that they are broken."""
    handoff = view.handoff
    if handoff is None or handoff.may_lose_leavers or handoff.state is not HandoffState.CUTTING_OVER:
        return handoff is not None and handoff.may_lose_leavers
    if _all_sources_failed(view) and view.lost_at is not None:
        return (view.now - view.lost_at).total_seconds() <= LEAVER_LOST_S
    return (view.now - (view.last_step_at or handoff.changed_at)).total_seconds() <= PAUSE_MOST_S


def _all_sources_failed(view: JobView) -> bool:
    """Whether no rank is left that has the state of this world. Agents tell those who read it at once."""
    return view.world is not None and len(view.errors) >= len(view.world.members)


def _only_leavers_failed(view: JobView) -> bool:
    """Whether all that is told of the loss is of nodes without which the open handoff goes, also by another handoff
    that they broke."""
    staying = view.handoff.target_nodes if view.handoff is not None else ()
    of_broken = (loss.cause.node if loss.cause is not None else None for loss in view.broken)
    named = (*(error.node for error in view.errors), *of_broken)
    return all(node is not None and node not in staying for node in named)
