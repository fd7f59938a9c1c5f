"""The cutover of one rank, from the agreed boundary to the decision. The rank's main thread hosts it.

Pure, sans-IO: `handle(event, now)` returns what to do next. No rank applies the last step before it has read the
decision from the store. The store's decision counts, never a rank's own proposal. `now`: this rank's monotonic seconds.
"""

from dataclasses import dataclass, replace
from enum import IntEnum, StrEnum
from typing import assert_never

from liver_core.handoff.messages import CutoverDeadlines, Decision, FailedPart, FailureCause, Reason, Tick


class Level(IntEnum):
    """What a target holds. The barrier of the target world is the MIN over its ranks."""

    NOTHING = 0
    STATE = 1  # masters and moments, no gradients: a source was lost, the step was dropped, or a rescue. GO-REDO
    EVERYTHING = 2  # gradients too, and certified


POLL_FIRST_S, POLL_S = 0.02, 0.2
"""Between two reads of an undecided record, twice as long each time: most decisions take hundredths of a second, and a
node that leaves is safe only once its ranks have read theirs. The second also of a store that did not answer."""


class CutoverState(StrEnum):
    """Where the rank is; `decided` and `fell` are final."""

    READING = "reading"
    HELD = "held"  # reading is over; the certificates are being compared
    VOTED = "voted"  # in the barrier, or waiting for the decision
    BUILDING = "building"  # rescue: leavers are released; build the target world and fill it from survivors
    DECIDED = "decided"
    FELL = "fell"  # the decision cannot be known or done: checkpoint rung


@dataclass(frozen=True, slots=True)
class BoundaryAgreed:
    """What a cutover begins with: all ranks of the source world showed the same ready tag. A newcomer reads it in the
    store.

    `dropped`: the boundary is in the middle of a step, which is dropped. There are no gradients then, so a target can
    hold only the state, and the world that goes on does the batch again.
    """

    version: int
    dropped: bool = False


# Events.


@dataclass(frozen=True, slots=True)
class StateRead:
    """The reads are over. `level` STATE counts only with `source_lost`, after a dropped step, or in a rescue. A world
    loaded from a checkpoint has no source and answers (STATE, source_lost=True): it starts at the version it holds and
    does the batch."""

    level: Level
    source_lost: bool = False
    reason: Reason | None = None


@dataclass(frozen=True, slots=True)
class CertificateCompared:
    """This rank has compared the certificates of both sides for all that it holds."""

    equal: bool
    reason: Reason | None = None


@dataclass(frozen=True, slots=True)
class ComparisonFailed:
    """The comparison did not end on this rank. If this rank's part was in it, it may have ended on the others."""

    reason: Reason


@dataclass(frozen=True, slots=True)
class BarrierPassed:
    """The MIN over all ranks of the target world."""

    level: Level


@dataclass(frozen=True, slots=True)
class BarrierFailed:
    """The barrier timed out or a peer is gone."""

    reason: Reason


@dataclass(frozen=True, slots=True)
class DecisionRead:
    """The record in the store, as a compare-and-set or a read returned it."""

    decision: Decision


@dataclass(frozen=True, slots=True)
class TargetBuilt:
    """Every rank of the target world holds the certified state. With a reason: this rank knows that some do not."""

    reason: Reason | None = None


@dataclass(frozen=True, slots=True)
class StoreUnreachable:
    """The store did not answer. `gone`: nor will it ever, since its process has ended and the record with it."""

    reason: Reason
    gone: bool = False


CutoverEvent = (
    StateRead
    | CertificateCompared
    | ComparisonFailed
    | BarrierPassed
    | BarrierFailed
    | DecisionRead
    | TargetBuilt
    | StoreUnreachable
    | Tick
)


# Effects.


@dataclass(frozen=True, slots=True)
class ReadState:
    """A source publishes `version`; a target reads its masters, moments, gradients and small state. Answer with
    StateRead before `until`. A rank that is only a source answers EVERYTHING once it has published. In a rescue a
    survivor reads its share of what only leavers hold, and answers STATE."""

    version: int
    until: float


@dataclass(frozen=True, slots=True)
class CompareCertificates:
    """Answer with CertificateCompared or ComparisonFailed."""


@dataclass(frozen=True, slots=True)
class EnterBarrier:
    """MIN over the ranks of the target world; in a rescue, over the survivors. Answer with BarrierPassed or
    BarrierFailed before `until`."""

    level: Level
    until: float


