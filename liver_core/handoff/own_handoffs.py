"""The handoffs of a job that one node leads: it opens them, amends or supersedes them, and tries again. Pure.

A part of `Leader`, which says when; here is what then follows.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from liver_core.handoff.generations import next_number
from liver_core.handoff.ladder import LadderInputs, cutover_deadlines, rung_for_nearer_deadline, unhurried_s, weigh
from liver_core.handoff.leader_events import (
    LIVE_RUNGS,
    NOTICE,
    AskPeers,
    HandoffAmended,
    HandoffOpened,
    HandoffSuperseded,
    HandoffWanted,
    LeaderEffect,
    Loss,
    LossesKnown,
    NoPlan,
    PeersAnswered,
    Plan,
    Planner,
    Purpose,
    Say,
    StartStore,
    Wait,
)
from liver_core.handoff.messages import (
    CutoverDeadlines,
    FailedPart,
    FailureCause,
    HandoffId,
    Reason,
    Rung,
    Stage,
    StoreAddress,
)
from liver_core.handoff.proposer import AMENDABLE, PEER_LOST_S, SILENT_IS_LOST, Proposer, ProposerState
from liver_core.handoff.proposer_events import (
    Amend,
    Cancel,
    HandoffEnded,
    Open,
    Proposal,
    ProposerEffect,
    ProposerEvent,
    ProposerRecord,
    Refused,
)
from liver_core.handoff.rung_costs import choose_by, estimate_costs
from liver_core.handoff.unreached import cut_off, lost_members, started_again
from liver_core.layout import Roster
from liver_core.retries import retry_in_s

SOONER_LEAST_S = 1.0
"""A deadline that is nearer by less is not worth a revision."""
FENCED_LOST_S = 2.0
"""As PEER_LOST_S, where the service has started a newer world: that fences the ranks of a member that is not reached,
and this node may be needed to lead the next handoff."""
WAITS_LONGER_S = 0.5
"""After a failure, for each candidate before this one: two that open at once each have the promise of their own ranks,
so that both fail, and would again."""
NO_STORE = StoreAddress("not-up-yet", 1)
"""Of a proposal that is not open yet."""

Effects = tuple[LeaderEffect, ...]
Losses = Mapping[str, Loss]


@dataclass(frozen=True, slots=True)
class Led:
    """The open handoff, beside what its proposer knows. `leaving`: the nodes that revision `revision` of its plan
    answers; `wanted`: what the next revision is for; `superseded`: it is given up for another one; `builds_since`: when
    ranks were told what they build now, None: when it was opened."""

    leaving: frozenset[str]
    opened_at: float
    revision: int = 1
    wanted: Purpose | None = None
    superseded: bool = False
    builds_since: float | None = None


@dataclass(frozen=True, slots=True)
class Opening:
    """A handoff that has a number, but no store yet. `asks`: others are asked first."""

    proposal: Proposal
    purpose: Purpose
    generation: int
    asks: bool


class OwnHandoffs:
    """Of one job on node `node_id`. `new_id` names a handoff. `record`: the journalled one after a restart, `led` what
    was kept of the handoff that it has open."""

    def __init__(
        self,
        *,
        job_id: str,
        node_id: str,
        agent_incarnation: int,
        planner: Planner,
        new_id: Callable[[], str],
        record: ProposerRecord,
        led: Led | None,
    ) -> None:
        self.node_id, self.planner = node_id, planner
        self.proposer = Proposer(job_id=job_id, proposer_id=node_id, agent_incarnation=agent_incarnation, record=record)
        self.led: Led | None = None
        if (proposal := record.proposal) is not None:
            self.led = led or Led(_left_behind(proposal), float("inf"), record.plan_revision)
            self.proposer.tally.hindrance = started_again(node_id).reason
        self._new_id = new_id
        self._opening: Opening | None = None
        self._no_plan_since: float | None = None
        self._failures, self._retry_at = 0, float("-inf")
        self._place = 0
        self._started = 0

    # What can be asked.

    @property
    def state(self) -> ProposerState:
        """What the open handoff is doing."""
        return self.proposer.state

    @property
    def is_idle(self) -> bool:
        """Whether no handoff is open or being opened here."""
        return self.state is ProposerState.IDLE and self._opening is None

    @property
    def used(self) -> int:
        """The greatest number that was used here, or is about to be."""
        opening = 0 if self._opening is None else self._opening.generation
        return max(self.proposer.used, opening)

    @property
    def open_id(self) -> str:
        """The handoff that is open or being opened here, empty if none."""
        proposal = self.proposer.record.proposal if self._opening is None else self._opening.proposal
        return "" if proposal is None else proposal.handoff_id

    @property
    def coming(self) -> frozenset[str]:
        """Nodes that the open handoff brings in."""
        proposal = self.proposer.record.proposal
        if proposal is None:
            return frozenset()
        return frozenset(member.node_id for member in proposal.members) - set(proposal.source.node_ids())

    @property
    def next_deadline(self) -> float:
        """When what is put off is due: the latest time for the next LossesKnown. Infinite where nothing is."""
        return self._retry_at

    def knows(self, handoff_id: str) -> bool:
        """Whether this handoff was led here."""
        return handoff_id == self.open_id or handoff_id in {ended.handoff_id for ended in self.proposer.record.ended}

    def answers(self, losses: Losses) -> bool:
        """Whether the open handoff goes to a world without these nodes, or will by its next revision."""
        if self.led is None or self.led.superseded:
            return False
        wanted = frozenset() if self.led.wanted is None else self.led.wanted.leaving
        return losses.keys() <= self.led.leaving | wanted

    # Opening.

    def answer(
        self, known: LossesKnown, losses: Losses, now: float, *, place: int, in_touch: bool
    ) -> tuple[Effects, Plan | Wait | NoPlan | None]:
        """Nodes will go: open a handoff without them, or amend or supersede the open one that does not answer all of
        them. `losses`: members, also of the open handoff's target; this node may be among them where one is open. Also
        returns what was found, None where nothing is looked for now."""
        if self.state is not ProposerState.IDLE:
            return self._answer_another(known, losses, now), None
        if self._opening is not None or now < self._retry_at:
            return (), None
        plan = self._plan(known, known.world, losses, now)
        if not isinstance(plan, Plan):
            return (Say(plan.reason),), plan
        first, safe_by = _first_of(losses)
        purpose = Purpose(frozenset(losses), first, plan.reason)
        proposal = self._proposal(self._new_id(), NOTICE, known.world, plan, safe_by)
        effects, _ = self._open(proposal, purpose, known, now, place=place, in_touch=in_touch)
        return effects, plan

    def propose(self, wanted: HandoffWanted, known: LossesKnown, now: float, *, place: int) -> tuple[Effects, str]:
        """Open what the service proposes. Also returns why not, empty if so."""
        proposal = self._proposal(wanted.handoff_id, wanted.cause, known.world, wanted.plan, wanted.deadline_utc)
        purpose = Purpose(wanted.leaving, wanted.notice_at, wanted.plan.reason)
        return self._open(proposal, purpose, known, now, place=place, in_touch=False)

    def _plan(self, known: LossesKnown, source: Roster, losses: Losses, now: float) -> Plan | Wait | NoPlan:
        """The world that answers all these notices. A node that has no rank and will go gets none."""
        if self._no_plan_since is None:
            self._no_plan_since = now
        left_s = _first_of(losses)[1] - now
        barred, waited_s = known.gets_no_rank, now - self._no_plan_since
        plan = self.planner.plan(source, frozenset(losses), barred=barred, left_s=left_s, waited_s=waited_s)
        if isinstance(plan, Plan):
            self._no_plan_since = None
        return plan

    def _proposal(self, handoff_id: str, cause: str, source: Roster, plan: Plan, deadline_utc: float) -> Proposal:
        """As yet without a store, on a rung that is chosen later."""
        return Proposal(
            handoff_id=HandoffId(handoff_id),
            job_id=self.proposer.job_id,
            parent=source.generation,
            source=source,
            layout=plan.layout,
            members=plan.members,
            plan_digest=plan.digest,
            store=NO_STORE,
            cause=str(cause),
            rung=Rung.STOP_AND_COPY,
            deadline_utc=deadline_utc,
            cutover=CutoverDeadlines(),
        )

    def _open(
        self, proposal: Proposal, purpose: Purpose, known: LossesKnown, now: float, *, place: int, in_touch: bool
    ) -> tuple[Effects, str]:
        """Choose the rung; where it is a live one, have a store, then open. Also returns why not, empty if so."""
        left_s = None if purpose.notice_at is None else proposal.deadline_utc - now
        basis = self.planner.ladder(proposal, purpose.leaving, left_s)
        choice, costs = choose_by(basis.prefer, basis.inputs, basis.measured)
        if choice.rung not in LIVE_RUNGS:
            where = f"without {', '.join(sorted(purpose.leaving))}" if purpose.leaving else f"to {proposal.layout}"
            refusal = f"no live handoff {where}"
            text = f"{refusal}: {choice.reason}"
            return (Say(text, about=f"{refusal} {proposal.parent} {choice.rung}"),), text
        generation = next_number(max(self.used, known.used), proposal.parent, place=place)
        if isinstance(generation, str):
            return (Say(generation),), generation
        self.proposer.record = replace(self.proposer.record, highest_generation=generation - 1)
        self._place = place
        deadline = proposal.deadline_utc
        if purpose.notice_at is None:  # It is not given up while a large state streams.
            deadline = max(deadline, now + unhurried_s(choice))
        limits, reason = cutover_deadlines(basis.inputs), f"{purpose.reason}; {choice.reason}"
        self._opening = Opening(
            replace(proposal, rung=choice.rung, deadline_utc=deadline, cutover=limits),
            replace(purpose, reason=reason, estimate_s=choice.estimate_s, costs=costs),
            generation,
            asks=not in_touch or self._failures > 0,  # Of the first attempt every millisecond counts.
        )
        if not self._opening.asks:
            return (StartStore(generation),), ""
        return (AskPeers(generation, proposal.source.node_ids()),), ""

    def _opens(self, generation: int) -> Opening | None:
        """What is being opened under this number."""
        return self._opening if self._opening is not None and self._opening.generation == generation else None

    def take_answers(self, event: PeersAnswered) -> Effects:
        """Others have told whether they are there, and which numbers they know."""
        opening = self._opens(event.generation)
        if opening is None or not opening.asks:
            return ()
        if event.too_few or event.highest >= event.generation:
            why = event.too_few or f"another node knows of a generation {event.highest}"
            return self._give_up(why, event.highest)
        self._opening = replace(opening, asks=False)
        return (StartStore(event.generation),)

    def take_store_failure(self, generation: int, text: str) -> Effects:
        """Its number is used: no second record for the same decision."""
        opening = self._opens(generation)
        return () if opening is None or opening.asks else self._give_up(text, generation)

    def _give_up(self, text: str, used: int) -> Effects:
        """What is being opened is not; `used`: the greatest number that is known as used by now."""
        self._opening = None
        self.proposer.record = replace(self.proposer.record, highest_generation=max(used, self.used))
        return (Say(f"no handoff could be opened: {text}"),)

    def take_store(self, generation: int, store: StoreAddress, now: float) -> Effects:
        """The store is up: open."""
        opening = self._opens(generation)
        if opening is None or opening.asks:
            return ()
        if self.proposer.used >= generation:
            return self._give_up(f"another node knows of a generation {self.proposer.used}", self.proposer.used)
        proposal, purpose = replace(opening.proposal, store=store), opening.purpose
        self._opening = None
        said = Say(f"opening handoff {proposal.handoff_id} to {proposal.layout}: {purpose.reason}")
        effects = self.proposer.handle(Open(proposal), now)
        if self.proposer.record.proposal != proposal:  # Too late: its number is used all the same.
            self.proposer.record = replace(self.proposer.record, highest_generation=max(generation, self.used))
            return (said, *effects)
        self.led = Led(purpose.leaving, now)
        return (said, HandoffOpened(proposal, self.proposer.record.generation, purpose), *effects)

    # Another notice.

    def _answer_another(self, known: LossesKnown, losses: Losses, now: float) -> Effects:
        """What is known by now, against the open handoff: `more` nodes go than it answers, or one goes sooner.

        It is amended until the boundary; past it the notice becomes the next handoff. One that cannot be amended is
        given up for all notices. Permission is taken back for more nodes only. Capacity that appears waits.
        """
        assert self.led is not None, "something is open"
        more = losses.keys() - self.led.leaving
        state, past = self.state, self.proposer.tally.boundary_passed()
        losses = {node: loss for node, loss in losses.items() if node not in self.coming}
        if state is ProposerState.PREPARING and not more and losses:
            return self._amend_deadline(losses, now)
        if not more or past or state is ProposerState.WITHDRAWING:
            return ()
        amended = self._amend(known, losses, frozenset(more), now) if state in AMENDABLE else None
        return self._supersede(frozenset(more), now) if amended is None else amended

    def _amend_deadline(self, losses: Losses, now: float) -> Effects:
        """A node goes sooner than the open handoff allows: the same plan until then, of which ranks keep everything;
        but a rescue where what they prepare would be ready too late."""
        loss = min(losses.values(), key=lambda each: each.safe_by)
        current, led = self.proposer.record.proposal, self.led
        assert current is not None and led is not None, "something is open"
        if not now < loss.safe_by < current.deadline_utc - SOONER_LEAST_S:
            return ()
        basis = self.planner.ladder(current, frozenset(losses), loss.safe_by - now)
        spent_s = max(0.0, now - led.opened_at)
        rung, why = rung_for_nearer_deadline(basis.inputs, current.rung, spent_s=spent_s)
        if rung is not current.rung and self._goes_too_soon(losses, basis.inputs, now):
            return self._supersede(frozenset({loss.node_id}), now)
        text = f"{loss.node_id} goes {current.deadline_utc - loss.safe_by:.1f} s sooner than was known{why}"
        costs, needed_s = estimate_costs(basis.inputs, basis.measured), weigh(rung, basis.inputs).seconds
        purpose = Purpose(frozenset(), loss.heard_at, text, costs, needed_s)
        effects, _ = self._revise(replace(current, deadline_utc=loss.safe_by, rung=rung), purpose, now)
        return effects

    def _amend(self, known: LossesKnown, losses: Losses, more: frozenset[str], now: float) -> Effects | None:
        """A newer revision of the open handoff, for all that go; None when there can be none. While the service is
        asked for a plan the open handoff goes on."""
        current, led = self.proposer.record.proposal, self.led
        assert current is not None and led is not None, "something is open"
        if not losses:
            return None  # It answers no notice, and who was to come goes: another plan may be another layout.
        plan = self._plan(known, current.source, losses, now)
        if isinstance(plan, Wait):
            return (Say(plan.reason),)
        # A handoff of the service may answer nodes that no notice is known of here.
        if isinstance(plan, NoPlan) or not led.leaving <= losses.keys():
            return None
        heard_at, safe_by = _first_of(losses)
        deadline = min(current.deadline_utc, safe_by)
        amended = replace(
            current,
            layout=plan.layout,
            members=plan.members,
            plan_digest=plan.digest,
            cause=NOTICE,
            deadline_utc=deadline,
        )
        basis = self.planner.ladder(amended, frozenset(losses), deadline - now)
        # Ranks keep what they have of a target that stays; when time is short they take the next rung by themselves.
        same = (plan.layout, plan.members) == (current.layout, current.members)
        inputs = basis.inputs if same else self._when_built(basis.inputs, now)
        choice, costs = choose_by(basis.prefer, inputs, basis.measured)
        if choice.rung not in LIVE_RUNGS:
            return None
        rung = current.rung if same else choice.rung
        if rung is Rung.RESCUE and self._goes_too_soon(losses, inputs, now):
            return None
        text = f"{', '.join(sorted(more))} will go too: {plan.reason}; {choice.reason}"
        purpose = Purpose(more - self.coming, heard_at, text, costs, weigh(rung, inputs).seconds)
        effects, taken = self._revise(replace(amended, rung=rung), purpose, now)
        return effects if taken else None

    def _when_built(self, inputs: LadderInputs, now: float) -> LadderInputs:
        """With what ranks are building to the end before they begin with another target."""
        led, record = self.led, self.proposer.record
        assert led is not None and record.proposal is not None, "something is open"
        if record.proposal.rung is Rung.RESCUE or not self.proposer.tally.any_builds(record.target_revision):
            return inputs
        since = led.opened_at if led.builds_since is None else led.builds_since
        left_s = max(0.0, inputs.prepare_s - max(0.0, now - since))
        return replace(inputs, prepare_s=inputs.prepare_s + left_s, endpoints_s=inputs.endpoints_s + left_s)

    def _goes_too_soon(self, losses: Losses, inputs: LadderInputs, now: float) -> bool:
        """Whether this node goes before a rescue has built the next world, which needs the store here until then."""
        own = losses.get(self.node_id)
        needs_s = weigh(Rung.RESCUE, inputs).seconds + inputs.prepare_s + inputs.margin_s
        return own is not None and own.safe_by - now < needs_s

    def _revise(self, amended: Proposal, purpose: Purpose, now: float) -> tuple[Effects, bool]:
        """Make `amended` the newest revision of the open handoff; whether it was taken."""
        led = self.led
        assert led is not None, "something is open"
        self.led = replace(led, wanted=purpose)
        effects = self.feed(Amend(amended), now)
        if amended not in (self.proposer.record.proposal, self.proposer.record.pending):
            self.led = led
            return effects, False
        said = Say(f"amending handoff {amended.handoff_id} to {amended.layout}: {purpose.reason}")
        return (said, HandoffAmended(purpose), *effects), True

    def _supersede(self, more: frozenset[str], now: float) -> Effects:
        led = self.led
        assert led is not None, "something is open"
        if led.superseded:
            return ()
        text = f"superseded: {', '.join(sorted(more))} will go too, one plan is made for all"
        self.led = replace(led, superseded=True)
        effects = self.feed(Cancel(Reason(text, "superseded")), now)
        if any(isinstance(effect, Refused) for effect in effects):
            # Too late to take it back: the notice becomes the next handoff, at the first boundary of the next world.
            self.led = led
            return effects
        return (HandoffSuperseded(), *effects)

    # What ends a handoff, and who is lost.

    def cancel(self, reason: Reason, now: float) -> Effects:
        """A person or the service wants no handoff any more, or it cannot end well."""
        if self._opening is not None:
            return self._give_up(reason.text, self.used)
        return self.feed(Cancel(reason), now) if self.state is not ProposerState.IDLE else ()

    def take_start(self, generation: int, now: float) -> Effects:
        """What leads to a successor of an older world ends."""
        if generation <= self._started:
            return ()
        self._started = generation
        proposal = self.proposer.record.proposal if self._opening is None else self._opening.proposal
        if proposal is None or proposal.parent >= generation:
            return ()
        return self.cancel(Reason(f"generation {generation} starts afresh", "cancel"), now)

    def take_store_death(self, generation: int, now: float) -> Effects:
        """A handoff to that world cannot be decided any more."""
        is_open = self.proposer.record.proposal is not None and self.proposer.record.generation == generation
        if not is_open and self._opens(generation) is None:
            return ()
        text = f"the store of generation {generation} on node {self.node_id} died"
        return self.cancel(Reason(text, "store", cause=FailureCause(FailedPart.STORE)), now)

    def take_unreachable(self, since: Mapping[str, float], now: float) -> Effects:
        """Who is not reached for long is lost, but for what ranks may do without their agent."""
        proposal = self.proposer.record.proposal
        if proposal is None:
            return ()
        members, effects = (*proposal.source.members, *proposal.members), list[LeaderEffect]()
        if (trouble := cut_off(self.node_id, members, since, now=now)) is not None:
            effects += self.feed(trouble, now)
        if (state := self.state) in SILENT_IS_LOST:
            lost_s = FENCED_LOST_S if proposal.parent < self._started else PEER_LOST_S
            for lost in lost_members(self.node_id, members, since, phase=str(state), now=now, lost_s=lost_s):
                effects += self.feed(lost, now)
        return tuple(effects)

    # The proposer.

    def feed(self, event: ProposerEvent, now: float) -> tuple[ProposerEffect, ...]:
        """One event for the proposer."""
        effects = self.proposer.handle(event, now)
        led, record = self.led, self.proposer.record
        if led is not None and record.plan_revision > led.revision:
            more = frozenset() if led.wanted is None else led.wanted.leaving
            since = now if record.target_revision > led.revision else led.builds_since
            led = replace(led, leaving=led.leaving | more, builds_since=since)
            self.led = replace(led, revision=record.plan_revision, wanted=None)
        elif led is not None and record.pending is None:
            self.led = replace(led, wanted=None)  # The boundary came first.
        for effect in effects:
            if isinstance(effect, HandoffEnded):
                self._take_end(effect, now)
        return effects

    def _take_end(self, ended: HandoffEnded, now: float) -> None:
        """A handoff that fails is tried again while there is time, but not in a tight loop: each uses up a number."""
        led, self.led = self.led, None
        if ended.stage is Stage.ACTIVE or (led is not None and led.superseded):
            self._failures, self._retry_at = 0, float("-inf")
            return
        self._failures += 1
        self._retry_at = now + retry_in_s(self._failures) + self._place * WAITS_LONGER_S


def _left_behind(proposal: Proposal) -> frozenset[str]:
    """Nodes of the source that have no part in the target."""
    return frozenset(proposal.source.node_ids()) - {member.node_id for member in proposal.members}


def _first_of(losses: Losses) -> tuple[float, float]:
    """When the first of them was heard, and by when the first state must be safe."""
    return min(loss.heard_at for loss in losses.values()), min(loss.safe_by for loss in losses.values())
