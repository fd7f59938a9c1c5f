"""Known bugs, planted in the machines: the simulator must find each of them. Pure.

A bug is a subclass of one machine, or a function of the pure half put in the place of another while a seed runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from agent.protocol import handoff_ends
from liver_core.handoff import (
    Cutover,
    Decision,
    LadderInputs,
    Order,
    Participant,
    Phase,
    Promise,
    Proposal,
    Proposer,
    Reason,
    Stage,
    generations,
    ladder,
    leader,
    own_handoffs,
    participant,
    proposer,
    refusals,
)
from liver_core.handoff.cutover import (
    ApplyStepInSource,
    ApplyStepInTarget,
    CertificateCompared,
    CutoverEffect,
    CutoverState,
    Leave,
    Level,
    RedoBatchInSource,
    StateRead,
)
from liver_core.handoff.generations import PLACES
from liver_core.handoff.leader import Leader
from liver_core.handoff.leader_events import (
    LeaderEffect,
    Loss,
    LossesKnown,
    PeersAnswered,
    Purpose,
)
from liver_core.handoff.own_handoffs import Losses, OwnHandoffs
from liver_core.handoff.participant_events import (
    ParticipantEffect,
    ParticipantEvent,
    ParticipantRecord,
    ParticipantState,
    Persist,
    SendReport,
    StartRank,
    Tick,
)
from liver_core.handoff.pending import Pending, PendingState
from liver_core.handoff.pending_events import PendingEffects
from liver_core.handoff.proposer_events import HandoffEnded, PersistProposal, ProposerEffect, ProposerEvent
from liver_core.handoff.ready_tag import Agreement
from liver_core.handoff.tally import Tally
from liver_core.layout import Member
from service.handoffs import older_worlds
from service.jobs import losses
from service.jobs.view import JobView
from service.simulation.world import checkpoints, handoff_rows, link
from service.simulation.world import service as sim_service
from service.simulation.world.ranks import SimRank
from service.simulation.world.whole import Machines

CutoverEffects = tuple[CutoverEffect, ...]
LeaderEffects = tuple[LeaderEffect, ...]


@dataclass(frozen=True, slots=True)
class Bug:
    """`patches`: (object, attribute, replacement) while a run lasts."""

    machines: Machines = field(default_factory=Machines)
    patches: tuple[tuple[Any, str, Any], ...] = ()

    @contextmanager
    def planted(self) -> Iterator[Callable[[], Machines]]:
        kept = [(owner, name, getattr(owner, name)) for owner, name, _ in self.patches]
        for owner, name, replacement in self.patches:
            setattr(owner, name, replacement)
        try:
            yield lambda: self.machines
        finally:
            for owner, name, original in kept:
                setattr(owner, name, original)


def proposing(proposer: type[Proposer]) -> Bug:
    """Leaders have this proposer."""
    return Bug(patches=((own_handoffs, "Proposer", proposer),))


class TakesUsedGenerations(Participant):
    def _settled(self) -> ParticipantRecord:
        return replace(super()._settled(), highest_generation=0)


class PromisesTwice(Participant):
    def _settled(self) -> ParticipantRecord:
        return replace(self.record, promise=None)


class ForgetsItsPromise(Participant):
    def __init__(self, *, job_id: str, member: Member, agent_incarnation: int, record: ParticipantRecord) -> None:
        forgotten = replace(record, promise=None, order=None)
        super().__init__(job_id=job_id, member=member, agent_incarnation=agent_incarnation, record=forgotten)


class SpeaksBeforeItPersists(Participant):
    def handle(self, event: ParticipantEvent, now: float) -> tuple[ParticipantEffect, ...]:
        return tuple(sorted(super().handle(event, now), key=lambda effect: not isinstance(effect, SendReport)))


class ReleasesBeforeTheRankHas(Participant):
    def _abort(self, reason: Reason, now: float) -> tuple[ParticipantEffect, ...]:
        effects = super()._abort(reason, now)
        if self.record.promise is None or self.state.value != "aborting":
            return effects
        return (*effects[:-1], *self._end(Stage.ABORTED, reason, now))


class NeverGivesUp(Participant):
    def handle(self, event: ParticipantEvent, now: float) -> tuple[ParticipantEffect, ...]:
        return () if isinstance(event, Tick) else super().handle(event, now)


class ForgetsWhatItBurned(Proposer):
    def _on_open(self, proposal: Proposal, now: float) -> tuple[ProposerEffect, ...]:
        self.record = replace(self.record, highest_generation=0)
        self._highest_seen = 0
        return super()._on_open(proposal, now)


class OpensBeforeItPersists(Proposer):
    def handle(self, event: ProposerEvent, now: float) -> tuple[ProposerEffect, ...]:
        return tuple(sorted(super().handle(event, now), key=lambda effect: isinstance(effect, PersistProposal)))


class AmendsAtAnyTime(Proposer):
    def _amend_refusal(self, proposal: Proposal, now: float) -> str | None:
        current = self.record.proposal
        if current is None or current.handoff_id != proposal.handoff_id:
            return "no such handoff is open"
        self.record = replace(self.record, phase=Phase.PREPARE)
        return self._proposal_refusal(proposal, now)


class AmendsBeforeTheTagsAreGone(Proposer):
    """One rank whose tag is gone is taken for all, newcomers included."""

    def _progress_withdrawing(self, now: float) -> tuple[ProposerEffect, ...]:
        assert self.record.pending is not None
        return self._revise(self.record.pending, now)


class SaysTooEarlyThatItsTagIsGone(Participant):
    def _withdraw(self, promise: Promise, now: float) -> tuple[ParticipantEffect, ...]:
        effects = super()._withdraw(promise, now)
        if self.state is not ParticipantState.WITHDRAWING:
            return effects
        self.state = ParticipantState.READY
        return (*effects[:-1], self._report(now))


class MovesTheDeadlineLater(Proposer):
    """An amendment may bring any deadline."""

    def _amend_refusal(self, proposal: Proposal, now: float) -> str | None:
        current = self.record.proposal
        sooner = proposal if current is None else replace(proposal, deadline_utc=current.deadline_utc)
        return super()._amend_refusal(sooner, now)


class ReadyWhileItStreams(Participant):
    """Built is taken for ready."""

    def _adopt_streaming(self, promise: Promise, now: float) -> tuple[ParticipantEffect, ...]:
        return self._adopt_prepared(promise, now)


class FallsSilently(Participant):
    """Why the ranks took the next rung is not passed on."""

    def _adopt_prepared(self, promise: Promise, now: float) -> tuple[ParticipantEffect, ...]:
        self._fallback = None
        return super()._adopt_prepared(promise, now)


class StepsBeforeTheBarrier(Cutover):
    def _on_certificate(self, event: CertificateCompared, now: float) -> CutoverEffects:
        effects = super()._on_certificate(event, now)
        if event.equal and self.vote is Level.EVERYTHING:
            return (ApplyStepInTarget(), *effects)
        return effects


class SkipsTheCertificate(Cutover):
    def _on_state_read(self, event: StateRead, now: float) -> CutoverEffects:
        effects = super()._on_state_read(event, now)
        if self.state is CutoverState.HELD:
            return self._enter_barrier(self._held, now)
        return effects


class ReadsGoBeforeItIsSet(Cutover):
    def _propose(self, wish: Decision, reason: Reason) -> CutoverEffects:
        effects = super()._propose(wish, reason)
        return (*effects, ApplyStepInTarget()) if wish is Decision.GO else effects


class BelievesItsOwnWish(Cutover):
    def _decide(self, decision: Decision, now: float) -> CutoverEffects:
        return super()._decide(self._wish or decision, now)


class FollowsItsVote(Cutover):
    """A rank whose comparison failed forgets what it holds, though the others have compared it and go."""

    def _decide(self, decision: Decision, now: float) -> CutoverEffects:
        self._held = self.vote or Level.NOTHING
        return super()._decide(decision, now)


class LeavesEarly(Cutover):
    def _on_state_read(self, event: StateRead, now: float) -> CutoverEffects:
        effects = super()._on_state_read(event, now)
        if self.in_target:
            return effects
        self.state = CutoverState.DECIDED
        return (Leave(Reason("published everything", "read", self.rank)),)


class AppliesWhatWasDropped(Cutover):
    """NO-GO is taken for the usual one, after which the source world has only the step to apply."""

    def _decide(self, decision: Decision, now: float) -> CutoverEffects:
        effects = super()._decide(decision, now)
        return tuple(
            ApplyStepInSource(effect.reason) if isinstance(effect, RedoBatchInSource) else effect for effect in effects
        )


class GoesWithoutGradients(Cutover):
    def _on_state_read(self, event: StateRead, now: float) -> CutoverEffects:
        if self._dropped and event.level is Level.STATE:
            self._dropped, event = False, replace(event, level=Level.EVERYTHING)
        return super()._on_state_read(event, now)


class ReleasesBeforeTheVote(Cutover):
    """A leaver of a rescue that has published takes itself for released."""

    def _on_state_read(self, event: StateRead, now: float) -> CutoverEffects:
        effects = super()._on_state_read(event, now)
        return effects if self.in_target or not self.rescues else self._propose(Decision.GO_REDO, self._reason)


class VotesWithoutItsShare(Cutover):
    """A survivor of a rescue that could not read what leavers hold votes as if it had."""

    def _on_state_read(self, event: StateRead, now: float) -> CutoverEffects:
        effects = super()._on_state_read(event, now)
        missed = self.rescues and self.votes and event.level is Level.NOTHING and self.state is CutoverState.VOTED
        return self._enter_barrier(Level.STATE, now) if missed else effects


class GoesBackAfterTheRelease(Cutover):
    """Where the next world cannot be built, the old one goes on, though its leavers are gone."""

    def _on_built(self, reason: Reason | None) -> CutoverEffects:
        effects = super()._on_built(reason)
        gone_wrong = self.state is CutoverState.FELL and self.in_source and reason is not None
        return (ApplyStepInSource(reason),) if gone_wrong and reason is not None else effects


class WaitsNoLongerThanForTheDecision(Cutover):
    """The limit of the cutover is taken for that of building the next world of a rescue."""

    def _decide(self, decision: Decision, now: float) -> CutoverEffects:
        effects = super()._decide(decision, now)
        self._build_until = self._own_deadline
        return effects


class StepsInTheSourceWhenLate(Cutover):
    """A source that cannot read the decision assumes NO-GO instead of holding."""

    def _fall(self, reason: Reason) -> CutoverEffects:
        effects = super()._fall(reason)
        return self._assume() if self.in_source else effects

    def _assume(self) -> CutoverEffects:
        self.state = CutoverState.VOTED
        return self._decide(Decision.NO_GO, 0.0)


class TakesAnAbortForABoundary(Participant):
    """A rank that ended while its agent was away may have met a boundary wherever more than prepare was heard of."""

    def _died_unwatched(self, reason: Reason, now: float) -> tuple[ParticipantEffect, ...]:
        promise = self.record.promise
        if promise is not None and promise.phase is Phase.ABORT:
            return self._lose_rank(Stage.BROKEN, reason, now, decision=self.record.decision)
        return super()._died_unwatched(reason, now)


class StartsBesideTheOlderRank(Participant):
    """The rank of a start begins while that of the older world is still told to end."""

    def _give_up(self, generation: int, start: Order | None) -> tuple[ParticipantEffect, ...]:
        effects = super()._give_up(generation, start)
        return effects if start is None or self.state is not ParticipantState.REPLACED else self._begin(start)


class KeepsOlderNumbers(Participant):
    """A member that has no part in a start ends its rank, and nothing more."""

    def _on_replaced(self, generation: int) -> tuple[ParticipantEffect, ...]:
        highest = self.record.highest_generation
        effects = super()._on_replaced(generation)
        self.record = replace(self.record, highest_generation=highest)
        return tuple(Persist(self.record) if isinstance(effect, Persist) else effect for effect in effects)


class ForgetsWhatItGivesUp(Participant):
    """An agent that restarts takes the rank that it was ending for one that goes on."""

    def __init__(self, *, job_id: str, member: Member, agent_incarnation: int, record: ParticipantRecord) -> None:
        forgotten = replace(record, replaced=None, start=None)
        super().__init__(job_id=job_id, member=member, agent_incarnation=agent_incarnation, record=forgotten)


class StartsBeforeItPersists(Participant):
    def handle(self, event: ParticipantEvent, now: float) -> tuple[ParticipantEffect, ...]:
        effects = super().handle(event, now)
        started = any(isinstance(effect, StartRank) for effect in effects)
        return tuple(reversed(effects)) if started else effects


class ForgetsAnAbortWhileItBuilds(Pending):
    """Only a world that is built is dropped."""

    def _on_aborted(self, handoff_id: str, reason: Reason) -> PendingEffects:
        return () if self.state is PendingState.BUILDING else super()._on_aborted(handoff_id, reason)


class ShowsWithoutPermission(Pending):
    """Whoever has built shows that it is ready."""

    @property
    def is_permitted(self) -> bool:
        return self.order is not None


class AbortsBesideTheBoundary(Pending):
    """An abort counts though all may be agreeing on the tag."""

    def _on_boundary(self, agreement: Agreement | None) -> PendingEffects:
        return super()._on_boundary(None if self._abort is not None else agreement)


class AnswersBesideTheBoundary(Pending):
    """The tag is said to be gone while a boundary still shows it."""

    def _on_withdrawn(self, handoff_id: str) -> PendingEffects:
        self._shown = False
        return super()._on_withdrawn(handoff_id)


class WithdrawsBesideTheBoundary(Pending):
    """A withdrawal counts though all may be agreeing on the tag."""

    def _on_boundary(self, agreement: Agreement | None) -> PendingEffects:
        return super()._on_boundary(agreement if self.is_permitted else None)


class ForgetsTheLaterRevision(Pending):
    """What had to wait for the end of a boundary is not taken up."""

    def _amend_later(self) -> PendingEffects:
        self._later = None
        return ()


class GoesWithoutPermission(Pending):
    """A newcomer that finds the boundary in the store cuts over, whatever its agent has said."""

    def _on_boundary_found(self, build: int) -> PendingEffects:
        effects = super()._on_boundary_found(build)
        return effects or (self._cut_over() if self._found_boundary and self._is_built else ())


class ShowsWhatIsNotBuilt(Pending):
    """Permission for the older revision stays when another target is built."""

    def _amend(self, current: Order, order: Order) -> PendingEffects:
        effects = super()._amend(current, order)
        self._permission = (order.handoff_id, order.plan_revision)
        return effects


class AnswersNothingForItself(Leader):
    """Whoever will go itself leaves its own open handoff alone."""

    def _answer(self, known: LossesKnown, losses: Losses, candidates: tuple[str, ...], now: float) -> LeaderEffects:
        if self.node_id not in candidates and not self.own.is_idle:
            return ()
        return super()._answer(known, losses, candidates, now)


class CountsNobodyWhoComes(Leader):
    """Only members of the present world are a loss."""

    def _losses_of_members(self, known: LossesKnown, now: float) -> dict[str, Loss]:
        members = set(known.world.node_ids())
        return {name: loss for name, loss in super()._losses_of_members(known, now).items() if name in members}


class OpensBesideAnother(Leader):
    """A handoff that others lead, and ranks here are promised to, is none of its business."""

    def _on_losses(self, known: LossesKnown, now: float) -> LeaderEffects:
        return super()._on_losses(replace(known, promised=None), now)


class TellsNobody(Leader):
    """A node that goes waits for the service to tell the others."""

    def _forward(self, known: LossesKnown, losses: Losses, candidates: tuple[str, ...], now: float) -> LeaderEffects:
        return ()


class NeverTriesAgain(OwnHandoffs):
    """After a failure nothing is opened here any more."""

    def _take_end(self, ended: HandoffEnded, now: float) -> None:
        super()._take_end(ended, now)
        if self._failures:
            self._retry_at = float("inf")


class AmendsNothing(OwnHandoffs):
    """More nodes go than the open handoff answers: it goes on as it is."""

    def _answer_another(self, known: LossesKnown, losses: Losses, now: float) -> LeaderEffects:
        return ()


class UsesNumbersThatOthersUsed(OwnHandoffs):
    """Only what was used here counts, not what ranks, others and the service have told."""

    def _open(
        self, proposal: Proposal, purpose: Purpose, known: LossesKnown, now: float, *, place: int, in_touch: bool
    ) -> tuple[LeaderEffects, str]:
        return super()._open(proposal, purpose, replace(known, used=0), now, place=place, in_touch=in_touch)

    def take_answers(self, event: PeersAnswered) -> LeaderEffects:
        return super().take_answers(replace(event, highest=0))


class WaitsForTheStoreThatFailed(OwnHandoffs):
    """A store that could not be started is taken for one that is slow."""

    def take_store_failure(self, generation: int, text: str) -> LeaderEffects:
        return ()


class AsksForMoreTime(OwnHandoffs):
    """What is amended gets more time."""

    def _revise(self, amended: Proposal, purpose: Purpose, now: float) -> tuple[LeaderEffects, bool]:
        return super()._revise(replace(amended, deadline_utc=amended.deadline_utc + 30.0), purpose, now)


class HearsOfNoStoresDeath(OwnHandoffs):
    """A handoff goes on though its store has died."""

    def take_store_death(self, generation: int, now: float) -> LeaderEffects:
        return ()


def _no_leaver_may_be_lost(view: JobView) -> bool:
    return view.handoff is not None and view.handoff.may_lose_leavers


def _everybody_is_needed(view: JobView, nodes: tuple[str, ...]) -> tuple[str, ...]:
    return nodes


def _hears_nothing(*_: object) -> None:
    return None


def _any_start_of_mine(order: Order, record: ParticipantRecord, member: Member, job_id: str) -> bool:
    return member in order.target.members and order.generation >= record.highest_generation


def _none_of_them(*_: object, **__: object) -> tuple[()]:
    return ()


_start_wait = generations.start_wait


def _forgets_what_the_start_before_waited_for(*worlds: Any, waits_s: float, **how: Any) -> generations.StartWait:
    return _start_wait(*worlds, **how)


def _the_lease_all_the_same(generation: int, *, wanted: int, until: float, **_: object) -> float | None:
    return until if generation >= wanted else None


def _always(*_: object, **__: object) -> bool:
    return True


def _the_same_again(highest: int) -> int:
    return PLACES + 1


def _whatever_was_heard(highest: int, parent: int, *, place: int = 0) -> int:
    return max(highest, parent) + 1 + place


def _no_refusal(*_: object) -> None:
    return None


def _always_runs_a_rank(order: Order, record: ParticipantRecord, member: Member) -> bool:
    return False


def _after_the_highest_it_knows(highest: int) -> int:
    return highest + 1


def _most_are_ready(tally: Tally, plan_revision: int) -> bool:
    ready = [member for member in tally.members if tally._is_ready(member, plan_revision)]
    return len(ready) >= len(tally.members) - 1


def _ready_in_any_revision(tally: Tally, member: Member, plan_revision: int) -> bool:
    report = tally._reports.get(member)
    return report is not None and report.stage is Stage.READY and tally._is_ours(report)


def _always_converges(inputs: LadderInputs) -> ladder.Estimate:
    return ladder.Estimate(0.0)


def _one_has_switched(tally: Tally) -> bool:
    return any(tally._has_switched(member) for member in tally.members)


REQUIRED = {
    "unfenced generation": Bug(
        Machines(participant=TakesUsedGenerations), ((leader, "OwnHandoffs", UsesNumbersThatOthersUsed),)
    ),
    "two proposers": Bug(Machines(participant=PromisesTwice)),
    "vote lost on restart": Bug(Machines(participant=ForgetsItsPromise)),
    "speak before persist": Bug(Machines(participant=SpeaksBeforeItPersists)),
    "start numbered like a handoff": Bug(patches=((sim_service, "next_start", _after_the_highest_it_knows),)),
    "stale roster": Bug(
        patches=(
            (refusals, "_source_refusal", _no_refusal),
            (refusals, "_runs_no_rank", _always_runs_a_rank),
            (refusals, "_part_refusal", _no_refusal),
        )
    ),
    "amend after GO": proposing(AmendsAtAnyTime),
    "stale revision counted in the tally": Bug(patches=((Tally, "_is_ready", _ready_in_any_revision),)),
    "deadline moved later by amend": Bug(
        patches=((own_handoffs, "Proposer", MovesTheDeadlineLater), (leader, "OwnHandoffs", AsksForMoreTime))
    ),
    "ready while it streams": Bug(Machines(participant=ReadyWhileItStreams)),
    "step before the barrier": Bug(Machines(cutover=StepsBeforeTheBarrier)),
    "certificate skipped": Bug(Machines(cutover=SkipsTheCertificate)),
    "GO read before it is set": Bug(Machines(cutover=ReadsGoBeforeItIsSet)),
    "start beside the older rank": Bug(Machines(participant=StartsBesideTheOlderRank)),
    "older numbers after a start": Bug(Machines(participant=KeepsOlderNumbers)),
    "start while an older world may step": Bug(patches=((generations, "unfenced", _none_of_them),)),
    "end untold by a host that was killed": Bug(patches=((handoff_ends, "untold_ends", _none_of_them),)),
    "older copy of a handoff taken": Bug(patches=((handoff_rows, "is_newer", _always),)),
    "start that forgets what the one before waited for": Bug(
        patches=((older_worlds, "start_wait", _forgets_what_the_start_before_waited_for),)
    ),
    "step beside a world that was heard": Bug(patches=((link, "lease_for", _the_lease_all_the_same),)),
    "checkpoint of a fenced world": Bug(
        patches=((checkpoints, "may_publish", _always), (checkpoints, "replacing", _none_of_them))
    ),
    "checkpoint that began before a handoff and a start": Bug(patches=((checkpoints, "replacing", _none_of_them),)),
    "handoff numbered into a newer start": Bug(
        patches=((proposer, "next_handoff", _whatever_was_heard), (own_handoffs, "next_number", _whatever_was_heard))
    ),
}
MORE = {
    "generation forgotten by the proposer": proposing(ForgetsWhatItBurned),
    "proposer speaks before persist": proposing(OpensBeforeItPersists),
    "promise released before the rank has dropped": Bug(Machines(participant=ReleasesBeforeTheRankHas)),
    "deadline ignored": Bug(Machines(participant=NeverGivesUp)),
    "amended before the tags are gone": proposing(AmendsBeforeTheTagsAreGone),
    "tag said to be gone too early": Bug(Machines(participant=SaysTooEarlyThatItsTagIsGone)),
    "own wish believed": Bug(Machines(cutover=BelievesItsOwnWish)),
    "own vote followed": Bug(Machines(cutover=FollowsItsVote)),
    "leaver leaves early": Bug(Machines(cutover=LeavesEarly)),
    "dropped step applied": Bug(Machines(cutover=AppliesWhatWasDropped)),
    "dropped step handed over": Bug(Machines(cutover=GoesWithoutGradients)),
    "leaver released before the vote": Bug(Machines(cutover=ReleasesBeforeTheVote)),
    "vote without the share": Bug(Machines(cutover=VotesWithoutItsShare)),
    "old world after the release": Bug(Machines(cutover=GoesBackAfterTheRelease)),
    "deadline cuts off the building": Bug(Machines(cutover=WaitsNoLongerThanForTheDecision)),
    "no answer taken for no": Bug(Machines(cutover=StepsInTheSourceWhenLate)),
    "next rung taken in silence": Bug(Machines(participant=FallsSilently)),
    "ladder forgets what streaming needs": Bug(patches=((ladder, "stream_estimate", _always_converges),)),
    "permission before all are ready": Bug(patches=((Tally, "all_ready", _most_are_ready),)),
    "broken without permission": Bug(Machines(participant=TakesAnAbortForABoundary)),
    "start taken twice": Bug(
        patches=((participant, "is_new_start", _any_start_of_mine), (link.ServiceLink, "_is_new", _always))
    ),
    "start numbered like the one before": Bug(patches=((sim_service, "next_start", _the_same_again),)),
    "given-up rank forgotten on restart": Bug(Machines(participant=ForgetsWhatItGivesUp)),
    "start before persist": Bug(Machines(participant=StartsBeforeItPersists)),
    "lease though the job may start elsewhere": Bug(patches=((link, "may_go_on", _always),)),
    "retired before all are active": Bug(patches=((Tally, "all_switched", _one_has_switched),)),
}
PENDING = {
    "abort forgotten while it builds": Bug(Machines(pending=ForgetsAnAbortWhileItBuilds)),
    "tag shown without permission": Bug(Machines(pending=ShowsWithoutPermission)),
    "aborted beside the boundary": Bug(Machines(pending=AbortsBesideTheBoundary)),
    "answered beside the boundary": Bug(Machines(pending=AnswersBesideTheBoundary)),
    "withdrawn beside the boundary": Bug(Machines(pending=WithdrawsBesideTheBoundary)),
    "later revision forgotten": Bug(Machines(pending=ForgetsTheLaterRevision)),
    "newcomer goes without permission": Bug(Machines(pending=GoesWithoutPermission)),
    "permission kept for another target": Bug(Machines(pending=ShowsWhatIsNotBuilt)),
}
LEADER = {
    "lead that goes answers nothing": Bug(Machines(leader=AnswersNothingForItself)),
    "who comes is no loss": Bug(Machines(leader=CountsNobodyWhoComes)),
    "leaver's rank needed in the pause": Bug(patches=((losses, "_goes_without_leavers", _no_leaver_may_be_lost),)),
    "leaver's node needed in the pause": Bug(patches=((losses, "_needed", _everybody_is_needed),)),
    "word of a death not heard": Bug(patches=((SimRank, "hear_of_death", _hears_nothing),)),
    "opens beside another": Bug(Machines(leader=OpensBesideAnother)),
    "tells nobody that it goes": Bug(Machines(leader=TellsNobody)),
    "never tries again": Bug(patches=((leader, "OwnHandoffs", NeverTriesAgain),)),
    "amends nothing": Bug(patches=((leader, "OwnHandoffs", AmendsNothing),)),
    "store's death not heard": Bug(patches=((leader, "OwnHandoffs", HearsOfNoStoresDeath),)),
    "store that failed is waited for": Bug(patches=((leader, "OwnHandoffs", WaitsForTheStoreThatFailed),)),
}
BUGS = REQUIRED | MORE | PENDING | LEADER
FIRST_SEEDS = {
    "abort forgotten while it builds": 400,
    "checkpoint that began before a handoff and a start": 600,
    "deadline ignored": 400,
    "dropped step applied": 900,
    "later revision forgotten": 1200,
    "newcomer goes without permission": 700,
    "next rung taken in silence": 400,
    "stale roster": 700,
    "start that forgets what the one before waited for": 400,
    "store that failed is waited for": 600,
    "tells nobody that it goes": 350,
    "vote without the share": 600,
}
"""Where a test begins to look for a bug that shows once in hundreds of seeds; for all others it begins at the first."""