@dataclass(frozen=True, slots=True)
class ProposeDecision:
    """Compare-and-set `undecided -> wish` on the decision record. Answer with DecisionRead of the record."""

    wish: Decision
    reason: Reason


@dataclass(frozen=True, slots=True)
class ReadDecision:
    """Read the record at `not_before`. Answer with DecisionRead or StoreUnreachable."""

    not_before: float


@dataclass(frozen=True, slots=True)
class BuildTarget:
    """GO-REDO of a rescue: build the target world and fill it from the survivors. Answer with TargetBuilt."""

    until: float


@dataclass(frozen=True, slots=True)
class ApplyStepInTarget:
    """GO: apply the step in the target world with the source's clip coefficient, gather weights, swap worlds."""


@dataclass(frozen=True, slots=True)
class RedoBatchInTarget:
    """GO-REDO: start the target world at the version that it holds, without gradients, and do the batch again."""

    reason: Reason


@dataclass(frozen=True, slots=True)
class ApplyStepInSource:
    """NO-GO, and this rank is a member of the source world: apply the step there and train on."""

    reason: Reason


@dataclass(frozen=True, slots=True)
class RedoBatchInSource:
    """NO-GO after the step was dropped, and this rank is a member of the source world: do the batch again there."""

    reason: Reason


@dataclass(frozen=True, slots=True)
class Leave:
    """This rank has no part in the world that goes on: report it and exit."""

    reason: Reason


@dataclass(frozen=True, slots=True)
class FallToCheckpoint:
    """The decision cannot be known, or the target world of a rescue cannot be built. Apply nothing; the job restarts
    from a checkpoint."""

    reason: Reason


CutoverEffect = (
    ReadState
    | CompareCertificates
    | EnterBarrier
    | ProposeDecision
    | ReadDecision
    | BuildTarget
    | ApplyStepInTarget
    | RedoBatchInTarget
    | ApplyStepInSource
    | RedoBatchInSource
    | Leave
    | FallToCheckpoint
)


