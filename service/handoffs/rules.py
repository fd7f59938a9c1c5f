"""What a job is decided from of its handoffs, which of two copies of one is newer, and what it is for. Pure."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from datetime import datetime
from uuid import UUID

from agent.protocol.sync import HandoffMirror
from agent.protocol.values import HandoffState, Placement
from liver_core.handoff import Decision, Rung
from liver_core.layout.limits import listed
from liver_core.retries import doubled_s

ABORTED_WAITS_S = 4.0
WAITS_TIMES_MAX = 16
"""What is aborted again and again is proposed again after at most so many times what a declined proposal waits."""
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
    """What orders two copies of one handoff. `generation`: the number under which it was opened; None while it is only
    proposed, or where another one has the number."""

    state: HandoffState
    plan_revision: int
    mirror_seq: int
    generation: int | None = None


@dataclass(frozen=True, slots=True)
class OpenHandoff:
    """A handoff that is not active, aborted or broken. `may_lose_leavers`: the next world no longer needs the leaving
    nodes. It is decided, or it is a rescue past its boundary, which releases them before it builds the next world; if
    they went too early, its ranks report that they are broken."""

    handoff_id: UUID
    state: HandoffState
    leaving: tuple[str, ...]
    target_nodes: tuple[str, ...]
    opened_at: datetime
    changed_at: datetime
    deadline_at: datetime | None
    may_lose_leavers: bool = False


@dataclass(frozen=True, slots=True)
class Declined:
    """What the service proposed last, if an agent did not open it, or if it was opened and came to nothing: when, and
    why not. `times`: so often in a row; 0 for what no agent opened."""

    target: Placement
    leaving: tuple[str, ...]
    declined_at: datetime
    reason: str
    times: int = 0

    def waits_s(self, declined_s: float) -> float:
        """How long the same is not proposed again. An agent that declined it would do so again for `declined_s`. What
        was aborted may go through at once, as where a rank had died, and waits longer with each further time."""
        if not self.times:
            return declined_s
        return doubled_s(ABORTED_WAITS_S, self.times - 1, declined_s * WAITS_TIMES_MAX)


def may_lose_leavers(state: HandoffState, rung: Rung, decision: Decision) -> bool:
    """Whether the next world of an open handoff no longer needs the nodes that leave, see `OpenHandoff`."""
    return decision.goes or (rung is Rung.RESCUE and state is HandoffState.CUTTING_OVER)


def furthest(state: HandoffState, *, crosses: bool) -> HandoffState:
    """Where an open handoff stands, by its lead's word and by that of its ranks, which may be past the boundary."""
    return HandoffState.CUTTING_OVER if crosses and state is not HandoffState.PROPOSED else state


def is_newer(new: Copy, old: Copy) -> bool:
    """Whether `new` replaces `old`, which is stored.

    Several agents may mirror one handoff (the lead may die, two may open one proposal), so the sequence alone does not
    order copies. See `_key`. What was aborted here before it had a number may still be driven by agents; then only a
    copy made later than the stored one counts.
    """
    if old.generation is None and old.state is HandoffState.ABORTED:
        return new.mirror_seq > old.mirror_seq
    if None in (new.generation, old.generation):
        return _key(new) > _key(old)
    return (*_opening(new), *_key(new)) > (*_opening(old), *_key(old))


def is_opened_anew(new: Copy, old: Copy) -> bool:
    """Whether `old`, which was aborted, says nothing of what `new` tells: agents have opened the handoff since then."""
    if old.state is not HandoffState.ABORTED:
        return False
    return old.generation is None or (new.generation is not None and new.generation > old.generation)


def orders_differ(new: Copy, old: Copy | None) -> bool:
    """Whether the orders of the job's nodes change when `new` replaces `old`.

    Orders name the nodes that take part (a new handoff, or a new plan of it) and the active generation (its end). The
    agents report progress to each other: sending each phase to a thousand nodes would cost a thousand syncs.
    """
    return old is None or _ordered(new) != _ordered(old)


def is_open(state: HandoffState) -> bool:
    """Whether it may still become active."""
    return state in OPEN


def why_opened(known: str, leaving: Collection[str], mirror: HandoffMirror) -> str:
    """What a handoff is for. `known`: what is stored of that, as long as no more nodes go than those `leaving`."""
    more = sorted(set(mirror.leaving) - set(leaving))
    if known and not more:
        return known
    if not more:
        return f"handoff because of {mirror.cause}"
    # The agents keep a margin before the end that was announced.
    by = f", the job must have left by {mirror.deadline_utc:%H:%M:%S} UTC" if mirror.deadline_utc is not None else ""
    return "; ".join(filter(None, (known, f"{listed(more)} will go{by}")))


def accepts_active(*, active: int | None, parent: int, generation: int, started_here: frozenset[int]) -> str | None:
    """Why a handoff that its agents report as active must not become the job's generation; None if it may.

    `started_here`: generations that the service itself started (first start, checkpoint rung). Agents without the
    service may have completed several handoffs of which only the last is known. Its parent may then be above the active
    generation, unless the service has started a generation in between.
    """
    if active is None:
        return "the job has no active generation"
    if generation <= active:
        return f"generation {active} is already active"
    if parent < active:
        return f"its parent {parent} was replaced by generation {active}"
    overtaken = sorted(number for number in started_here if parent < number or active < number <= parent)
    if overtaken:
        return f"the service has started generation {overtaken[-1]} since then"
    return None


def went_through(
    *, parent: int, generation: int, recorded: Mapping[int, int | None], started_here: frozenset[int]
) -> bool:
    """Whether the job has gone on from this generation, which its agents report as active only after a later one. A
    number is used once, so that a later handoff which began there, or behind it, shows that it did.

    `recorded`: the parent of each generation that is known; `started_here`: those that the service itself started.
    """
    later = min((number for number in recorded if number > generation), default=None)
    earlier = max((number for number in recorded if number < generation), default=0)
    if later is None or later in started_here:
        return False
    return parent >= earlier and (recorded[later] or 0) >= generation


def _ordered(copy: Copy) -> tuple[int | None, int, HandoffState | None]:
    return copy.generation, copy.plan_revision, None if is_open(copy.state) else copy.state


def _opening(copy: Copy) -> tuple[bool, int]:
    """What has become of the job counts first. Else a later opening beats an earlier one, however that ended."""
    is_final = copy.state in (HandoffState.ACTIVE, HandoffState.BROKEN)
    return is_final, 0 if is_final or copy.generation is None else copy.generation


def _key(copy: Copy) -> tuple[bool, int, int, int]:
    """Of one opening: an ended copy beats an open one, then a later plan an earlier one, then a later state an earlier
    one, and only then the sequence counts."""
    ended = not is_open(copy.state)
    # Once ended, the revision no longer matters: active beats aborted, whichever agent reports it.
    return ended, 0 if ended else copy.plan_revision, _PROGRESS[copy.state], copy.mirror_seq
