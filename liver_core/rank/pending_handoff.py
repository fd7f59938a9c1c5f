"""The next world of a rank, from the order that asks for it to the boundary at which all ranks agree on it.

Orders come from another thread, a survivor builds in a thread of its own, and boundaries are met in the main thread:
one lock is over all of it. A newcomer has no world to train in; it builds in its main thread, again where the plan is
amended.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from liver_core.handoff.messages import Order, RankStage, Reason, Rung
from liver_core.handoff.ready_tag import NOTHING_WANTED, Agreement, BoundaryPhase, agreed, drop_word, ready_tag
from liver_core.layout import Member
from liver_core.rank.boundary_requests import Mailbox
from liver_core.rank.cutover.source_side import IN_PAUSE_POLL_S
from liver_core.rank.next_world import NextWorld
from liver_core.rank.prepare.preparation import Overtaken, Preparation, PrepareFailed, give_way
from liver_core.rank.reporter import Saying
from liver_core.rank.store_exchange import Cancelled, ExchangeTimeout
from liver_core.rank.stream.source_stream import SourceStream

_log = logging.getLogger(__name__)


class Dropped(Exception):
    """A newcomer has no part in a next world any more; `reason` says why."""

    def __init__(self, reason: Reason) -> None:
        super().__init__(str(reason))
        self.reason = reason


class _Superseded(Exception):
    """A newer plan revision wants another world than the one that was built."""


class Upcoming:
    """See the module. `make` makes a preparation of a request; `trains` says whether this rank has a world already.

    `preparation` is that of the newest plan revision, `following` what it made. Both are None where nothing is wanted.
    """

    def __init__(
        self,
        member: Member,
        mailbox: Mailbox,
        saying: Saying,
        make: Callable[[Order], Preparation],
        trains: Callable[[], bool],
    ) -> None:
        self.preparation: Preparation | None = None
        self.following: NextWorld | None = None
        self._member = member
        self._mailbox = mailbox
        self._saying = saying
        self._make = make
        self._trains = trains
        self._lock = threading.Lock()
        self._early: Order | None = None
        self._later: Order | None = None
        self._cutting = False
        self._shown = False
        self._owed = False

    # Orders, from any thread.

    def prepare(self, request: Order) -> None:
        """Begin to build, or take a newer plan revision of the handoff that is being prepared.

        A repeated or older revision changes nothing. A newer one comes too late once this rank has permission for the
        older: the boundary may be agreed already. Where permission was taken back, the boundary under way is awaited.
        """
        with self._lock:
            held = self.preparation
            if held is None and not self._trains():
                self._early = request
            elif held is None:
                self._begin(request)
            elif held.request.handoff_id != request.handoff_id:
                text = f"still preparing handoff {held.request.handoff_id}"
                self._saying.stage(request, RankStage.ABORTED, reason=self._reason(request, "prepare", text))
            elif request.plan_revision <= held.request.plan_revision:
                return
            elif self._cutting or self._mailbox.permits(request.handoff_id):
                _log.warning("revision %d of handoff %s comes too late", request.plan_revision, request.handoff_id)
            elif self._shown:
                self._later = request
            else:
                self._amend(held, request)

    def permit(self, handoff_id: str, plan_revision: int) -> None:
        """Show the ready tag from the next boundary on; never that of a revision which a newer one has replaced."""
        with self._lock:
            held = self.preparation.request if self.preparation is not None else None
            if held is not None and held.handoff_id == handoff_id and held.plan_revision != plan_revision:
                _log.warning("permission for revision %d of handoff %s is void", plan_revision, handoff_id)
                return
            # Said before the tag is shown, so that it never comes after the news of the boundary.
            if self.following is not None and self.following.request.handoff_id == handoff_id:
                self._saying.stage(self.following.request, RankStage.READY, measures=self.following.measures)
            self._mailbox.permit(handoff_id, plan_revision)

    def withdraw(self, handoff_id: str) -> None:
        """Show it no more; without effect when the boundary was first."""
        self._mailbox.withdraw(handoff_id)
        with self._lock:
            following = self.following
            if following is None or following.request.handoff_id != handoff_id or self._cutting:
                return
            if self._shown:
                # Every rank may have agreed on the tag at this very moment; the boundary's outcome is the answer.
                self._owed = True
                return
            self._saying.stage(following.request, RankStage.PREPARED, measures=following.measures)

    # Boundaries, in the main thread.

    def word(self) -> int:
        """What this rank shows at the boundary that it enters now; `settle` must follow."""
        with self._lock:
            word = self._mailbox.word()
            asked = agreed(word, word)
            self._shown = asked is not None and asked.phase is BoundaryPhase.READY
            return word

    def word_between_parts(self, needs_s: float) -> int:
        """What this rank shows between two parts of a step, as `word` does at its end: whether to drop it.

        `needs_s`: how long a cutover at the end of the step is away. A step whose state would still have to be copied
        there is not waited for.
        """
        with self._lock:
            following = self.following
            drops = following is not None and following.request.rung is Rung.DROP_STEP
            if drops and following is not None and following.streams:
                drops = following.request.deadline_utc - time.time() < needs_s
            word = drop_word(self._mailbox.word()) if drops else NOTHING_WANTED
            self._shown = word != NOTHING_WANTED
            return word

    def settle(self, agreement: Agreement | None) -> NextWorld | None:
        """The boundary is over: the world to hand over to, or None."""
        with self._lock:
            following = self.following
            self._cutting = following is not None and _is_for(agreement, following.request)
            owed, later = self._owed, self._later
            self._shown, self._owed, self._later = False, False, None
            if following is None or self._cutting:
                return following
            if owed:
                self._saying.stage(following.request, RankStage.PREPARED, measures=following.measures)
            if later is not None and self.preparation is not None:
                self._amend(self.preparation, later)
            return None

    def chain(self, version: int) -> int | None:
        """This rank's part in what the gradients streamed up to `version` sum to since the state was certified; None
        where nothing was, or some of them are not hashed yet."""
        made = self.following
        if made is None or not made.streams or made.source_stream is None or made.verdict is None:
            return None
        try:
            return made.source_stream.chain(made.verdict.version, version, time.monotonic())
        except TimeoutError:
            return None

    def stream(self) -> SourceStream | None:
        """What publishes the steps of this rank, while a handoff wants them."""
        preparation = self.preparation
        made = self.following or (None if preparation is None else preparation.made)
        return None if made is None else made.source_stream

    def drop_if_aborted(self) -> None:
        """Between two steps: give up what was built where an abort has come."""
        with self._lock:
            following = self.following
            reason = None if following is None else self._mailbox.take_abort(following.request.handoff_id)
            if reason is None:
                return
            self.following = self.preparation = None
        self._give_up(following, reason)

    def drop(self, reason: Reason) -> None:
        """Give up what was built."""
        self._give_up(self._let_go(), reason)

    def take(self) -> None:
        """The world that was built is the active one now."""
        following = self._let_go()
        assert following is not None
        self._mailbox.withdraw(following.request.handoff_id)

    def _let_go(self) -> NextWorld | None:
        """Nothing is wanted any more. Returns what was built."""
        with self._lock:
            following, self.following, self.preparation = self.following, None, None
            self._cutting = False
            return following

    # A newcomer, in its main thread.

    def enter(self, request: Order) -> tuple[NextWorld, int]:
        """Build, wait for permission, then for the boundary of the source world. Returns the world and the version at
        which the source world stands. Raises Dropped."""
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
        raise Dropped(self._reason(request, "prepare", "preparation failed"))

    def _await_permission(self, preparation: Preparation, made: NextWorld) -> None:
        reason = None
        with self._mailbox.changed:
            while reason is None:
                request = made.request
                if preparation.superseded:
                    raise _Superseded
                if self._mailbox.wishes.ready == (request.handoff_id, request.plan_revision):
                    return
                reason = self._mailbox.aborts.get(request.handoff_id)
                left_s = request.boundary_by(self._member) - time.time()
                if reason is None and left_s <= 0:
                    reason = self._reason(request, "ready", "no permission before the deadline")
                if reason is None:
                    self._mailbox.changed.wait(min(0.5, max(0.01, left_s)))
        self.drop(reason)
        raise Dropped(reason)

    def _await_boundary(self, preparation: Preparation, made: NextWorld) -> int:
        """The version at which the source world stands; a world without a source starts at what it loaded."""
        request = made.request
        if request.source is None:
            return 0 if made.small is None else int(made.small["step"])
        made.exchange.cancelled = preparation.aborted
        try:
            made.boundary = made.exchange.wait("boundary", preparation.deadline, poll_s=IN_PAUSE_POLL_S)
        except (Cancelled, ExchangeTimeout) as error:
            if preparation.superseded:
                raise _Superseded from None
            reason = self._mailbox.take_abort(request.handoff_id) or self._reason(request, "boundary", str(error))
            self.drop(reason)
            raise Dropped(reason) from error
        with self._lock:
            if preparation.superseded:
                raise _Superseded
            self._cutting = True
        return int(made.boundary["version"])

    # Building.

    def _begin(self, request: Order) -> None:
        self.preparation = self._make(request)
        self._in_background(self.preparation, None)

    def _amend(self, held: Preparation, request: Order) -> None:
        """With the lock: where the target is the same, keep what is built and has arrived; else build again."""
        if request.target_revision == held.request.target_revision:
            held.amend(request)
            made = self.following
            reason, measures = (None, None) if made is None else (made.why_it_fell, made.measures)
            self._saying.stage(request, held.stage, reason=reason, measures=measures)
            return
        if not request.names(self._member):
            text = f"no part in revision {request.plan_revision} of the plan"
            self._mailbox.abort(request.handoff_id, self._reason(request, "amend", text))
            return
        before, self.following = self.following, None
        self.preparation = self._make(request)
        held.superseded = True
        self._mailbox.wake()
        if before is not None and self._trains():
            self._in_background(self.preparation, before)

    def _in_background(self, preparation: Preparation, before: NextWorld | None) -> None:
        threading.Thread(target=self._run, args=(preparation, before), name="prepare", daemon=True).start()

    def _run(self, preparation: Preparation, before: NextWorld | None) -> Preparation | None:
        """Build the newest revision, after `before` of an older one has given way. Returns whose world is `following`
        then, or None where it could not be built, which has been said."""
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
        self.say(preparation, RankStage.PREPARING)
        try:
            return preparation.run(), None
        except Overtaken as overtaken:
            # The order that the others have already will come, or an abort; until then there is nothing to tell.
            self._mailbox.wait_for(preparation.aborted, preparation.deadline)
            return None, overtaken
        except (PrepareFailed, Cancelled) as error:
            return None, error

    def say(self, preparation: Preparation, stage: RankStage) -> None:
        """The preparation has come to `stage`; one that a newer revision has replaced is not spoken of."""
        with self._lock:
            preparation.stage = stage
            if not preparation.superseded:
                self._saying.stage(preparation.request, stage)

    def _built(self, preparation: Preparation, made: NextWorld | None, problem: Exception | None) -> None:
        """With the lock: the newest revision is built, or it could not be."""
        request = preparation.request
        if made is not None:
            self.following, preparation.stage = made, RankStage.PREPARED
            self._saying.stage(request, RankStage.PREPARED, reason=made.why_it_fell, measures=made.measures)
            return
        self.preparation = None
        phase = problem.phase if isinstance(problem, PrepareFailed) else "prepare"
        reason = self._mailbox.take_abort(request.handoff_id) or self._reason(request, phase, str(problem))
        self._saying.stage(request, RankStage.ABORTED, reason=reason)

    def _give_up(self, following: NextWorld | None, reason: Reason) -> None:
        if following is not None:
            self._mailbox.withdraw(following.request.handoff_id)
            following.drop()
            self._saying.stage(following.request, RankStage.ABORTED, reason=reason, measures=following.measures)

    def _reason(self, request: Order, phase: str, text: str) -> Reason:
        return Reason(text, phase, request.rank_of(self._member))


def _is_for(agreement: Agreement | None, request: Order) -> bool:
    tag = ready_tag(request.handoff_id, request.plan_revision)
    phases = (BoundaryPhase.READY, BoundaryPhase.DROP)
    return agreement is not None and agreement.phase in phases and agreement.tag == tag
