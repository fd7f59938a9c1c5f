"""What a rank does between an order and the boundary at which all ranks agree on it: build, show the ready tag, make
communicators, cut over or drop. The rank process hosts it.

Pure, sans-IO: `handle(event, now)` returns what to do next. `now` is UTC seconds. At most one handoff is pending. What
must hold, and the checks for it: README.md, "Invariants".
"""

from collections import OrderedDict
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import assert_never

from liver_core.handoff.messages import OUT_OF_TIME, Order, RankStage, Reason, Rung, Tick
from liver_core.handoff.pending_events import (
    Aborted,
    Amend,
    BetweenSteps,
    BoundaryFound,
    BoundaryMissed,
    BoundaryOver,
    BuildFailed,
    BuildWorld,
    Built,
    BuiltWorld,
    Connect,
    Connected,
    CutOver,
    CutoverEnded,
    Dropped,
    DropWorld,
    EndNewcomer,
    Entered,
    OrderCame,
    PendingEffects,
    PendingEvent,
    Permitted,
    RankEnds,
    Say,
    StreamBegan,
    Warn,
    Withdrawn,
)
from liver_core.handoff.ready_tag import NOTHING_WANTED, Agreement, BoundaryPhase, pack, ready_tag
from liver_core.layout import Member

OVER_MAX = 64
"""Handoffs that were aborted here, or before they came: so many are remembered, with the reason."""


class PendingState(StrEnum):
    """How far the pending handoff is."""

    IDLE = "idle"
    BUILDING = "building"
    BUILT = "built"  # with permission, the tag is shown from the next boundary on
    CONNECTING = "connecting"  # agreed: the ranks make the communicators of the next world now
    CUTTING = "cutting"  # agreed: this rank cuts over
    ENDED = "ended"  # a newcomer that has no next world any more


@dataclass(slots=True)
class _Dropping:
    """A world that is being dropped. `is_told`: its end was reported already."""

    build: int
    order: Order
    reason: Reason
    is_told: bool = False


