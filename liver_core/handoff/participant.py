"""The participant's half of a handoff: one machine per rank, hosted by that rank's agent.

Pure, sans-IO: `handle(event, now)` returns the effects to carry out, in order. It promises to at most one handoff at a
time, and journals a promise (`Persist`) before it reports it. `refusals` decides which orders it accepts.
"""

from dataclasses import replace
from typing import assert_never

from liver_core.handoff.messages import Decision, Order, Phase, Promise, Reason, Stage
from liver_core.handoff.participant_events import (
    BEFORE_BOUNDARY,
    BEFORE_PERMISSION,
    MAY_OBEY_ABORT,
    MAY_SHOW_TAG,
    OF_ONE_REVISION,
    RETIRE_GRACE_S,
    AbortRank,
    ClearReadyTag,
    OrderReceived,
    ParticipantEffect,
    ParticipantEvent,
    ParticipantRecord,
    ParticipantState,
    Persist,
    PrepareRank,
    QueryRank,
    RankDied,
    RankReported,
    RankStage,
    RetireRank,
    StartRank,
    StartReceived,
    StopRank,
    Tick,
    WorldReplaced,
)
from liver_core.handoff.participant_report import RecordKeeper
from liver_core.handoff.refusals import (
    amend_refusal,
    ends_promise,
    is_new_start,
    is_promised,
    is_replaced,
    is_stale,
    prepare_refusal,
)
from liver_core.layout import Member

Effects = tuple[ParticipantEffect, ...]


