"""Which of two copies of a handoff is the newer truth. Pure."""

from dataclasses import dataclass

from agent.protocol.values import HandoffState

OPEN = (
    HandoffState.PROPOSED,
    HandoffState.PREPARING,
    HandoffState.STREAMING,
    HandoffState.READY,
    HandoffState.CUTTING_OVER,
)
_PROGRESS = {state: index for index, state in enumerate([*OPEN, HandoffState.ABORTED, HandoffState.ACTIVE])}
_PROGRESS[HandoffState.BROKEN] = len(_PROGRESS)


@dataclass(frozen=True, slots=True)
class Copy:
    """What orders two copies of one handoff."""

    state: HandoffState
    plan_revision: int
    mirror_seq: int


def is_newer(new: Copy, old: Copy) -> bool:
    """Whether `new` says more than `old`.

    Several agents may mirror one handoff (the lead may die), so the sequence alone does not order copies: an end beats
    what is open, a later plan beats an earlier one, further beats less far, and only then the sequence counts.
    """
    return _key(new) > _key(old)


def orders_differ(new: Copy, old: Copy | None) -> bool:
    """Whether the nodes of the job are told something else once `new` has replaced `old`.

    They are told which nodes take part (a new handoff, or a new plan of it) and which generation is active (its end);
    how far it is they know from each other. Telling a thousand nodes of each phase would cost a thousand syncs.
    """
    return old is None or (new.plan_revision, _end(new)) != (old.plan_revision, _end(old))


def is_open(state: HandoffState) -> bool:
    """Whether it may still become active."""
    return state in OPEN


def _end(copy: Copy) -> HandoffState | None:
    return None if is_open(copy.state) else copy.state


def _key(copy: Copy) -> tuple[bool, int, int, int]:
    ended = not is_open(copy.state)
    # Once ended, the revision no longer matters: active beats aborted whoever says it.
    return ended, 0 if ended else copy.plan_revision, _PROGRESS[copy.state], copy.mirror_seq
