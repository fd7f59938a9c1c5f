"""The handoffs of a simulated job, as its service stores them: proposals, and agents' copies of what they drive. Pure.

Which of two copies is newer is decided by `service.handoffs.rules`, as in `service.handoffs.operations`.
"""

from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from itertools import takewhile
from uuid import NAMESPACE_OID, UUID, uuid5

from agent.protocol.values import HandoffCause, HandoffState, Placement
from liver_core.handoff import Decision, Rung
from liver_core.layout import Roster
from service.handoffs.rules import (
    OPEN,
    WAITS_TIMES_MAX,
    Copy,
    Declined,
    OpenHandoff,
    furthest,
    is_newer,
    is_open,
    is_opened_anew,
    may_lose_leavers,
    orders_differ,
)
from service.jobs.causes import FIRST_CAUSE_WITHIN_S, FailedPart, FirstCause
from service.jobs.rules import deadline_of
from service.jobs.view import Action, Loss
from service.simulation.world.moments import seconds_at, utc, utc_or_none
from service.simulation.world.reports import Mirror, Proposal

KEPT_MAX = 1_000
"""So many of the newest are remembered."""


@dataclass(slots=True)
class HandoffRow:
    """One handoff. `generation`: None while it is only proposed, or where another one has the number. `layout`: means
    something to the host."""

    handoff_id: str
    parent: int
    generation: int | None
    state: HandoffState
    target: Placement | Roster
    opened_at: datetime
    recorded_at: datetime
    why: str
    reason: str
    leaving: tuple[str, ...] = ()
    deadline_at: datetime | None = None
    plan_revision: int = 1
    mirror_seq: int = 0
    rung: Rung = Rung.STOP_AND_COPY
    decision: Decision = Decision.UNDECIDED
    superseded: bool = False
    is_declined: bool = False
    ended_by: FirstCause | None = None
    proposal: Proposal | None = None
    layout: object = None

    @property
    def copy(self) -> Copy:
        """What orders it among copies of it."""
        return Copy(self.state, self.plan_revision, self.mirror_seq, self.generation)

    def as_loss(self) -> Loss:
        """Why the active world is lost by it."""
        text = f"handoff {self.handoff_id} is {self.state}: {self.reason or 'no reason given'}"
        return Loss(text, self.ended_by, since=self.recorded_at)

    @property
    def roster(self) -> Roster:
        """The world that it leads to, once it is opened."""
        assert isinstance(self.target, Roster)
        return self.target

    def as_open(self, *, crosses: bool) -> OpenHandoff:
        """As the rule for jobs takes it. `crosses`: a rank says that it is past the boundary."""
        state = furthest(self.state, crosses=crosses)
        return OpenHandoff(
            handoff_id=uuid_of(self.handoff_id),
            state=state,
            leaving=self.leaving,
            target_nodes=self.target.node_ids(),
            opened_at=self.opened_at,
            changed_at=self.recorded_at,
            deadline_at=self.deadline_at,
            may_lose_leavers=may_lose_leavers(state, self.rung, self.decision),
        )


@dataclass(frozen=True, slots=True)
class Stored:
    """What became of a copy. `row`: None where nothing was stored. `orders_differ`: whether agents are to be told.
    `refusal`: why it does not count."""

    row: HandoffRow | None = None
    orders_differ: bool = False
    refusal: str | None = None