class Pending:
    """One rank's machine for all its handoffs, one after the other. `trains`: this rank has a world already; a newcomer
    has none, builds in its main thread, and hears of the boundary by the store."""

    def __init__(self, member: Member, *, trains: bool) -> None:
        self.member = member
        self.trains = trains
        self.state = PendingState.IDLE
        self.order: Order | None = None
        self.build = 0
        self.world: BuiltWorld | None = None
        self._stage = RankStage.PREPARING
        self._entered = trains
        self._permission: tuple[str, int] | None = None
        self._found_boundary = False
        self._abort: Reason | None = None
        self._over: OrderedDict[str, Reason] = OrderedDict()
        self._shown = False
        self._report_due = False
        self._later: Order | None = None
        self._under_way: int | None = None
        self._gives_way: int | None = None
        self._dropping: _Dropping | None = None

    @property
    def is_permitted(self) -> bool:
        """Whether the pending revision has permission."""
        return self.order is not None and self._permission == (self.order.handoff_id, self.order.plan_revision)

    @property
    def awaits_boundary(self) -> bool:
        """Whether this newcomer has all that it needs but the boundary."""
        return self.state is PendingState.BUILT and self.is_permitted and not self._found_boundary

    @property
    def dropping(self) -> Order | None:
        """The handoff whose world is being dropped."""
        return None if self._dropping is None else self._dropping.order

    def is_superseded(self, build: int) -> bool:
        """Whether another target is wanted than that of this build."""
        return build < self.build

    def is_useless(self, build: int) -> bool:
        """Whether this build should end at its next wait."""
        return self.is_superseded(build) or self._abort is not None or self.order is None

    # What a rank shows.

    def show(self) -> int:
        """The word that this rank shows at the boundary that it enters now, if nothing is more urgent; 0 for none.
        BoundaryOver must follow."""
        return self._show(BoundaryPhase.READY)

    def show_between_parts(self, needs_s: float, now: float) -> int:
        """The word between two parts of a step: whether to drop the step. BoundaryOver must follow.

        `needs_s`: seconds until a cutover at the end of this step would be over. If the state does not stream, it would
        still have to be copied then, so the step is dropped in any case.
        """
        order, world = self.order, self.world
        if order is None or world is None or order.rung is not Rung.DROP_STEP or world.lacks_communicators:
            return NOTHING_WANTED
        if world.streams and order.deadline_utc - now >= needs_s:
            return NOTHING_WANTED
        return self._show(BoundaryPhase.DROP)

    def _show(self, phase: BoundaryPhase) -> int:
        if self.state is not PendingState.BUILT or not self.is_permitted or self._abort is not None:
            return NOTHING_WANTED
        assert self.order is not None and self.world is not None
        self._shown = True
        phase = BoundaryPhase.CONNECT if self.world.lacks_communicators else phase
        return pack(ready_tag(self.order.handoff_id, self.order.plan_revision), phase)

    # Events.

    def handle(self, event: PendingEvent, now: float) -> PendingEffects:
        """Take one event. Carry out the effects in order."""
        match event:
            case OrderCame(order=order):
                return self._on_order(order)
            case Entered(order=order):
                return self._on_entered(order)
            case Permitted():
                return self._on_permitted(event)
            case Withdrawn(handoff_id=handoff_id):
                return self._on_withdrawn(handoff_id)
            case Aborted(handoff_id=handoff_id, reason=reason):
                return self._on_aborted(handoff_id, reason)
            case StreamBegan(build=build):
                return self._on_stream(build)
            case Built() | BuildFailed():
                return self._on_build_over(event)
            case BoundaryOver(agreement=agreement):
                return self._on_boundary(agreement)
            case BoundaryFound(build=build):
                return self._on_boundary_found(build)
            case BoundaryMissed(build=build, reason=reason):
                return self._end_newcomer(reason) if build == self.build and self._is_built else ()
            case BetweenSteps():
                return self._between_steps()
            case Connected(build=build, problem=problem):
                return self._on_connected(build, problem)
            case CutoverEnded():
                return self._on_cutover_ended(event)
            case Dropped(build=build):
                return self._on_dropped(build)
            case RankEnds():
                return self._tell_drop()
            case Tick():
                return self._on_tick(now)
            case _:
                assert_never(event)

    @property
    def _is_built(self) -> bool:
        return self.state in (PendingState.BUILT, PendingState.CONNECTING)

    def _on_order(self, order: Order) -> PendingEffects:
        current = self.order
        if not self._entered:
            return self._put_off(order)
        if self.state is PendingState.ENDED:
            return ()
        if current is None:
            return self._begin(order)
        if current.handoff_id != order.handoff_id:
            reason = self._reason(order, "prepare", f"still preparing handoff {current.handoff_id}")
            return (Say(order, RankStage.ABORTED, reason),)
        if order.plan_revision <= current.plan_revision:
            return ()
        if self.state is PendingState.CUTTING or self._permission is not None:
            text = f"revision {order.plan_revision} of handoff {order.handoff_id} is rejected: the boundary of revision"
            return (Warn(f"{text} {current.plan_revision} may be agreed already"),)
        if self._shown or self.state is PendingState.CONNECTING:
            return self._put_off(order)
        return self._amend(current, order)

    def _put_off(self, order: Order) -> PendingEffects:
        """Until the main thread can build, or the boundary is over. The newest revision counts."""
        if self._later is None or order.plan_revision > self._later.plan_revision:
            self._later = order
        return ()

    def _on_entered(self, order: Order) -> PendingEffects:
        self._entered = True
        early, self._later = self._later, None
        if early is not None and early.handoff_id == order.handoff_id and early.plan_revision > order.plan_revision:
            order = early
        return self._begin(order)

    def _begin(self, order: Order) -> PendingEffects:
        dropping, over = self._dropping, self._over.get(order.handoff_id)
        if dropping is not None and dropping.order.handoff_id == order.handoff_id:
            dropping.order = order  # A newer revision that crossed the abort: it ends with the same report.
            return ()
        self.order = order
        if over is not None:
            return self._fail_build(over)
        if self._permission is not None and self._permission[0] != order.handoff_id:
            self._permission = None
        return self._build_next(gives_way=None)

    def _build_next(self, *, gives_way: int | None) -> PendingEffects:
        """Build the newest revision, once nothing else takes memory."""
        assert self.order is not None
        self.build += 1
        self.state, self.world, self._stage = PendingState.BUILDING, None, RankStage.PREPARING
        self._gives_way = gives_way
        told = Say(self.order, RankStage.PREPARING, build=self.build)
        return (told, *self._start_build())

    def _start_build(self) -> PendingEffects:
        if self._dropping is not None or self._under_way is not None:
            return ()
        assert self.order is not None
        if self._abort is not None:
            return self._fail_build(self._abort)
        gives_way, self._gives_way = self._gives_way, None
        self._under_way = self.build
        return (BuildWorld(self.build, self.order, gives_way),)

    def _amend(self, current: Order, order: Order) -> PendingEffects:
        """A newer revision: if the target is the same, keep what is built and has arrived. If not, build again."""
        if self._abort is not None:
            self.order = order  # What is left is to report that it was aborted, of the revision that is asked for.
            return ()
        if not order.names(self.member):
            text = f"this member has no part in revision {order.plan_revision} of the plan"
            return self._note_abort(self._reason(order, "amend", text))
        self._found_boundary = False
        self.order = order
        if order.target_revision == current.target_revision:
            return (Amend(self.build, order), self._say(order, self._stage))
        older, is_built = self.build, self.world is not None
        return self._build_next(gives_way=older if is_built else None)

    def _on_permitted(self, event: Permitted) -> PendingEffects:
        order = self.order
        if order is not None and order.handoff_id == event.handoff_id and order.plan_revision != event.plan_revision:
            text = f"permission for revision {event.plan_revision} of handoff {event.handoff_id} is ignored: this rank"
            return (Warn(f"{text} prepares revision {order.plan_revision}"),)
        is_other = order is not None and order.handoff_id != event.handoff_id
        if is_other or self._abort is not None or self.state in (PendingState.CUTTING, PendingState.ENDED):
            return ()
        self._permission = (event.handoff_id, event.plan_revision)
        if not self._is_built or order is None:
            return ()
        # "Ready" is reported before the tag is shown, so that it never comes after the report of the boundary.
        said = self._say(order, RankStage.READY)
        return (said, *self._cut_over()) if self._found_boundary else (said,)

    def _on_withdrawn(self, handoff_id: str) -> PendingEffects:
        if self._permission is not None and self._permission[0] == handoff_id:
            self._permission = None
        order = self.order
        if order is None or order.handoff_id != handoff_id or not self._is_built:
            return ()
        if self._shown:
            # All ranks may be agreeing on the tag right now. Report after the boundary, by its outcome.
            self._report_due = True
            return ()
        return (self._say(order, RankStage.PREPARED),)

    def _on_aborted(self, handoff_id: str, reason: Reason) -> PendingEffects:
        if self.order is not None and self.order.handoff_id == handoff_id:
            return self._note_abort(reason)
        if self.dropping is None or self.dropping.handoff_id != handoff_id:
            self._note_over(handoff_id, reason)
        return ()

    def _note_over(self, handoff_id: str, reason: Reason) -> None:
        """An order for this handoff may still come: one that crossed the report of its end, or its abort."""
        self._over[handoff_id] = reason
        while len(self._over) > OVER_MAX:
            self._over.popitem(last=False)

    def _note_abort(self, reason: Reason) -> PendingEffects:
        """The tag goes at once, and the world between two steps. What is agreed stays agreed."""
        if self.state in (PendingState.CUTTING, PendingState.ENDED):
            return ()
        self._permission = None
        self._abort = self._abort or reason
        if self.state is PendingState.BUILDING and self._under_way is None and self._dropping is not None:
            return self._fail_build(self._abort)
        return ()

    def _on_stream(self, build: int) -> PendingEffects:
        if build != self.build or self.state is not PendingState.BUILDING:
            return ()
        assert self.order is not None
        self._stage = RankStage.STREAMING
        return (Say(self.order, RankStage.STREAMING, build=build),)

    def _on_build_over(self, event: Built | BuildFailed) -> PendingEffects:
        if event.build != self._under_way:
            return ()
        self._under_way = None
        if event.build != self.build:
            self._gives_way = event.build if isinstance(event, Built) else None
            return self._start_build()
        if isinstance(event, BuildFailed):
            return self._fail_build(self._abort or event.reason)
        assert self.order is not None
        self.state, self.world, self._stage = PendingState.BUILT, event.world, RankStage.PREPARED
        if self._abort is not None:
            return ()  # It is dropped between two steps.
        return (self._say(self.order, RankStage.PREPARED),)

    def _fail_build(self, reason: Reason) -> PendingEffects:
        """Nothing is built, and nothing will be. What an older revision built gives way all the same."""
        order, older = self.order, self._gives_way
        assert order is not None
        self._note_over(order.handoff_id, reason)
        said: PendingEffects = (Say(order, RankStage.ABORTED, reason, self.build),)
        if older is not None:
            self._dropping = _Dropping(older, order, reason)
            said = (DropWorld(older, reason, beside=self.trains),)
        self._forget()
        if self.trains:
            return said
        return self._ended(said, self._reason(order, "prepare", "preparation failed"))

    def _on_boundary(self, agreement: Agreement | None) -> PendingEffects:
        order, report_due = self.order, self._report_due
        was_shown, self._shown, self._report_due = self._shown, False, False
        if order is None:
            return ()
        phase = None
        if was_shown and agreement is not None and agreement.tag == ready_tag(order.handoff_id, order.plan_revision):
            phase = agreement.phase
        if phase in (BoundaryPhase.READY, BoundaryPhase.DROP):
            return self._cut_over()
        told: PendingEffects = (self._say(order, RankStage.PREPARED),) if report_due else ()
        if phase is BoundaryPhase.CONNECT:
            self.state = PendingState.CONNECTING
            return told
        return (*told, *self._amend_later())

    def _amend_later(self) -> PendingEffects:
        """The newer revision that had to wait for the end of a boundary."""
        later, self._later = self._later, None
        return () if later is None or self.order is None else self._amend(self.order, later)

    def _on_boundary_found(self, build: int) -> PendingEffects:
        """A newcomer goes when it has permission too. If it was taken back after the others agreed, it comes again."""
        if build != self.build or not self._is_built:
            return ()
        self._found_boundary = True
        return self._cut_over() if self.is_permitted else ()

    def _cut_over(self) -> PendingEffects:
        self.state, self._later, self._abort = PendingState.CUTTING, None, None
        return (CutOver(self.build),)

    def _between_steps(self) -> PendingEffects:
        if self.state is PendingState.CONNECTING:
            return (Connect(self.build),)
        if self.state is PendingState.BUILT and self._abort is not None:
            return self._drop(self._abort, beside=True) if self.trains else self._end_newcomer(self._abort)
        return ()

    def _on_connected(self, build: int, problem: Reason | None) -> PendingEffects:
        if build != self.build or not self._is_built:
            return ()
        assert self.world is not None
        self.state = PendingState.BUILT
        if problem is not None:
            self._permission, self._abort = None, self._abort or problem
        else:
            self.world = replace(self.world, lacks_communicators=False)
        return self._amend_later()

    def _on_cutover_ended(self, event: CutoverEnded) -> PendingEffects:
        if self.state is not PendingState.CUTTING:
            return ()
        if event.dropped is not None:
            dropped = self._drop(event.dropped, beside=event.beside)
            return dropped if self.trains else self._ended(dropped, event.dropped)
        self.trains = True
        self._forget()
        return ()

    def _drop(self, reason: Reason, *, beside: bool) -> PendingEffects:
        assert self.order is not None
        self._note_over(self.order.handoff_id, reason)
        self._dropping = _Dropping(self.build, self.order, reason)
        self._forget()
        return (DropWorld(self.build, reason, beside),)

    def _on_dropped(self, build: int) -> PendingEffects:
        if self._dropping is None or self._dropping.build != build:
            return ()
        told = self._tell_drop()
        self._dropping = None
        return (*told, *(self._start_build() if self.state is PendingState.BUILDING else ()))

    def _tell_drop(self) -> PendingEffects:
        dropping = self._dropping
        if dropping is None or dropping.is_told:
            return ()
        dropping.is_told = True
        return (Say(dropping.order, RankStage.ABORTED, dropping.reason, dropping.build),)

    def _forget(self) -> None:
        """No handoff is pending any more."""
        self.state, self.order, self.world = PendingState.IDLE, None, None
        self._permission = self._abort = self._later = self._gives_way = None
        self._found_boundary = False

    def _end_newcomer(self, reason: Reason) -> PendingEffects:
        reason = self._abort or reason
        return self._ended(self._drop(reason, beside=False), reason)

    def _ended(self, effects: PendingEffects, reason: Reason) -> PendingEffects:
        self.state = PendingState.ENDED
        return (*effects, EndNewcomer(reason))

    def _on_tick(self, now: float) -> PendingEffects:
        """A newcomer waits for permission until the deadline; of a rank that trains its agent keeps the time."""
        order = self.order
        if self.trains or self.state is not PendingState.BUILT or self.awaits_boundary or order is None:
            return ()
        if now < order.boundary_by(self.member):
            return ()
        return self._end_newcomer(Reason("no permission before the deadline", OUT_OF_TIME))

    def _say(self, order: Order, stage: RankStage) -> Say:
        """Why the state is copied after all goes with every stage of the world that is built."""
        return Say(order, stage, None if self.world is None else self.world.fell, self.build)

    def _reason(self, order: Order, phase: str, text: str) -> Reason:
        return Reason(text, phase, order.rank_of(self.member))
