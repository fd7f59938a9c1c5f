"""A rank's pending handoff: the host of the `Pending` machine, which decides. Here are threads, locks and worlds.

Orders come from another thread, a survivor builds in a thread of its own, and boundaries happen in the main thread. One
lock, that of the rank's requests, guards the machine. A newcomer has no world to train in: it builds in its main
thread.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import assert_never

from liver_core.device import DeviceWait, settle
from liver_core.device.rank_device import own_device
from liver_core.device.threads import background
from liver_core.handoff.messages import Order, PreparePhase, Reason, Tick
from liver_core.handoff.pending import Pending, PendingState
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
    PendingEffect,
    PendingEffects,
    PendingEvent,
    Permitted,
    RankEnds,
    Say,
    StreamBegan,
    Warn,
    Withdrawn,
)
from liver_core.handoff.ready_tag import NOTHING_WANTED, Agreement
from liver_core.layout import Member
from liver_core.rank.boundary_requests import BoundaryRequests
from liver_core.rank.next_world import CONNECT, NextWorld
from liver_core.rank.prepare.preparation import Overtaken, Preparation, PrepareFailed, give_way
from liver_core.rank.reporter import StageReporter
from liver_core.rank.store_exchange import Cancelled, ExchangeTimeout, cause_of
from liver_core.rank.stream.source_stream import SourceStream
from liver_core.steady_clock import utc_now
from liver_core.worlds.groups import expect_quick_answers, plainly
from liver_core.worlds.megatron import MegatronWorld
from liver_core.worlds.peer_deaths import PeerDeaths

_log = logging.getLogger(__name__)
_LOOK_AGAIN_S = 0.5
_USERS_CODE = (PreparePhase.BUILD_MODEL, PreparePhase.WARM_UP, PreparePhase.LOAD_STATE)
"""Phases that call the user's job: what is wrong with it is seen in the whole traceback only."""


class NoPartInHandoff(Exception):
    """A newcomer has no next world any more. `reason` says why."""

    def __init__(self, reason: Reason) -> None:
        super().__init__(str(reason))
        self.reason = reason