class Participant(RecordKeeper):
    """One member's part in the handoffs of one job.

    `record`: after a restart of the agent the journalled one, otherwise a new ParticipantRecord (with `active` set if
    this member already runs a rank). `agent_incarnation` must be greater than at every earlier start of the agent.
    Call `start` once, before any event.
    """

    def __init__(self, *, job_id: str, member: Member, agent_incarnation: int, record: ParticipantRecord) -> None:
        super().__init__(job_id=job_id, member=member, agent_incarnation=agent_incarnation, record=record)
        self._tag_heard = False  # whether the rank has reported READY since permission
        self._was_ready = False  # whether permission may have come to the others when the abort came here

    def start(self, now: float) -> Effects:
        """Re-adopt the rank: if the record has a promise or a world, ask the rank for its true stage (QueryRank). One
        whose world was given up for a start is ended, whatever it says."""
        if self.record.replaced is not None:
            self.state = ParticipantState.REPLACED
            return (StopRank(self.record.replaced, at_once=True),)
        if self.record.promise is None and self.record.active is None:
            return ()
        self.state = ParticipantState.RESTORING
        return (QueryRank(),)

    def handle(self, event: ParticipantEvent, now: float) -> Effects:
        """Take one event; `now` is seconds since 1970, UTC."""
        match event:
            case OrderReceived(order=order):
                return self._on_order(order, now)
            case WorldReplaced(generation=generation):
                return self._on_replaced(generation)
            case StartReceived(order=order):
                return self._on_start(order)
            case RankReported():
                return self._on_rank(event, now)
            case RankDied(reason=reason):
                return self._on_rank_died(reason, now)
            case Tick():
                return self._on_tick(now)
            case _:
                assert_never(event)

    @property
    def wants_ticks(self) -> bool:
        """Whether it waits for a deadline."""
        return self.state is not ParticipantState.IDLE

    def is_awaited(self, reason: Reason | None = None) -> bool:
        """Whether the others may be past the boundary and wait for the rank, a newcomer: by its record, where it gives
        up for this reason; or it was ready when an abort came, and only the word of its permission may be lost."""
        was_ready = self._was_ready and self.state is ParticipantState.ABORTING and self.record.active is None
        return was_ready or self.record.is_awaited(reason)

    # Orders.

    def _on_order(self, order: Order, now: float) -> Effects:
        if self.state in (ParticipantState.RESTORING, ParticipantState.REPLACED):
            return ()  # The order will be sent again. There is nothing true to report until the rank answers.
        promise = self.record.promise
        if order.job_id == self.job_id and promise is not None and is_promised(order, promise, self.record.order):
            return self._on_own_order(order, promise, now)
        if (ended := self._ended(order)) is not None:
            return (self._report_of(order, ended.stage, ended.reason, ended.decision, now),)
        if self.state in MAY_OBEY_ABORT and ends_promise(order, self.record.order):
            # The order will be sent again. It is taken once the rank has dropped what it holds.
            return self._abort(self._because("abort", f"its proposer has opened handoff {order.handoff_id}"), now)
        refusal = prepare_refusal(order, self._settled(), self.member, self.job_id, now)
        if order.phase is Phase.ABORT and order.job_id == self.job_id:
            return self._burn(order, now)
        return self._promise(_as_prepare(order), now) if refusal is None else (self._refuse(order, refusal, now),)

    def _settled(self) -> ParticipantRecord:
        """The record as a new handoff sees it. A handoff that is active here no longer binds; it gets retired."""
        return replace(self.record, promise=None) if self.state is ParticipantState.ACTIVE else self.record

    def _on_own_order(self, order: Order, promise: Promise, now: float) -> Effects:
        if is_stale(order, promise):  # Such as the farewell of a revision without this member, which is in again.
            return (self._report(now),)
        match order.phase:
            case Phase.ABORT:
                return self._abort(order.reason or Reason("aborted by the proposer", "abort"), now)
            case Phase.PREPARE:
                return self._on_newer_prepare(order, now)
            case Phase.PERMIT if order.plan_revision > promise.plan_revision and self.state in BEFORE_PERMISSION:
                # Of a rescue, to which a newcomer may come later: it has missed the word of this revision.
                return self._take_newer(order, now)
            case Phase.PERMIT if self.state is ParticipantState.READY and order.plan_revision == promise.plan_revision:
                permitted = replace(promise, phase=Phase.PERMIT)
                self.state, self._tag_heard = ParticipantState.PERMITTED, False
                assert self.record.order is not None
                persist = self._persist(promise=permitted, order=replace(self.record.order, phase=Phase.PERMIT))
                return (persist, self._set_tag(permitted), self._report(now))
            case Phase.WITHDRAW if order.plan_revision == promise.plan_revision:
                return self._withdraw(promise, now)
            case Phase.RETIRE if self.state is ParticipantState.ACTIVE:
                return self._retire(now)
            case _:
                return (self._report(now),)

    def _withdraw(self, promise: Promise, now: float) -> Effects:
        """Permission of this revision is void. Report READY again once no tag of it can be agreed."""
        if self.state not in (ParticipantState.READY, ParticipantState.PERMITTED):
            return (self._report(now),)
        clear = (ClearReadyTag(promise.handoff_id),) if self.state is ParticipantState.PERMITTED else ()
        self.state = ParticipantState.WITHDRAWING if clear else self.state
        return (self._persist(promise=replace(promise, phase=Phase.WITHDRAW)), *clear, self._report(now))

    def _on_newer_prepare(self, order: Order, now: float) -> Effects:
        promise = self.record.promise
        assert promise is not None and self.record.order is not None
        if order.plan_revision == promise.plan_revision or self.state is ParticipantState.ABORTING:
            return (self._report(now),)
        if self.state not in BEFORE_PERMISSION:
            # The boundary of the promised revision may come first, or has come. So only the promise counts.
            text = f"revision {order.plan_revision} is rejected: revision {promise.plan_revision} is {self.state}"
            return (self._report(now, self._because("amend", text)),)
        return self._take_newer(order, now)

    def _take_newer(self, order: Order, now: float) -> Effects:
        assert self.record.order is not None
        refusal = amend_refusal(order, self.record.order, self.member, now)
        if refusal is not None:
            return self._abort(refusal, now)  # The old revision is obsolete, and the new one is impossible.
        return self._take_revision(_as_prepare(order), now)

    def _take_revision(self, order: Order, now: float) -> Effects:
        promise = Promise(order.handoff_id, order.generation, order.plan_revision, Phase.PREPARE)
        persist = self._persist(promise=promise, order=order)
        self._fallback = None
        self.state = ParticipantState.PREPARING
        return (persist, PrepareRank(order), self._report(now))

    def _promise(self, order: Order, now: float) -> Effects:
        """Bind this member to the handoff: write to disk first, then order the rank, then report."""
        self._fallback = None
        retire: Effects = ()
        if self.record.promise is not None:
            retire = (RetireRank(self.record.promise.handoff_id),)
            self._end_record(Stage.ACTIVE, self.record.reason)
        persist = self._persist(
            promise=Promise(order.handoff_id, order.generation, order.plan_revision, Phase.PREPARE),
            order=order,
            highest_generation=order.generation,
            decision=Decision.UNDECIDED,
            reason=None,
        )
        return (persist, *retire, *self._set_out(order, now))

    def _set_out(self, order: Order, now: float) -> Effects:
        self.state = ParticipantState.PREPARING
        return (PrepareRank(order), self._report(now))

    def _burn(self, order: Order, now: float) -> Effects:
        """An abort of a handoff that was never promised. Its delayed prepare must not be accepted later."""
        reason = order.reason or Reason("aborted by the proposer", "abort")
        if order.generation <= self.record.highest_generation:
            return (self._refuse(order, reason, now),)
        return (self._persist(highest_generation=order.generation), self._refuse(order, reason, now))

    def _abort(self, reason: Reason, now: float) -> Effects:
        if self.state not in BEFORE_BOUNDARY:
            return (self._report(now),)
        promise = self.record.promise
        assert promise is not None
        # Withdraw the tag first: a boundary may come before the world is dropped.
        withdraw = (ClearReadyTag(promise.handoff_id),) if self.state in MAY_SHOW_TAG else ()
        self._was_ready = self.state is ParticipantState.READY and reason.phase != "amend"
        self.state = ParticipantState.ABORTING
        persist = self._persist(promise=replace(promise, phase=Phase.ABORT), reason=reason)
        return (persist, *withdraw, AbortRank(promise.handoff_id, reason), self._report(now))

    def _retire(self, now: float) -> Effects:
        promise = self.record.promise
        assert promise is not None
        self.state, order = ParticipantState.IDLE, self.record.order
        self._end_record(Stage.ACTIVE, self.record.reason)
        return (
            Persist(self.record),
            RetireRank(promise.handoff_id),
            self._report_of(order, Stage.ACTIVE, self.record.ended[-1].reason, self.record.ended[-1].decision, now),
        )

    # Worlds that the service starts.

    def _on_replaced(self, generation: int) -> Effects:
        if not is_replaced(self.record, generation):
            return ()
        return self._give_up(generation, None)

    def _on_start(self, order: Order) -> Effects:
        if not is_new_start(order, self.record, self.member, self.job_id):
            return ()
        return self._give_up(order.generation, order)

    def _give_up(self, generation: int, start: Order | None) -> Effects:
        """What is held of a world or handoff below `generation` is over. That is on disk before the rank is ended, and
        the rank has ended before the one of `start` begins."""
        reason = self._because("start", f"the service has started generation {generation}")
        holds = any(held is not None for held in (self.record.active, self.record.promise, self.record.replaced))
        if self.record.promise is not None:
            self._end_record(self._stage_given_up(self.record.promise), reason)
        if not holds and start is not None:
            return self._begin(start)
        highest = max(self.record.highest_generation, generation - 1 if start is None else generation)
        if not holds:
            return (self._persist(highest_generation=highest),)
        self.state = ParticipantState.REPLACED
        persist = self._persist(highest_generation=highest, start=start, replaced=self.record.replaced or reason)
        return (persist, StopRank(reason, at_once=True))

    def _stage_given_up(self, promise: Promise) -> Stage:
        """How a promised handoff ends here when a start replaces both of its worlds."""
        if self.record.active is not None and self.record.active.generation == promise.generation:
            return Stage.ACTIVE
        return Stage.BROKEN if promise.phase is Phase.PERMIT else Stage.ABORTED

    def _given_up(self) -> Effects:
        """The rank of the world that was given up has ended."""
        if self.record.start is not None:
            return self._begin(self.record.start)
        self.state = ParticipantState.IDLE
        return (self._persist(active=None, replaced=None),)

    def _begin(self, start: Order) -> Effects:
        """No process of an older world is left here. A rank that dies after this is not started again: the others of
        its world miss it, and the service decides."""
        self.state = ParticipantState.IDLE
        persist = self._persist(
            active=start.target, highest_generation=start.generation, start=None, replaced=None, reason=None
        )
        return (replace(persist, born=start), StartRank(start))

    # The rank.

    def _on_rank(self, event: RankReported, now: float) -> Effects:
        promise = self.record.promise
        if self.state is ParticipantState.REPLACED:
            return ()  # Only its end counts now; that arrives as RankDied.
        if promise is None:
            return self._on_rank_unpromised(event, now)
        foreign = event.handoff_id not in ("", promise.handoff_id)
        older = event.plan_revision not in (None, promise.plan_revision) and event.stage in OF_ONE_REVISION
        if foreign or older or event.stage is RankStage.TRAINING:
            return self._on_rank_elsewhere(event, promise, now)
        match event.stage:
            case RankStage.PREPARING:
                return self._adopt_preparing(promise, now)
            case RankStage.STREAMING:
                return self._adopt_streaming(promise, now)
            case RankStage.PREPARED:
                self._fallback = event.reason
                return self._adopt_prepared(promise, now)
            case RankStage.READY:
                self._fallback, self._tag_heard = event.reason, True
                return self._adopt_ready(promise, now)
            case RankStage.CUTTING_OVER:
                return self._adopt_cutting_over(now)
            case RankStage.ACTIVE:
                return self._adopt_active(event, now)
            case RankStage.LEFT:
                return self._adopt_left(event, now)
            case RankStage.ABORTED:
                return self._adopt_aborted(event, now)
            case RankStage.BROKEN:
                reason = event.reason or self._because("cutover", "the rank cannot continue in any world")
                return self._lose_rank(Stage.BROKEN, reason, now, decision=event.decision)
            case RankStage.STARTING | RankStage.FINISHED | RankStage.FAILED:
                return ()  # Of its world; what follows for the handoff comes as RankDied.
            case _:
                assert_never(event.stage)

    def _on_rank_unpromised(self, event: RankReported, now: float) -> Effects:
        self.state = ParticipantState.IDLE
        if event.stage is RankStage.BROKEN and self.record.active is not None:
            return (self._persist(active=None, reason=event.reason),)
        return ()

    def _on_rank_elsewhere(self, event: RankReported, promise: Promise, now: float) -> Effects:
        """The rank's report is not about the promise: it trains, or reports an older handoff or revision."""
        in_target = event.stage is RankStage.TRAINING and event.generation == promise.generation
        if in_target and promise.phase is not Phase.PREPARE:
            return self._adopt_active(event, now)
        if self.state is not ParticipantState.RESTORING:
            return ()
        older_revision = event.handoff_id == promise.handoff_id and event.stage is not RankStage.TRAINING
        if promise.phase is Phase.ABORT and older_revision:
            return self._abort_again(promise, now)
        if promise.phase is not Phase.PREPARE:
            # The world built before permission or abort is gone: the rank dropped it while the agent was away.
            return self._end(Stage.ABORTED, self.record.reason or self._because("restore", "the rank dropped it"), now)
        assert self.record.order is not None
        return self._set_out(self.record.order, now)

    def _adopt_preparing(self, promise: Promise, now: float) -> Effects:
        if self.state is not ParticipantState.RESTORING:
            return ()
        if promise.phase is Phase.ABORT:
            return self._abort_again(promise, now)
        self.state = ParticipantState.PREPARING
        return (self._report(now),)

    def _adopt_streaming(self, promise: Promise, now: float) -> Effects:
        match self.state:
            case ParticipantState.RESTORING if promise.phase is Phase.ABORT:
                return self._abort_again(promise, now)
            case ParticipantState.RESTORING | ParticipantState.PREPARING:
                self.state = ParticipantState.STREAMING
                return (self._report(now),)
            case _:
                return ()

    def _adopt_prepared(self, promise: Promise, now: float) -> Effects:
        match self.state:
            case ParticipantState.WITHDRAWING if not self._tag_heard:
                return ()  # Reported before permission: the rank may still set its tag after this report.
            case ParticipantState.PREPARING | ParticipantState.STREAMING | ParticipantState.WITHDRAWING:
                self.state = ParticipantState.READY
                return (self._report(now),)
            case ParticipantState.RESTORING:
                return self._readopt(promise, now)
            case _:
                return ()

    def _adopt_ready(self, promise: Promise, now: float) -> Effects:
        match self.state:
            case ParticipantState.PERMITTED:
                return (self._report(now),)
            case ParticipantState.RESTORING:
                return self._readopt(promise, now)
            case _:
                return ()

    def _readopt(self, promise: Promise, now: float) -> Effects:
        """After a restart: the rank's world is built. Send the rank again what the journal permits."""
        match promise.phase:
            case Phase.ABORT:
                return self._abort_again(promise, now)
            case Phase.PERMIT:
                self.state = ParticipantState.PERMITTED
                return (self._set_tag(promise), self._report(now))
            case Phase.WITHDRAW:
                self.state = ParticipantState.WITHDRAWING
                return (ClearReadyTag(promise.handoff_id), self._report(now))
            case _:
                self.state = ParticipantState.READY
                return (self._report(now),)

    def _abort_again(self, promise: Promise, now: float) -> Effects:
        self.state = ParticipantState.ABORTING
        reason = self.record.reason or self._because("abort", "aborted before the agent restarted")
        return (AbortRank(promise.handoff_id, reason), self._report(now))

    def _adopt_cutting_over(self, now: float) -> Effects:
        if self.state in (ParticipantState.CUTTING_OVER, ParticipantState.ACTIVE):
            return ()
        promise = self.record.promise
        assert promise is not None
        self.state = ParticipantState.CUTTING_OVER
        if promise.phase is Phase.PERMIT:
            return (self._report(now),)
        # The boundary came before the abort. The abort is too late; only the decision record counts.
        return (self._persist(promise=replace(promise, phase=Phase.PERMIT), reason=None), self._report(now))

    def _adopt_active(self, event: RankReported, now: float) -> Effects:
        if self.state is ParticipantState.ACTIVE:
            return ()
        order = self.record.order
        promise = self.record.promise
        assert order is not None and promise is not None
        self.state = ParticipantState.ACTIVE
        persist = self._persist(
            active=order.target,
            promise=replace(promise, phase=Phase.PERMIT),
            decision=event.decision if event.decision.goes else Decision.GO,
            reason=event.reason,
        )
        return (persist, self._report(now))

    def _adopt_left(self, event: RankReported, now: float) -> Effects:
        if self.state is ParticipantState.ACTIVE:
            return ()
        reason = event.reason or self._because("left", "this member has no part in the target world")
        return self._lose_rank(Stage.LEFT, reason, now, decision=event.decision)

    def _adopt_aborted(self, event: RankReported, now: float) -> Effects:
        if self.state is ParticipantState.ACTIVE:
            return ()
        reason = event.reason or self.record.reason or self._because("abort", "the rank dropped the target world")
        return self._end(Stage.ABORTED, reason, now, decision=event.decision)

    def _on_rank_died(self, reason: Reason, now: float) -> Effects:
        match self.state:
            case ParticipantState.IDLE:
                return () if self.record.active is None else (self._persist(active=None, reason=reason),)
            case ParticipantState.REPLACED:
                return self._given_up()
            case ParticipantState.RESTORING if self.record.promise is None:
                self.state = ParticipantState.IDLE
                return (self._persist(active=None, reason=reason),)
            case ParticipantState.RESTORING:
                return self._died_unwatched(reason, now)
            case ParticipantState.CUTTING_OVER | ParticipantState.ACTIVE:
                return self._lose_rank(Stage.BROKEN, reason, now, decision=self.record.decision)
            case ParticipantState.ABORTING:
                return self._lose_rank(Stage.ABORTED, self.record.reason or reason, now)
            case _:
                return self._lose_rank(Stage.ABORTED, reason, now)

    def _died_unwatched(self, reason: Reason, now: float) -> Effects:
        """The rank ended while its agent was away. If it had permission, the boundary may have come."""
        stage = Stage.BROKEN if self.record.had_permission else Stage.ABORTED
        return self._lose_rank(stage, reason, now, decision=self.record.decision)

    # Time.

    def _on_tick(self, now: float) -> Effects:
        promise, order = self.record.promise, self.record.order
        if self.state is ParticipantState.RESTORING:
            return (QueryRank(),)
        if self.state is ParticipantState.REPLACED and self.record.replaced is not None:
            return (StopRank(self.record.replaced, at_once=True),)
        if promise is None or order is None:
            return ()
        if self.state is ParticipantState.ABORTING:
            reason = self.record.reason or self._because("abort", "aborted")
            return (AbortRank(promise.handoff_id, reason), self._report(now))
        if self.state in BEFORE_BOUNDARY and now > order.boundary_by(self.member):
            return self._abort(self._late(), now)
        if self.state is ParticipantState.WITHDRAWING:
            self._tag_heard = True  # A rank that never got permission never reports READY, so do not wait for it.
            return (ClearReadyTag(promise.handoff_id), self._report(now))
        kept_until = order.deadline_utc + order.cutover.over_s(order.rung) + RETIRE_GRACE_S
        if self.state is ParticipantState.ACTIVE and now > kept_until:
            return self._retire(now)
        return ()


def _as_prepare(order: Order) -> Order:
    """Permission that is the first word of a plan: it counts when it comes again."""
    return replace(order, phase=Phase.PREPARE)
