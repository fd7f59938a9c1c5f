"""How the agent that leads a handoff tells how far it is, and its end. Pure."""

from collections.abc import Iterable

from agent.protocol.values import HandoffState
from liver_core.handoff import Decision, HandoffId, Phase, Reason, Stage
from liver_core.handoff.proposer_events import HandoffEnded

NOT_OPENED = Reason("the agent that led it was killed before it had opened it", "open")


def state_of_open(phase: Phase, *, is_past: bool, streams: bool) -> HandoffState:
    """The state of an open handoff. `is_past`: a participant is past the boundary; `streams`: state streams somewhere.
    Past the boundary the ranks decide, also where whoever leads wants to abort it by now."""
    match phase:
        case Phase.RETIRE:
            return HandoffState.ACTIVE
        case Phase.PERMIT | Phase.ABORT if is_past:
            return HandoffState.CUTTING_OVER
        case Phase.PERMIT | Phase.WITHDRAW:
            return HandoffState.READY
        case Phase.PREPARE if streams:
            return HandoffState.STREAMING
        case _:
            return HandoffState.PREPARING


def state_of_end(ended: HandoffEnded) -> HandoffState:
    """The state of a handoff that ended so."""
    ends = {Stage.ACTIVE: HandoffState.ACTIVE, Stage.ABORTED: HandoffState.ABORTED}
    return ends.get(ended.stage, HandoffState.BROKEN)


def untold_ends(
    unfinished: Iterable[str], ended: Iterable[HandoffEnded], *, open_id: str | None
) -> tuple[HandoffEnded, ...]:
    """What an agent that was killed has not told any more: how handoffs ended that it led. `unfinished`: those of which
    the newest mirror tells no end; `ended` and `open_id`: what its proposer knows. One that the proposer does not know
    was never opened: no order of it was sent."""
    known = {item.handoff_id: item for item in ended}
    return tuple(
        known.get(HandoffId(name)) or HandoffEnded(HandoffId(name), 0, Stage.ABORTED, Decision.UNDECIDED, NOT_OPENED)
        for name in unfinished
        if name != open_id
    )