class PendingHandoff:
    """See the module. `make` makes the preparation of a build, given its order and number. A rank that does not train
    yet is a newcomer until it takes the world that it built."""

    def __init__(
        self,
        member: Member,
        requests: BoundaryRequests,
        reporter: StageReporter,
        make: Callable[[Order, int], Preparation],
        deaths: PeerDeaths,
        *,
        trains: bool = False,
    ) -> None:
        self._member = member
        self._requests = requests
        self._changed = requests.changed
        self._reporter = reporter
        self._make = make
        self._deaths = deaths
        self._machine = Pending(member, trains=trains)
        self._preparations: dict[int, Preparation] = {}
        self._worlds: dict[int, NextWorld] = {}
        self._to_build: BuildWorld | None = None
        self._ended: Reason | None = None

    @property
    def handoff_id(self) -> str | None:
        """The handoff that is pending, or whose world is being dropped."""
        order = self._machine.order or self._machine.dropping
        return None if order is None else order.handoff_id

    @property
    def preparation(self) -> Preparation | None:
        """What builds the next world, or has built it; None if no handoff is pending."""
        return None if self._machine.order is None else self._preparations.get(self._machine.build)

    @property
    def following(self) -> NextWorld | None:
        """The next world, once it is built."""
        return None if self._machine.world is None else self._worlds.get(self._machine.build)

    @property
    def is_cutting_over(self) -> bool:
        """Whether the boundary is agreed and the cutover is not over."""
        return self._machine.state is PendingState.CUTTING

    def is_useless(self, build: int) -> bool:
        """Whether this build should end at its next wait. From any thread."""
        return self._machine.is_useless(build)

    def is_superseded(self, build: int) -> bool:
        """Whether another target is wanted than that of this build. From any thread."""
        return self._machine.is_superseded(build)

    # Orders, from any thread.

    def prepare(self, order: Order) -> None:
        """Begin to build, or accept a newer plan revision of the pending handoff."""
        self._feed(OrderCame(order))

    def permit(self, handoff_id: str, plan_revision: int) -> None:
        """Show the ready tag from the next boundary on. Ignored for a revision that a newer one has replaced."""
        self._feed(Permitted(handoff_id, plan_revision))

    def withdraw(self, handoff_id: str) -> None:
        """Stop showing the ready tag. Has no effect if the boundary was agreed first."""
        self._feed(Withdrawn(handoff_id))

    def abort(self, handoff_id: str, reason: Reason) -> None:
        """Withdraw, and drop the next world. Has no effect if the boundary was agreed first."""
        self._feed(Aborted(handoff_id, reason))

    def streams_now(self, build: int) -> None:
        """The world of this build is made, and its state begins to stream."""
        self._feed(StreamBegan(build))

    # Boundaries, in the main thread.

    def word(self) -> int:
        """The word that this rank shows at the boundary that it enters now. `settle` must follow."""
        with self._changed:
            asked = self._requests.word()
            if self._requests.stored.stop is not None:
                return asked
            return self._machine.show() or asked

    def word_between_parts(self, needs_s: float) -> int:
        """The word that this rank shows between two parts of a step: whether to drop the step. `settle` must follow.
        `needs_s`: seconds until a cutover at the end of this step would be over."""
        with self._changed:
            if self._requests.stored.stop is not None:
                return NOTHING_WANTED
            return self._machine.show_between_parts(needs_s, utc_now())

    def settle(self, agreement: Agreement | None) -> NextWorld | None:
        """The boundary is over. Returns the world to hand over to, or None."""
        effects = self._feed(BoundaryOver(agreement))
        return self.following if any(isinstance(effect, CutOver) for effect in effects) else None

    def chain(self, version: int) -> int | None:
        """This rank's part of the sum over the gradients streamed since the state was certified, up to `version`. None
        if no state was certified, or if some of these gradients are not hashed yet."""
        made = self.following
        if made is None or not made.streams or made.source_stream is None or made.verdict is None:
            return None
        try:
            return made.source_stream.chain(made.verdict.version, version, time.monotonic())
        except TimeoutError:
            return None

    def worlds(self) -> tuple[MegatronWorld, ...]:
        """The next world, as far as it is made. From any thread."""
        made = self._made()
        return () if made is None or made.world is None else (made.world,)

    def stream(self) -> SourceStream | None:
        """The stream that publishes this rank's steps, if a handoff needs one."""
        made = self._made()
        return None if made is None else made.source_stream

    def _made(self) -> NextWorld | None:
        preparation = self.preparation
        return self.following or (None if preparation is None else preparation.made)

    def maintain(self) -> None:
        """Between two steps: make the communicators of the world that was built, if the boundary agreed on that. Then
        drop it if an abort has come; training does not wait for that."""
        for effect in self._feed(BetweenSteps()):
            if isinstance(effect, Connect):
                self._feed(self._connect(effect.build))
                self._feed(BetweenSteps())

    def _connect(self, build: int) -> Connected:
        """Whatever has come since the boundary: the others are making them too, and would wait for this rank."""
        following = self._worlds[build]
        try:
            self._make_communicators(following)
        except RuntimeError as error:
            _log.exception("%s cannot make the communicators of the next world", self._member)
            request = following.request
            reason = self._reason(request, CONNECT, f"communicators: {plainly(error)}", error)
            return Connected(build, self._deaths.named(reason, request.target))
        return Connected(build)

    def _make_communicators(self, made: NextWorld) -> None:
        if made.world is not None:
            self._deaths.check(made.world)
        made.connect()

    def drop(self, reason: Reason) -> None:
        """The cutover has ended for this rank: drop the world that was built, then this process ends."""
        self._feed(CutoverEnded(reason))

    def drop_beside_training(self, reason: Reason) -> None:
        """The cutover has ended, and the source world trains on: drop the world that was built in a thread, since its
        reads, peers and store may take seconds to end. A handoff that comes before that waits for it."""
        self._feed(CutoverEnded(reason, beside=True))

    def report_drop(self) -> None:
        """Report the world that is being dropped beside training. This rank ends, so its drop need not end first."""
        self._feed(RankEnds())

    def take(self) -> None:
        """The world that was built is the active one now."""
        with self._changed:
            build = self._machine.build
            self._feed(CutoverEnded())
            self._forget(build)

    # A newcomer, in its main thread.

    def enter(self, request: Order) -> tuple[NextWorld, int]:
        """Build, wait for permission, then for the boundary of the source world. Returns the world and the source
        world's version at that boundary. Raises NoPartInHandoff."""
        self._feed(Entered(request))
        while self._ended is None:
            if self._to_build is not None:
                work, self._to_build = self._to_build, None
                self._run(work)
            elif self._machine.state is PendingState.CUTTING:
                made = self.following
                assert made is not None
                return made, _version_at(made)
            elif self._machine.awaits_boundary:
                self._await_boundary(self._machine.build)
            else:
                self._await_permission()
        raise NoPartInHandoff(self._ended)

    def _await_permission(self) -> None:
        """Until something comes, permission or another thing, or for half a second."""
        with self._changed:
            effects = (*self._handle(BetweenSteps()), *self._handle(Tick()))
            order = self._machine.order
            if not effects and order is not None and self._machine.state is PendingState.BUILT:
                left_s = order.boundary_by(self._member) - utc_now()
                self._changed.wait(min(_LOOK_AGAIN_S, max(0.01, left_s)))
        self._drop_now(effects)

    def _await_boundary(self, build: int) -> None:
        made, preparation = self._worlds[build], self._preparations[build]
        made.exchange.cancelled = preparation.aborted
        try:
            self._connect_with_others(preparation, made, build)
            if made.request.source is not None:
                made.boundary = made.exchange.wait_in_store_beside("boundary", preparation.deadline)
        except (RuntimeError, ExchangeTimeout) as error:
            request, phase = made.request, CONNECT if made.lacks_communicators else "boundary"
            reason = self._reason(request, phase, plainly(error), error)
            self._feed(BoundaryMissed(build, self._deaths.named(reason, request.source, request.target)))
        else:
            self._feed(BoundaryFound(build))

    def _connect_with_others(self, preparation: Preparation, made: NextWorld, build: int) -> None:
        """Make the communicators of the next world, at the boundary at which the ranks of the source world make them.
        Nobody trains who could be disturbed where there is no source world."""
        if made.lacks_communicators:
            if made.request.source is not None:
                made.exchange.wait_in_store_beside(CONNECT, preparation.deadline)
            self._make_communicators(made)
            self._feed(Connected(build))

    # Building.

    def _run(self, work: BuildWorld) -> None:
        older = None if work.gives_way is None else self._worlds[work.gives_way]
        if older is not None:
            give_way(older)
            self._forget(work.gives_way)
        self._feed(self._build(work.build, self._preparations[work.build]))

    def _build(self, build: int, preparation: Preparation) -> Built | BuildFailed:
        try:
            made = preparation.run()
            settle(DeviceWait.PREPARED, own_device())
            # Here and not in the pause, since finding the clients among all open files takes milliseconds.
            expect_quick_answers(preparation.request.store)
        except Overtaken as overtaken:
            # The others already have a newer order. Wait until it comes here, or an abort. Report nothing until then.
            self._requests.wait_for(preparation.aborted, preparation.deadline)
            return BuildFailed(build, self._reason(preparation.request, "prepare", str(overtaken), overtaken))
        except (PrepareFailed, Cancelled) as error:
            phase = error.phase if isinstance(error, PrepareFailed) else "prepare"
            if phase in _USERS_CODE:
                _log.exception("%s cannot build its part", self._member)
            return BuildFailed(build, self._reason(preparation.request, phase, str(error), error))
        self._worlds[build] = made
        return Built(build, BuiltWorld(made.streams, made.lacks_communicators, made.why_it_fell))

    def _drop(self, build: int) -> None:
        try:
            self._worlds[build].drop()
        finally:
            self._feed(Dropped(build))
            self._forget(build)

    def _forget(self, build: int | None) -> None:
        if build is not None:
            self._worlds.pop(build, None)
            self._preparations.pop(build, None)

    # The machine.

    def _feed(self, event: PendingEvent) -> PendingEffects:
        """Have the machine take it, and carry out what follows: what takes long after the lock is released."""
        effects = self._handle(event)
        self._drop_now(effects)
        return effects

    def _handle(self, event: PendingEvent) -> PendingEffects:
        with self._changed:
            effects = self._machine.handle(event, utc_now())
            for effect in effects:
                self._carry_out(effect)
            self._changed.notify_all()
            return effects

    def _drop_now(self, effects: PendingEffects) -> None:
        for effect in effects:
            if isinstance(effect, DropWorld) and not effect.beside:
                self._drop(effect.build)

    def _carry_out(self, effect: PendingEffect) -> None:
        """With the lock: nothing here waits."""
        match effect:
            case BuildWorld(build=build, order=order):
                self._preparations[build] = self._make(order, build)
                if self._machine.trains:
                    background(self._run, args=(effect,), name="prepare").start()
                else:
                    self._to_build = effect
            case Amend(build=build, order=order):
                if (preparation := self._preparations.get(build)) is not None:
                    preparation.amend(order)
            case Say(order=order, stage=stage, reason=reason, build=build):
                made = None if build is None else self._worlds.get(build)
                self._reporter.stage(order, stage, reason=reason, measures=None if made is None else made.measures)
            case DropWorld(build=build, beside=True):
                background(self._drop, args=(build,), name="drop").start()
            case EndNewcomer(reason=reason):
                self._ended = reason
            case Warn(text=text):
                _log.warning("%s", text)
            case Connect() | CutOver() | DropWorld():
                pass  # For the main thread, which has fed the event.
            case _:
                assert_never(effect)

    def _reason(self, request: Order, phase: str, text: str, error: Exception) -> Reason:
        return Reason(text, phase, request.rank_of(self._member), cause=cause_of(error))


def _version_at(made: NextWorld) -> int:
    """The source world's version at the boundary; of a first world, the version that was loaded."""
    if made.request.source is not None:
        return int(made.boundary["version"])
    return 0 if made.small is None else int(made.small["step"])
