"""A rank's pending handoff, from the order to prepare it to the boundary at which all ranks agree on it.

Orders come from another thread, a survivor builds in a thread of its own, and boundaries happen in the main thread. One
lock guards all of it. A newcomer has no world to train in: it builds in its main thread, and builds again if the plan
is amended.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from liver_core.device import DeviceWait, settle
from liver_core.device.rank_device import own_device
from liver_core.device.threads import background
from liver_core.handoff.messages import OUT_OF_TIME, FailureCause, Order, PreparePhase, RankStage, Reason, Rung
from liver_core.handoff.ready_tag import (
    NOTHING_WANTED,
    Agreement,
    BoundaryPhase,
    agreed,
    connect_word,
    drop_word,
    ready_tag,
)
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
_USERS_CODE = (PreparePhase.BUILD_MODEL, PreparePhase.WARM_UP, PreparePhase.LOAD_STATE)
"""Phases that call the user's job: what is wrong with it is seen in the whole traceback only."""


class NoPartInHandoff(Exception):
    """A newcomer has no next world any more. `reason` says why."""

    def __init__(self, reason: Reason) -> None:
        super().__init__(str(reason))
        self.reason = reason


class _Superseded(Exception):
    """A newer plan revision needs another world than the one that was built."""


class PendingHandoff:
    """See the module. `make` makes a preparation from a request. `trains` says whether this rank already has a world.

    `preparation` is that of the newest plan revision, `following` is the world it made. Both are None if no handoff is
    pending. `dropping`: the world of an earlier handoff, while it is dropped beside training.
    """

    def __init__(
        self,
        member: Member,
        requests: BoundaryRequests,
        reporter: StageReporter,
        make: Callable[[Order], Preparation],
        trains: Callable[[], bool],
        deaths: PeerDeaths,
    ) -> None:
        self.preparation: Preparation | None = None
        self.following: NextWorld | None = None
        self.dropping: NextWorld | None = None
        self._member = member
        self._requests = requests
        self._reporter = reporter
        self._make = make
        self._trains = trains
        self._deaths = deaths
        self._lock = threading.Lock()
        self._early: Order | None = None
        self._later: Order | None = None
        self._cutting = self._connecting = False
        self._shown = False
        self._report_due = False
        self._dropper: threading.Thread | None = None
        self._reporting = threading.Lock()
        self._unreported: tuple[NextWorld, Reason] | None = None

    # Orders, from any thread.

    def prepare(self, request: Order) -> None:
        """Begin to build, or accept a newer plan revision of the pending handoff.

        A repeated or older revision changes nothing. A newer one is rejected once this rank has permission for the
        older: the boundary may be agreed already. If permission was withdrawn but a boundary still shows the tag, the
        newer revision waits until that boundary is over.
        """
        with self._lock:
            current = self.preparation
            if current is None and not self._trains():
                self._early = request
            elif current is None:
                self._begin(request)
            elif current.request.handoff_id != request.handoff_id:
                text = f"still preparing handoff {current.request.handoff_id}"
                self._reporter.stage(request, RankStage.ABORTED, reason=self._reason(request, "prepare", text))
            elif request.plan_revision <= current.request.plan_revision:
                return
            elif self._cutting or self._requests.permits(request.handoff_id):
                text = "revision %d of handoff %s is rejected: the boundary of revision %d may be agreed already"
                _log.warning(text, request.plan_revision, request.handoff_id, current.request.plan_revision)
            elif self._shown or self._connecting:
                self._later = request
            else:
                self._amend(current, request)

    def permit(self, handoff_id: str, plan_revision: int) -> None:
        """Show the ready tag from the next boundary on. Ignored for a revision that a newer one has replaced."""
        with self._lock:
            current = self.preparation.request if self.preparation is not None else None
            if current is not None and current.handoff_id == handoff_id and current.plan_revision != plan_revision:
                text = "permission for revision %d of handoff %s is ignored: this rank prepares revision %d"
                _log.warning(text, plan_revision, handoff_id, current.plan_revision)
                return
            # Report "ready" before the tag is shown, so that it never comes after the report of the boundary.
            if self.following is not None and self.following.request.handoff_id == handoff_id:
                self._reporter.stage(self.following.request, RankStage.READY, measures=self.following.measures)
            self._requests.permit(handoff_id, plan_revision)

    def withdraw(self, handoff_id: str) -> None:
        """Stop showing the ready tag. Has no effect if the boundary was agreed first."""
        self._requests.withdraw(handoff_id)
        with self._lock:
            following = self.following
            if following is None or following.request.handoff_id != handoff_id or self._cutting:
                return
            if self._shown:
                # All ranks may be agreeing on the tag right now. Report after the boundary, by its outcome.
                self._report_due = True
                return
            self._reporter.stage(following.request, RankStage.PREPARED, measures=following.measures)

    # Boundaries, in the main thread.

    def word(self) -> int:
        """The word that this rank shows at the boundary that it enters now. `settle` must follow."""
        with self._lock:
            word = self._requests.word()
            if self.following is not None and self.following.lacks_communicators:
                word = connect_word(word)
            asked = agreed(word, word)
            self._shown = asked is not None and asked.phase in (BoundaryPhase.READY, BoundaryPhase.CONNECT)
            return word

    def word_between_parts(self, needs_s: float) -> int:
        """The word that this rank shows between two parts of a step: whether to drop the step. `settle` must follow.

        `needs_s`: seconds until a cutover at the end of this step would be over. If the state does not stream, it would
        still have to be copied then, so the step is dropped in any case.
        """
        with self._lock:
            following = self.following
            drops = following is not None and following.request.rung is Rung.DROP_STEP
            drops = drops and following is not None and not following.lacks_communicators
            if drops and following is not None and following.streams:
                drops = following.request.deadline_utc - utc_now() < needs_s
            word = drop_word(self._requests.word()) if drops else NOTHING_WANTED
            self._shown = word != NOTHING_WANTED
            return word

    def settle(self, agreement: Agreement | None) -> NextWorld | None:
        """The boundary is over. Returns the world to hand over to, or None."""
        with self._lock:
            following = self.following
            meant = following is not None and agreement is not None and _is_for(agreement, following.request)
            self._connecting = meant and agreement is not None and agreement.phase is BoundaryPhase.CONNECT
            self._cutting = meant and not self._connecting
            report_due = self._report_due
            self._shown, self._report_due = False, False
            if following is None or self._cutting:
                self._later = None
                return following
            if report_due:
                self._reporter.stage(following.request, RankStage.PREPARED, measures=following.measures)
            if not self._connecting:
                self._amend_later()
            return None

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
        preparation = self.preparation
        made = self.following or (None if preparation is None else preparation.made)
        return () if made is None or made.world is None else (made.world,)

    def stream(self) -> SourceStream | None:
        """The stream that publishes this rank's steps, if a handoff needs one."""
        preparation = self.preparation
        made = self.following or (None if preparation is None else preparation.made)
        return None if made is None else made.source_stream

    def maintain(self) -> None:
        """Between two steps: make the communicators of the world that was built, if the boundary agreed on that. Then
        drop it if an abort has come; training does not wait for that."""
        if self._connecting:
            self._connect()
        self._drop_if_aborted()

    def _connect(self) -> None:
        """Whatever has come since the boundary: the others are making them too, and would wait for this rank."""
        following = self.following
        assert following is not None
        try:
            self._make_communicators(following)
        except RuntimeError as error:
            _log.exception("%s cannot make the communicators of the next world", self._member)
            request = following.request
            reason = self._reason(request, CONNECT, f"communicators: {plainly(error)}", cause_of(error))
            self._requests.abort(request.handoff_id, self._deaths.named(reason, request.target))
        with self._lock:
            self._connecting = False
            self._amend_later()

    def _make_communicators(self, made: NextWorld) -> None:
        if made.world is not None:
            self._deaths.check(made.world)
        made.connect()

    def _amend_later(self) -> None:
        """With the lock: the newer revision that had to wait for the end of a boundary."""
        later, self._later = self._later, None
        if later is not None and self.preparation is not None:
            self._amend(self.preparation, later)

    def _drop_if_aborted(self) -> None:
        with self._lock:
            following = self.following
            reason = None if following is None else self._requests.take_abort(following.request.handoff_id)
            if reason is None:
                return
            self.dropping, self.following, self.preparation = following, None, None
        self._drop_beside_training(following, reason)

    def drop(self, reason: Reason) -> None:
        """Drop the world that was built."""
        following = self._detach()
        self._to_report(following, reason)
        self._drop(following, reason)

    def drop_beside_training(self, reason: Reason) -> None:
        """Drop the world that was built in a thread: its reads, peers and store may take seconds to end. A handoff that
        comes before it is dropped waits for that."""
        self.dropping = self.following
        self._drop_beside_training(self._detach(), reason)

    def report_drop(self) -> None:
        """Report the world that is being dropped beside training. This rank ends, so its drop need not end first."""
        with self._reporting:
            if self._unreported is not None:
                following, reason = self._unreported
                self._reporter.stage(following.request, RankStage.ABORTED, reason=reason, measures=following.measures)
                self._unreported = None

    def take(self) -> None:
        """The world that was built is the active one now."""
        following = self._detach()
        assert following is not None
        self._requests.withdraw(following.request.handoff_id)

    def _detach(self) -> NextWorld | None:
        """No handoff is pending any more. Returns the world that was built."""
        with self._lock:
            following, self.following, self.preparation = self.following, None, None
            self._cutting = False
            return following

    # A newcomer, in its main thread.

    def enter(self, request: Order) -> tuple[NextWorld, int]:
        """Build, wait for permission, then for the boundary of the source world. Returns the world and the source
        world's version at that boundary. Raises Dropped."""
        with self._lock:
            early = self._early
            if early is not None and early.handoff_id == request.handoff_id:
                request = max(early, request, key=lambda each: each.plan_revision)
            self.preparation = preparation = self._make(request)
        done = self._run(preparation, None)
        while done is not None:
            made = done.made
            assert made is not None
            try:
                self._await_permission(done, made)
                return made, self._await_boundary(done, made)
            except _Superseded:
                with self._lock:
                    newest = self.preparation
                done = None if newest is None else self._run(newest, made)
        raise NoPartInHandoff(self._reason(request, "prepare", "preparation failed"))

    def _await_permission(self, preparation: Preparation, made: NextWorld) -> None:
        reason = None
        with self._requests.changed:
            while reason is None:
                request = made.request
                if preparation.superseded:
                    raise _Superseded
                if self._requests.stored.ready == (request.handoff_id, request.plan_revision):
                    return
                reason = self._requests.aborts.get(request.handoff_id)
                left_s = request.boundary_by(self._member) - utc_now()
                if reason is None and left_s <= 0:
                    reason = Reason("no permission before the deadline", OUT_OF_TIME)
                if reason is None:
                    self._requests.changed.wait(min(0.5, max(0.01, left_s)))
        self.drop(reason)
        raise NoPartInHandoff(reason)

    def _await_boundary(self, preparation: Preparation, made: NextWorld) -> int:
        """The source world's version at the boundary. Without a source world: the version that was loaded."""
        request = made.request
        made.exchange.cancelled = preparation.aborted
        try:
            self._connect_with_others(preparation, made)
            if request.source is None:
                return 0 if made.small is None else int(made.small["step"])
            made.boundary = made.exchange.wait_in_store_beside("boundary", preparation.deadline)
        except (RuntimeError, ExchangeTimeout) as error:
            if preparation.superseded:
                raise _Superseded from None
            phase = CONNECT if made.lacks_communicators else "boundary"
            reason = self._reason(request, phase, plainly(error), cause_of(error))
            reason = self._deaths.named(reason, request.source, request.target)
            reason = self._requests.take_abort(request.handoff_id) or reason
            self.drop(reason)
            raise NoPartInHandoff(reason) from error
        with self._lock:
            if preparation.superseded:
                raise _Superseded
            self._cutting = True
        return int(made.boundary["version"])

    def _connect_with_others(self, preparation: Preparation, made: NextWorld) -> None:
        """Make the communicators of the next world, at the boundary at which the ranks of the source world make them.
        Nobody trains who could be disturbed where there is no source world."""
        if made.lacks_communicators:
            if made.request.source is not None:
                made.exchange.wait_in_store_beside(CONNECT, preparation.deadline)
            self._make_communicators(made)

    # Building.

    def _begin(self, request: Order) -> None:
        self.preparation = self._make(request)
        self._in_background(self.preparation, None)

    def _amend(self, current: Preparation, request: Order) -> None:
        """With the lock: if the target is the same, keep what is built and has arrived. If not, build again."""
        if request.target_revision == current.request.target_revision:
            current.amend(request)
            made = self.following
            reason, measures = (None, None) if made is None else (made.why_it_fell, made.measures)
            self._reporter.stage(request, current.stage, reason=reason, measures=measures)
            return
        if not request.names(self._member):
            text = f"this member has no part in revision {request.plan_revision} of the plan"
            self._requests.abort(request.handoff_id, self._reason(request, "amend", text))
            return
        before, self.following = self.following, None
        self.preparation = self._make(request)
        current.superseded = True
        self._requests.wake()
        if before is not None and self._trains():
            self._in_background(self.preparation, before)

    def _in_background(self, preparation: Preparation, before: NextWorld | None) -> None:
        background(self._run, args=(preparation, before), name="prepare").start()

    def _run(self, preparation: Preparation, before: NextWorld | None) -> Preparation | None:
        """Build the newest revision, after dropping `before`, the world of an older one. Returns the preparation whose
        world is now `following`. Returns None if it could not be built; that is already reported."""
        if self._dropper is not None:
            self._dropper.join()
        while True:
            if before is not None:
                give_way(before)
            made, problem = self._build(preparation)
            with self._lock:
                if not preparation.superseded:
                    self._built(preparation, made, problem)
                    return None if made is None else preparation
                newest = self.preparation
            if newest is None:
                return None
            preparation, before = newest, made

    def _build(self, preparation: Preparation) -> tuple[NextWorld | None, Exception | None]:
        self.report_stage(preparation, RankStage.PREPARING)
        try:
            made = preparation.run()
            settle(DeviceWait.PREPARED, own_device())
            # Here and not in the pause, since finding the clients among all open files takes milliseconds.
            expect_quick_answers(preparation.request.store)
            return made, None
        except Overtaken as overtaken:
            # The others already have a newer order. Wait until it comes here, or an abort. Report nothing until then.
            self._requests.wait_for(preparation.aborted, preparation.deadline)
            return None, overtaken
        except (PrepareFailed, Cancelled) as error:
            if isinstance(error, PrepareFailed) and error.phase in _USERS_CODE:
                _log.exception("%s cannot build its part", self._member)
            return None, error

    def report_stage(self, preparation: Preparation, stage: RankStage) -> None:
        """Report that the preparation is at `stage`, unless a newer revision has replaced it."""
        with self._lock:
            preparation.stage = stage
            if not preparation.superseded:
                self._reporter.stage(preparation.request, stage)

    def _built(self, preparation: Preparation, made: NextWorld | None, problem: Exception | None) -> None:
        """With the lock: the newest revision is built, or its build failed. Report it."""
        request = preparation.request
        if made is not None:
            self.following, preparation.stage = made, RankStage.PREPARED
            self._reporter.stage(request, RankStage.PREPARED, reason=made.why_it_fell, measures=made.measures)
            return
        self.preparation = None
        phase = problem.phase if isinstance(problem, PrepareFailed) else "prepare"
        reason = self._reason(request, phase, str(problem), cause_of(problem))
        reason = self._requests.take_abort(request.handoff_id) or reason
        self._reporter.stage(request, RankStage.ABORTED, reason=reason)

    def _drop_beside_training(self, following: NextWorld | None, reason: Reason) -> None:
        self._to_report(following, reason)
        self._dropper = background(self._drop, args=(following, reason), name="drop")
        self._dropper.start()

    def _to_report(self, following: NextWorld | None, reason: Reason) -> None:
        if following is not None:
            self._requests.withdraw(following.request.handoff_id)
            with self._reporting:
                self._unreported = following, reason

    def _drop(self, following: NextWorld | None, reason: Reason) -> None:
        if following is None:
            return
        try:
            following.drop()
        finally:
            self.dropping = None
            self.report_drop()

    def _reason(self, request: Order, phase: str, text: str, cause: FailureCause | None = None) -> Reason:
        return Reason(text, phase, request.rank_of(self._member), cause=cause)


def _is_for(agreement: Agreement, request: Order) -> bool:
    tag = ready_tag(request.handoff_id, request.plan_revision)
    phases = (BoundaryPhase.READY, BoundaryPhase.DROP, BoundaryPhase.CONNECT)
    return agreement.phase in phases and agreement.tag == tag