class HandoffRows:
    """Of one job."""

    def __init__(self) -> None:
        self.rows: dict[str, HandoffRow] = {}

    # What the service does.

    def propose(self, handoff_id: str, parent: int, action: Action, *, now: datetime, layout: object) -> HandoffRow:
        """A handoff for the agents to open. It has no generation: opening burns one."""
        assert action.target is not None
        leaving, deadline_at = tuple(item.node_id for item in action.leaving), deadline_of(action.leaving)
        cause = HandoffCause.NOTICE if leaving else HandoffCause.GROW
        ends_s = None if deadline_at is None else seconds_at(deadline_at)
        proposal = Proposal(handoff_id, parent, action.target, leaving, ends_s, cause, action.reason, layout)
        row = HandoffRow(
            handoff_id,
            parent,
            None,
            HandoffState.PROPOSED,
            action.target,
            now,
            now,
            action.reason,
            action.reason,
            leaving=leaving,
            deadline_at=deadline_at,
            proposal=proposal,
        )
        self._keep(row)
        return row

    def drop_open(self, reason: str, now: datetime, cause: FirstCause | None) -> None:
        """Abort all that is open, by what ends its world. If agents do drive it, their next copy counts again."""
        while (row := self.open_row()) is not None:
            if row.generation is not None and row.ended_by is None:
                row.ended_by = cause
            _drop(row, reason, now)

    def decline(self, handoff_id: str, by: str, reason: str, now: datetime) -> bool:
        """Whether a proposal ends by that: nobody has opened it yet."""
        row = self.rows.get(handoff_id)
        if row is None or row.state is not HandoffState.PROPOSED:
            return False
        _drop(row, f"{by} does not open it: {reason}", now)
        row.is_declined = True
        return True

    def take(self, mirror: Mirror, *, active: int | None, made_by: str | None, now: datetime) -> Stored:
        """Store an agent's copy, which may be old. `made_by`: the handoff that made the generation of this number, or
        its start; None where none did."""
        row, old, anew = self.rows.get(mirror.handoff_id), None, False
        new = Copy(mirror.state, mirror.plan_revision, mirror.mirror_seq, mirror.generation)
        if row is not None:
            old = row.copy
            if not is_newer(new, old) or (old.generation is not None and _is_over(row, active, new)):
                return Stored()
            anew = is_opened_anew(new, old)
            if anew:
                old = None  # What was dropped here, or under an earlier number, counts as unknown.
        taken = self._claim_number(mirror, made_by, now)
        if taken is not None and mirror.state is not HandoffState.ABORTED:
            return Stored(refusal=taken, orders_differ=True)
        opened = old is None or old.generation is None
        if row is not None and anew:
            row.reason, row.ended_by = "", None
        row = self._copy_over(row, mirror, now)
        if taken is not None:
            row.generation = None
        was_open = old is None or is_open(old.state)
        if mirror.state is not HandoffState.ABORTED and was_open:
            self._drop_unopened(mirror, now)
        return Stored(row, opened or orders_differ(new, old))

    def name_cause(self, cause: FirstCause, since: datetime) -> None:
        """How a rank ended is known now: that ended the attempts for which others have missed it."""
        for row in self.rows.values():
            felt = row.ended_by is not None and row.ended_by.what is FailedPart.PEER
            if felt and (since - row.recorded_at).total_seconds() <= FIRST_CAUSE_WITHIN_S:
                row.ended_by = cause

    # What is known.

    def open_row(self) -> HandoffRow | None:
        """What may still become active; of several the one that is furthest."""
        found = (row for row in self.rows.values() if is_open(row.state))
        return max(found, key=lambda row: (OPEN.index(row.state), row.opened_at), default=None)

    def last_ended(self) -> HandoffRow | None:
        """What ended last, however it ended."""
        found = [row for row in self.rows.values() if not is_open(row.state)]
        return max(found[::-1], key=lambda row: row.recorded_at, default=None)

    def declined(self, active: int | None) -> Declined | None:
        """What would have left the `active` world, and was not opened, or aborted though nobody had to go."""
        row = self.last_ended()
        if row is None or row.parent != active or row.state is not HandoffState.ABORTED:
            return None
        target, reason = placement_of(row), row.reason
        if row.is_declined:
            return Declined(target, row.leaving, row.recorded_at, reason)
        if row.generation is None or row.leaving or row.superseded:
            return None
        tried = [each for each in self.rows.values() if each.parent == active and each.generation is not None]
        aborted = [each for each in tried if each.state is HandoffState.ABORTED]
        newest = sorted(aborted, key=lambda each: each.opened_at)[::-1][:WAITS_TIMES_MAX]
        same = takewhile(lambda each: not each.leaving and placement_of(each) == target, newest)
        return Declined(target, row.leaving, row.recorded_at, reason, max(1, sum(1 for _ in same)))

    def untold(self, generation: int | None) -> HandoffRow | None:
        """The one that has this number, unless it is known to have become active or to be broken."""
        over = (HandoffState.ACTIVE, HandoffState.BROKEN)
        found = (row for row in self.rows.values() if row.generation == generation and row.state not in over)
        return None if generation is None else next(found, None)

    def broken_by(self, active: int | None, made_by: str) -> list[HandoffRow]:
        """Those by which the active world is lost: from it, or the one that made it (`made_by`)."""
        found = [row for row in self.rows.values() if _breaks(row, active, made_by)]
        return sorted(found, key=lambda row: (row.recorded_at, uuid_of(row.handoff_id)))

    def has_generation(self, generation: int) -> bool:
        """Whether some handoff has this number."""
        return any(row.generation == generation for row in self.rows.values())

    def highest(self) -> int:
        """The greatest number that one of them has."""
        return max((row.generation for row in self.rows.values() if row.generation is not None), default=0)

    def _claim_number(self, mirror: Mirror, made_by: str | None, now: datetime) -> str | None:
        """Why this handoff cannot have its number, None if it can. If an earlier copy of another one has it, this one
        takes it over, unless the other is active or this one is aborted."""
        if made_by is not None and made_by != mirror.handoff_id:
            return f"generation {mirror.generation} of this job was made by {made_by}"
        found = (row for row in self.rows.values() if row.handoff_id != mirror.handoff_id)
        other = next((row for row in found if row.generation == mirror.generation), None)
        if other is None:
            return None
        if mirror.state is HandoffState.ABORTED or other.state is HandoffState.ACTIVE:
            return f"generation {mirror.generation} of this job belongs to handoff {other.handoff_id}"
        other.generation = None
        if is_open(other.state):
            _drop(other, f"generation {mirror.generation} now belongs to handoff {mirror.handoff_id}", now)
        return None

    def _drop_unopened(self, mirror: Mirror, now: datetime) -> None:
        """The agents have opened a handoff of their own instead of what the service proposed."""
        for row in self.rows.values():
            is_proposed = row.state is HandoffState.PROPOSED and row.parent <= mirror.parent
            if is_proposed and row.handoff_id != mirror.handoff_id:
                _drop(row, f"the agents opened handoff {mirror.handoff_id} instead", now)
                row.superseded = True

    def _copy_over(self, row: HandoffRow | None, mirror: Mirror, now: datetime) -> HandoffRow:
        known = row
        made = HandoffRow(
            mirror.handoff_id,
            mirror.parent,
            mirror.generation,
            mirror.state,
            mirror.target,
            known.opened_at if known is not None else utc(mirror.opened_s),
            now,
            known.why if known is not None else f"handoff because of {mirror.cause}",
            known.reason if known is not None and mirror.reason is None else "",
            leaving=mirror.leaving,
            deadline_at=utc_or_none(mirror.deadline_s) or (None if known is None else known.deadline_at),
            plan_revision=mirror.plan_revision,
            mirror_seq=mirror.mirror_seq,
            rung=mirror.rung,
            decision=mirror.decision,
            superseded=mirror.superseded,
            ended_by=None if known is None else known.ended_by,
            proposal=None if known is None else known.proposal,
            layout=mirror.layout,
        )
        if mirror.reason is not None:
            made.reason = mirror.reason.text
        self._keep(made)
        return made

    def _keep(self, row: HandoffRow) -> None:
        self.rows[row.handoff_id] = row
        if len(self.rows) > KEPT_MAX:
            oldest = next(name for name, each in self.rows.items() if not is_open(each.state))
            del self.rows[oldest]


def _breaks(row: HandoffRow, active: int | None, made_by: str) -> bool:
    if row.handoff_id == made_by and row.state is HandoffState.ABORTED:
        return True
    return row.state is HandoffState.BROKEN and (row.parent == active or row.handoff_id == made_by)


def uuid_of(handoff_id: str) -> UUID:
    """The same for one id, whatever hosts of a simulation call it."""
    with suppress(ValueError):
        return UUID(handoff_id)
    return uuid5(NAMESPACE_OID, handoff_id)


def placement_of(row: HandoffRow) -> Placement:
    """Its target without job and generation."""
    if isinstance(row.target, Placement):
        return row.target
    return Placement(layout=row.target.layout, members=tuple(row.target.members))


def _drop(row: HandoffRow, reason: str, now: datetime) -> None:
    row.state, row.reason, row.recorded_at = HandoffState.ABORTED, reason, now


def _is_over(row: HandoffRow, active: int | None, new: Copy) -> bool:
    """Whether an aborted attempt is reported broken although the job has left the world that it would end."""
    return row.state is HandoffState.ABORTED and new.state is HandoffState.BROKEN and row.parent != active