class Cutover:
    """One rank's machine for one cutover. It is made when the `boundary` is agreed, and starts with what `begin` asks
    for.

    The host answers each effect by one event. Events that come too late change nothing. If it `rescues`, survivors
    vote on what only leavers held, and the target world is built after GO-REDO.
    """

    def __init__(
        self,
        *,
        rank: int,
        in_source: bool,
        in_target: bool,
        deadlines: CutoverDeadlines,
        boundary: BoundaryAgreed,
        now: float,
        rescues: bool = False,
    ) -> None:
        self.rank = rank
        self.in_source = in_source
        self.in_target = in_target
        self.rescues = rescues
        self.votes = in_target and (in_source or not rescues)
        self.deadlines = deadlines
        self.boundary = boundary
        # A newcomer of a rescue has nothing to do before the release, and may come later than that.
        self.state = CutoverState.VOTED if rescues and not in_source else CutoverState.READING
        self.decision = Decision.UNDECIDED
        self.vote: Level | None = None
        self._boundary_at, self._build_until = now, 0.0
        self._dropped = boundary.dropped
        self._held = Level.NOTHING
        self._poll_s = POLL_FIRST_S
        self._wish: Decision | None = None
        self._reason = Reason("every target holds all state, certified", "barrier")
        self._lost = "a source is lost"

    @property
    def next_deadline(self) -> float:
        """The latest time for the next Tick, on the clock of `now`. Infinite when the machine has ended."""
        match self.state:
            case CutoverState.READING | CutoverState.HELD:
                return self._own_deadline
            case CutoverState.VOTED:
                return self._own_deadline if self._wish is None else self._store_deadline
            case CutoverState.BUILDING:
                return self._build_until
            case CutoverState.DECIDED | CutoverState.FELL:
                return float("inf")
            case _:
                assert_never(self.state)

    @property
    def held(self) -> Level:
        """What this rank holds, as far as nothing is known against it."""
        return self._held

    def begin(self) -> tuple[CutoverEffect, ...]:
        """The first effects."""
        if self.state is CutoverState.VOTED:
            return (ReadDecision(not_before=self._boundary_at),)
        return (ReadState(self.boundary.version, until=self._own_deadline),)

    def handle(self, event: CutoverEvent, now: float) -> tuple[CutoverEffect, ...]:
        """Take one event. Carry out the effects in order."""
        match event:
            case StateRead():
                return self._on_state_read(event, now)
            case CertificateCompared():
                return self._on_certificate(event, now)
            case ComparisonFailed(reason=reason):
                return self._on_comparison_failed(reason, now)
            case BarrierPassed(level=level):
                return self._on_barrier(level)
            case BarrierFailed(reason=reason):
                return self._propose(Decision.NO_GO, reason) if self._awaits_barrier else ()
            case DecisionRead(decision=decision):
                return self._on_decision(decision, now)
            case TargetBuilt(reason=reason):
                return self._on_built(reason)
            case StoreUnreachable(reason=reason, gone=gone):
                return self._on_unreachable(reason, now, gone=gone)
            case Tick():
                return self._on_tick(now)
            case _:
                assert_never(event)

    @property
    def _own_deadline(self) -> float:
        return self._boundary_at + (self.deadlines.target_s if self.votes else self.deadlines.source_s)

    @property
    def _store_deadline(self) -> float:
        return self._boundary_at + self.deadlines.store_s

    @property
    def _awaits_barrier(self) -> bool:
        return self.state is CutoverState.VOTED and self.vote is not None and self._wish is None

    def _on_state_read(self, event: StateRead, now: float) -> tuple[CutoverEffect, ...]:
        if self.state is not CutoverState.READING:
            return ()
        if event.reason is not None:
            self._reason = event.reason
            self._lost = event.reason.text if event.source_lost else self._lost
        if not self.votes:
            self.state = CutoverState.VOTED  # A leaver does not vote, but stays until the decision.
            return (ReadDecision(not_before=now),)
        # Gradients are missing, but all sources live: the source world can apply the step, so do not redo the batch.
        if event.level is Level.STATE and not event.source_lost and not self._dropped and not self.rescues:
            return self._enter_barrier(Level.NOTHING, now)
        if event.level is Level.NOTHING:
            return self._enter_barrier(Level.NOTHING, now)
        assert event.level is Level.STATE or not (self._dropped or self.rescues), "there are no gradients to hold"
        self.state = CutoverState.HELD
        self._held = event.level
        return (CompareCertificates(),)

    def _on_certificate(self, event: CertificateCompared, now: float) -> tuple[CutoverEffect, ...]:
        if self.state is not CutoverState.HELD:
            return ()
        if event.equal:
            return self._enter_barrier(self._held, now)
        self._reason = event.reason or self._because("certificate", "the state received differs from the source's")
        self._held = Level.NOTHING
        return self._enter_barrier(Level.NOTHING, now)

    def _on_comparison_failed(self, reason: Reason, now: float) -> tuple[CutoverEffect, ...]:
        """Votes for nothing, but keeps what it holds: if the others decide to go, this rank's part was compared."""
        if self.state is not CutoverState.HELD:
            return ()
        self._reason = reason
        return self._enter_barrier(Level.NOTHING, now)

    def _enter_barrier(self, level: Level, now: float) -> tuple[CutoverEffect, ...]:
        self.state = CutoverState.VOTED
        # Even if it is late: the comparison may already have been a vote, and the others decide by it.
        self.vote = level
        if now >= self._own_deadline:
            return self._propose(Decision.NO_GO, self._late("reading"))
        return (EnterBarrier(level, until=self._own_deadline),)

    def _on_barrier(self, level: Level) -> tuple[CutoverEffect, ...]:
        if not self._awaits_barrier:
            return ()
        assert self.vote is not None, "who has not voted awaits no barrier"
        match min(level, self.vote):
            case Level.EVERYTHING:
                return self._propose(Decision.GO, self._reason)
            case Level.STATE:
                return self._propose(Decision.GO_REDO, self._why_redo())
            case _:
                other = self._felt("barrier", "another target does not hold the state")
                return self._propose(Decision.NO_GO, self._reason if self.vote is Level.NOTHING else other)

    def _propose(self, wish: Decision, reason: Reason) -> tuple[CutoverEffect, ...]:
        self._wish = wish
        self._reason = reason
        return (ProposeDecision(wish, reason),)

    def _on_decision(self, decision: Decision, now: float) -> tuple[CutoverEffect, ...]:
        if self.state is CutoverState.DECIDED:
            assert decision in (self.decision, Decision.UNDECIDED), f"the decision changed: {self.decision}, {decision}"
            return ()
        if self.state is not CutoverState.VOTED:
            return ()
        if decision is not Decision.UNDECIDED:
            return self._decide(decision, now)
        if self._wish is not None:
            return (ProposeDecision(self._wish, self._reason),)
        if now >= self._own_deadline:
            return self._propose(Decision.NO_GO, self._late("decision"))
        if self.votes:
            return ()
        wait_s, self._poll_s = self._poll_s, min(2 * self._poll_s, POLL_S)
        return (ReadDecision(not_before=now + wait_s),)

    def _decide(self, decision: Decision, now: float) -> tuple[CutoverEffect, ...]:
        needed = {Decision.GO: Level.EVERYTHING, Decision.GO_REDO: Level.STATE}.get(decision, Level.NOTHING)
        # Ask what this rank holds, not what it voted: the comparison may have failed here alone. A newcomer to a rescue
        # has no vote. It gets what survivors hold.
        held = self._held if self.votes else Level.STATE
        if self.in_target and held < needed:
            return self._fall(self._felt("decision", f"{decision} was decided, but this rank lacks the state"))
        self.decision = decision
        if self.in_target and self.rescues and decision.goes:
            self.state = CutoverState.BUILDING
            self._build_until = now + self.deadlines.build_s
            return (BuildTarget(self._build_until),)
        self.state = CutoverState.DECIDED
        match decision:
            case Decision.GO if self.in_target:
                return (ApplyStepInTarget(),)
            case Decision.GO_REDO if self.in_target:
                return (RedoBatchInTarget(self._why_redo()),)
            case Decision.NO_GO if self.in_source and self._dropped:
                return (RedoBatchInSource(self._no_go_reason()),)
            case Decision.NO_GO if self.in_source:
                return (ApplyStepInSource(self._no_go_reason()),)
            case Decision.NO_GO:
                return (Leave(self._no_go_reason()),)
            case _:
                return (Leave(self._because("decision", f"{decision}: this rank has no part in the target world")),)

    def _on_built(self, reason: Reason | None) -> tuple[CutoverEffect, ...]:
        """The leavers are gone. If anything has failed since then, the old world cannot go on either."""
        if self.state is not CutoverState.BUILDING:
            return ()
        if reason is not None:
            return self._fall(reason)
        self.state = CutoverState.DECIDED
        return (RedoBatchInTarget(self._why_redo()),)

    def _on_unreachable(self, reason: Reason, now: float, *, gone: bool) -> tuple[CutoverEffect, ...]:
        if self.state is not CutoverState.VOTED:
            return ()
        if gone or now >= self._store_deadline:
            return self._fall(reason)
        return (ReadDecision(not_before=now + POLL_S),)

    def _on_tick(self, now: float) -> tuple[CutoverEffect, ...]:
        match self.state:
            case CutoverState.READING | CutoverState.HELD if now >= self._own_deadline:
                # This rank has not entered the barrier, so its MIN never completes and no rank can propose GO.
                phase = str(self.state)
                self.state = CutoverState.VOTED
                return self._propose(Decision.NO_GO, self._late(phase))
            case CutoverState.VOTED if now >= self._store_deadline:
                text, cause = "the store gave no decision before the deadline", FailureCause(FailedPart.STORE)
                return self._fall(Reason(text, "decision", rank=self.rank, cause=cause))
            case CutoverState.VOTED if now >= self._own_deadline and self._wish is None:
                return self._propose(Decision.NO_GO, self._late("decision"))
            case CutoverState.BUILDING if now >= self._build_until:
                text = f"the next world is not ready {self.deadlines.build_s:g} s after the decision"
                return self._fall(self._felt("build", text))
            case _:
                return ()

    def _fall(self, reason: Reason) -> tuple[CutoverEffect, ...]:
        self.state = CutoverState.FELL
        return (FallToCheckpoint(reason),)

    def _why_redo(self) -> Reason:
        why = "the step was dropped" if self._dropped else self._lost
        text = f"{why}, and every target holds the state before the step"
        return self._because("barrier", "survivors hold all state that only leavers had" if self.rescues else text)

    def _no_go_reason(self) -> Reason:
        if self._wish is Decision.NO_GO:
            return self._reason
        return self._felt("decision", "another rank did not get the state in time")

    def _late(self, phase: str) -> Reason:
        side = "target" if self.votes else "source"
        limit_s = self._own_deadline - self._boundary_at
        return self._felt(phase, f"not finished {limit_s:g} s after the boundary ({side})")

    def _because(self, phase: str, text: str) -> Reason:
        return Reason(text, phase, rank=self.rank)

    def _felt(self, phase: str, text: str) -> Reason:
        """This rank says so, and has not failed: what it waits for has not come from others."""
        return replace(self._because(phase, text), cause=FailureCause(FailedPart.PEER))
