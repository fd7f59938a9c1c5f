"""Simulated rank processes and the worlds they step in: real boundary all-reduce semantics, no tensors. Pure.

The training state is one number per version (`Truth.value`); what a target reads from a source is that number.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, assert_never

from liver_core.handoff import (
    Agreement,
    BoundaryPhase,
    Cutover,
    Decision,
    HandoffId,
    Order,
    Reason,
    Rung,
    agreed,
    boundary_pair,
    drop_word,
    pack,
)
from liver_core.handoff.cutover import (
    ApplyStepInSource,
    ApplyStepInTarget,
    BarrierFailed,
    BarrierPassed,
    BoundaryAgreed,
    BuildTarget,
    CertificateCompared,
    CompareCertificates,
    ComparisonFailed,
    CutoverEffect,
    CutoverEvent,
    EnterBarrier,
    FallToCheckpoint,
    Leave,
    Level,
    ProposeDecision,
    ReadDecision,
    ReadState,
    RedoBatchInSource,
    RedoBatchInTarget,
    StateRead,
    Tick,
)
from liver_core.handoff.participant_events import RankReported, RankStage
from liver_core.handoff.ready_tag import NOTHING_WANTED
from liver_core.layout import Member, Roster
from tests.simulation.truth import CHECKPOINT_EVERY, voters

if TYPE_CHECKING:
    from tests.simulation.simulation import Simulation

COLLECTIVE_TIMEOUT_S = 3.0
LEASE_AGAIN_S = 0.2
JOIN_TIMEOUT_S = 15.0
_BUILDING = (RankStage.PREPARING, RankStage.STREAMING, RankStage.PREPARED, RankStage.READY)


class SimWorld:
    """The ranks of one generation in lock step: nobody passes a boundary that not all have reached."""

    def __init__(self, simulation: Simulation, roster: Roster, era: int) -> None:
        self.simulation = simulation
        self.roster = roster
        self.generation = roster.generation
        self.era = era
        self.at_boundary: dict[Member, SimRank] = {}
        self.dead = False
        self.steps = 0
        self.begun = 0  # steps that all ranks began; those that were dropped too

    def join(self, rank: SimRank) -> None:
        """A rank goes on to the next step; the boundary comes when all have."""
        if self.dead:
            self.simulation.clock.after(COLLECTIVE_TIMEOUT_S, rank.break_down, self.lost_peer(rank))
            return
        if not self.at_boundary:
            self.simulation.clock.after(JOIN_TIMEOUT_S, self._give_up, self.steps)
        self.at_boundary[rank.member] = rank
        if len(self.at_boundary) == len(self.roster.members):
            self.simulation.note(f"generation {self.generation} trains at version {rank.version}")
            self._begin_step()

    def _begin_step(self) -> None:
        self.begun += 1
        self._do_part(1, self.begun)

    def _do_part(self, part: int, step: int) -> None:
        parts = self.simulation.plan.parts
        following = self.boundary if part == parts else self._between_parts
        arguments = () if part == parts else (part, step)
        self.simulation.clock.after(self.simulation.step_s / parts, following, *arguments)

    def _between_parts(self, part: int, step: int) -> None:
        """No gradient is whole: only a step that all want to drop ends here."""
        assert step == self.begun
        ranks = self._met()
        if ranks is None:
            return
        agreement = self._agreed([rank.word_between_parts() for rank in ranks])
        if agreement is None:
            self._do_part(part + 1, step)
            return
        assert agreement.phase is BoundaryPhase.DROP
        self.simulation.note(f"step of generation {self.generation} dropped at version {ranks[0].version}")
        self._hand_over(ranks, dropped=True)

    def boundary(self) -> None:
        """After the gradients are reduced, before the step."""
        ranks = self._met()
        if ranks is None:
            return
        self.steps += 1
        agreement = self._agreed([rank.word() for rank in ranks])
        if agreement is not None and agreement.phase is BoundaryPhase.READY:
            self.simulation.note(f"boundary of generation {self.generation} agreed at version {ranks[0].version}")
            self._hand_over(ranks, dropped=False)
            return
        self._apply(ranks)

    def _apply(self, ranks: list[SimRank]) -> None:
        """The step, as soon as any rank holds a step lease."""
        if not any(rank.has_lease for rank in ranks):
            self.simulation.clock.after(LEASE_AGAIN_S, self._apply_later)
            return
        for rank in ranks:
            rank.apply_step(self)
        if self.steps % CHECKPOINT_EVERY == 0:
            self.simulation.checkpoints.begin(self, ranks)
        self._begin_step()

    def _apply_later(self) -> None:
        ranks = self._met()
        if ranks is not None:
            self._apply(ranks)

    def _met(self) -> list[SimRank] | None:
        """All ranks, in a collective of all; None where one is gone."""
        ranks = [self.at_boundary[member] for member in self.roster.members]
        if self.dead or any(not rank.alive or rank.world is not self for rank in ranks):
            self.collapse()
            return None
        return ranks

    def _agreed(self, words: list[int]) -> Agreement | None:
        pairs = [boundary_pair(word) for word in words]
        return agreed(min(pair[0] for pair in pairs), -min(pair[1] for pair in pairs))

    def _hand_over(self, ranks: list[SimRank], *, dropped: bool) -> None:
        self.at_boundary = {}
        self.simulation.cutover_begins(ranks, dropped=dropped)

    def collapse(self) -> None:
        """A peer is gone: the collective fails on whoever is in it."""
        self.dead = True
        for rank in self.at_boundary.values():
            self.simulation.clock.after(COLLECTIVE_TIMEOUT_S, rank.break_down, self.lost_peer(rank))

    def lost_peer(self, rank: SimRank) -> Reason:
        return Reason(f"a collective of generation {self.generation} failed", "train", self.roster.rank_of(rank.member))

    def _give_up(self, steps: int) -> None:
        if not self.dead and self.steps == steps and 0 < len(self.at_boundary) < len(self.roster.members):
            self.collapse()


class SimRank:
    """One process. Its control thread takes commands, its main thread steps or cuts over."""

    def __init__(self, simulation: Simulation, member: Member) -> None:
        self.simulation = simulation
        self.member = member
        self.alive = True
        self.world: SimWorld | None = None
        self.version = 0
        self.value = 1
        self.order: Order | None = None
        self.stage = RankStage.TRAINING
        self.build_number = 0
        self.rung = Rung.STOP_AND_COPY  # how the state truly moves, once all ranks have agreed on it
        self.tag = 0
        self.reason: Reason | None = None
        self.cutover: Cutover | None = None
        self.cutover_rank = 0
        self.cutover_version = 0
        self.agreed = False  # in the boundary that was agreed; a moment later it cuts over
        self.early: BoundaryAgreed | None = None  # by the sources, before this newcomer was permitted
        self.partial = False  # the step was dropped, so that its gradients are not whole
        self.held_version = -1
        self.held_value = -1
        self.decision_read = Decision.UNDECIDED
        self.decision = Decision.UNDECIDED  # of the last handoff, as reported
        self.redoing = False
        self.belongs_to = 1  # the generation that its agent takes it for
        self.leased_until = math.inf
        self.commands_until = 0.0
        self.reports_until = 0.0

    def __str__(self) -> str:
        return f"rank on {self.member}"

    # Commands of the agent.

    def prepare(self, order: Order) -> None:
        self._hello_now_and_then()
        held = self.order
        same = held is not None and held.handoff_id == order.handoff_id
        if same and held is not None and held.plan_revision == order.plan_revision:
            self.say()
            return
        self.simulation.truth.rank_prepares(self, order)
        if self.stage is RankStage.CUTTING_OVER:
            self.say()
            return
        if same and held is not None and held.target_revision == order.target_revision and self.stage in _BUILDING:
            # Only the deadline is nearer: what was built and has arrived is kept.
            self.order, self.tag = order, 0
            self.say()
            return
        self.order = order
        self.stage = RankStage.PREPARING
        self.rung = Rung.STOP_AND_COPY
        self.tag = 0
        self.reason = None
        self.decision = self.decision_read = Decision.UNDECIDED
        self.cutover = None
        self.early = None
        self.build_number += 1
        sim = self.simulation
        needs_s = sim.connect_s(self.member) if order.rung is Rung.RESCUE else sim.build_s(self.member)
        sim.clock.after(needs_s, self._built, self.build_number)
        self.say()

    def _built(self, number: int) -> None:
        if not self.alive or number != self.build_number or self.order is None or self.stage is not RankStage.PREPARING:
            return
        sim, order = self.simulation, self.order
        rank = order.target.rank_of(self.member)
        if rank is None and order.source is not None:
            rank = order.source.rank_of(self.member)
        self.cutover_rank = rank or 0
        if sim.takes_fault("build fails", self.member):
            self._drop(Reason("the build failed", "build", self.cutover_rank))
            return
        if self.world is None:
            waits_s = order.boundary_by(self.member) + 1.0 - sim.agents[self.member].skew_s - sim.clock.now
            sim.clock.after(max(0.05, waits_s), self._waited_in_vain, number)
        if not order.takes_over:
            self.held_version = int(order.checkpoint)
            sim.checkpoints.announced.append(order.generation)
        if order.takes_over and order.rung.streams:
            self.stage = RankStage.STREAMING
            self.say()
            sim.convergence(order).enter(self)
            return
        self.stage = RankStage.PREPARED
        self.say()

    def _waited_in_vain(self, number: int) -> None:
        """A newcomer ends by itself when no boundary is agreed before the deadline."""
        if self.alive and number == self.build_number and self.stage in _BUILDING:
            self._drop(Reason("no boundary was agreed before the deadline", "ready", self.cutover_rank))

    def streamed(self, verdict: Rung, reason: Reason | None) -> None:
        """All ranks have agreed how the state moves: it is certified, or it is copied at the boundary after all."""
        self.rung, self.reason = verdict, reason
        self.stage = RankStage.PREPARED
        self.say()

    def permit(self, handoff_id: HandoffId, plan_revision: int, tag: int) -> None:
        order = self.order
        if order is None or order.handoff_id != handoff_id or order.plan_revision != plan_revision:
            return
        if self.stage not in (RankStage.PREPARED, RankStage.READY):
            self.say()
            return
        self.tag = tag
        self.stage = RankStage.READY
        self.say()
        if not order.takes_over:
            self.begin_cutover(BoundaryAgreed(self.held_version))
        elif self.early is not None:
            self.begin_cutover(self.early)
        elif order.rung is Rung.RESCUE and self.world is None:
            # Nobody waited for this newcomer: the boundary may be long past.
            boundary = self.simulation.store(order).boundary
            if boundary is not None:
                self.begin_cutover(boundary)

    def withdraw(self, handoff_id: HandoffId) -> None:
        if self.agreed:
            return  # Tag and boundary are under one lock: the answer is that it cuts over.
        if self.order is not None and self.order.handoff_id == handoff_id and self.stage is RankStage.READY:
            self.tag = 0
            self.stage = RankStage.PREPARED
        self.say()

    def abort(self, handoff_id: HandoffId, reason: Reason) -> None:
        if self.order is None or self.order.handoff_id != handoff_id:
            self.simulation.rank_says(self, RankReported(handoff_id, self.generation, RankStage.ABORTED, reason=reason))
        elif self.agreed:
            pass
        elif self.stage in _BUILDING:
            # The tag goes at once; dropping a world may take seconds, in which g trains on.
            self.tag = 0
            slow_s = 4.0 * self.simulation.random.random() if self.simulation.chance(0.1) else 0.0
            self.simulation.clock.after(slow_s, self._dropped, self.order, reason)
        else:
            self.say()

    def _dropped(self, order: Order, reason: Reason) -> None:
        if self.alive and self.order is order and self.stage in _BUILDING:
            self._drop(reason)

    def retire(self, handoff_id: HandoffId) -> None:
        """What the older world held may be freed; from now on this rank just trains."""
        if self.order is not None and self.order.handoff_id == handoff_id and self.stage is RankStage.ACTIVE:
            self._forget()

    def _hello_now_and_then(self) -> None:
        if self.simulation.chance(0.05):
            self.status()

    def _forget(self) -> None:
        self.order = None
        self.cutover = None
        self.stage = RankStage.TRAINING
        self.decision = Decision.UNDECIDED
        self.reason = None

    def stop(self) -> None:
        """A process takes its time to end; until then its world goes on."""
        self._hello_now_and_then()
        slow_s = 2.0 * self.simulation.random.random() if self.simulation.chance(0.3) else 0.0
        self.simulation.clock.after(slow_s, self.exit)

    def status(self) -> None:
        """An answer may be the stage of the last handoff, or just that the rank trains when that one is over."""
        just_trains = self.simulation.random.random() < 0.5
        if just_trains and self.stage is RankStage.ABORTED and self.world is not None:
            self._forget()
        if just_trains and self.stage is RankStage.ACTIVE:
            self.simulation.rank_says(self, RankReported(HandoffId(""), self.generation, RankStage.TRAINING))
            return
        self.say()

    # A rank that the service starts.

    @property
    def has_lease(self) -> bool:
        """Whether it holds a step lease."""
        return self.simulation.clock.now < self.leased_until

    def begin_training(self, world: SimWorld, version: int) -> None:
        """All ranks of the start have loaded the checkpoint."""
        self.world, self.version = world, version
        self.value = self.simulation.truth.value(version)
        self.say()
        world.join(self)

    # What the process says and how it ends.

    @property
    def generation(self) -> int:
        return 0 if self.world is None else self.world.generation

    def say(self) -> None:
        handoff_id = HandoffId("") if self.order is None else self.order.handoff_id
        revision = None if self.order is None else self.order.plan_revision
        self.simulation.rank_says(
            self, RankReported(handoff_id, self.generation, self.stage, self.decision, self.reason, revision)
        )

    def _drop(self, reason: Reason) -> None:
        """The target world is gone here; a newcomer ends with it."""
        self.stage = RankStage.ABORTED
        self.tag = 0
        self.cutover = None
        self.reason = reason
        self.say()
        if self.world is None:
            self.exit()

    def break_down(self, reason: Reason) -> None:
        if not self.alive:
            return
        self.stage = RankStage.BROKEN
        self.reason = reason
        self.say()
        self.exit()

    def exit(self) -> None:
        if self.alive:
            self.alive = False
            self.world = None
            self.simulation.rank_exited(self)

    def holds(self, handoff_id: str) -> bool:
        """Whether anything of this handoff is still prepared or undecided here."""
        held = self.stage in (*_BUILDING, RankStage.CUTTING_OVER)
        return held and self.order is not None and self.order.handoff_id == handoff_id

    def word(self) -> int:
        return pack(self.tag, BoundaryPhase.READY) if self.tag else NOTHING_WANTED

    def word_between_parts(self) -> int:
        drops = self.order is not None and self.order.rung is Rung.DROP_STEP
        return drop_word(self.word()) if drops else NOTHING_WANTED

    def apply_step(self, world: SimWorld, *, at_cutover: bool = False) -> None:
        """One optimizer step in `world`. One that is handed over needs no step lease."""
        self.simulation.truth.gradients_whole(self)
        self.version += 1
        self.value = self.simulation.truth.value(self.version) if self.value == self._right() else -1
        self.simulation.truth.step_applied(self, world, at_cutover=at_cutover)
        if self.redoing:
            self.redoing = False
            self._first_step_done()

    def _right(self) -> int:
        return self.simulation.truth.value(self.version - 1)

    # The cutover.

    def begin_cutover(self, boundary: BoundaryAgreed) -> None:
        """The boundary was agreed (or, for a newcomer, the store said so)."""
        self.agreed = False
        if not self.alive or self.stage not in (RankStage.PREPARED, RankStage.READY):
            return
        sim, order = self.simulation, self.order
        assert order is not None
        if self.stage is RankStage.PREPARED:
            self.early = boundary  # A newcomer goes when its own permission has come.
            return
        sim.truth.boundary_passed(self, order, dropped=boundary.dropped)
        self.stage = RankStage.CUTTING_OVER
        self.reason = None
        self.cutover_version, self.partial = boundary.version, boundary.dropped
        self.say()
        self.cutover = sim.machines.cutover(
            rank=self.cutover_rank,
            in_source=order.takes_over and order.source is not None and self.member in order.source.members,
            in_target=self.member in order.target.members,
            deadlines=order.cutover,
            boundary=boundary,
            now=sim.clock.now,
            rescues=order.rung is Rung.RESCUE,
        )
        for effect in self.cutover.begin():
            self._carry_out(effect)
        self.cutover_tick_later()

    def answer(self, machine: Cutover | None, event: CutoverEvent) -> None:
        """What `machine` asked for; an answer to the machine of an older handoff finds nobody."""
        if machine is self.cutover:
            self.cutover_event(event)

    def cutover_event(self, event: CutoverEvent) -> None:
        if not self.alive or self.cutover is None:
            return
        if event.__class__.__name__ == "DecisionRead":
            self.decision_read = event.decision  # type: ignore[union-attr]
        machine = self.cutover
        before = machine.state
        effects = machine.handle(event, self.simulation.clock.now)
        self.simulation.coverage.cutover(before, event)
        for effect in effects:
            self._carry_out(effect)
        self.cutover_tick_later()

    def cutover_tick_later(self) -> None:
        if self.cutover is None:
            return
        due = self.cutover.next_deadline - self.simulation.clock.now
        if due < 1e6:
            self.simulation.clock.after(max(0.05, due + 0.01), self._cutover_tick, self.cutover)

    def _cutover_tick(self, machine: Cutover) -> None:
        if self.alive and machine is self.cutover and self.simulation.clock.now >= machine.next_deadline:
            self.cutover_event(Tick())

    def _carry_out(self, effect: CutoverEffect) -> None:
        sim, order = self.simulation, self.order
        assert order is not None
        clock = sim.clock
        match effect:
            case ReadState(until=until):
                clock.after(sim.read_s(self, until), self._read_done, self.cutover)
            case CompareCertificates():
                clock.after(0.02, self._certified, self.cutover)
            case EnterBarrier(level=level, until=until):
                sim.barrier(order).enter(self, level, until)
            case ProposeDecision(wish=wish):
                sim.store(order).ask(self, self.cutover, wish)
            case ReadDecision(not_before=not_before):
                clock.after(
                    max(0.0, not_before - clock.now), sim.store(order).ask, self, self.cutover, Decision.UNDECIDED
                )
            case BuildTarget():
                sim.building(order).enter(self)
            case ApplyStepInTarget():
                self._switch(None)
            case RedoBatchInTarget(reason=reason):
                self._switch(reason)
            case ApplyStepInSource(reason=reason) | RedoBatchInSource(reason=reason):
                self._stay(reason, redo=isinstance(effect, RedoBatchInSource))
            case Leave(reason=reason):
                self._leave(reason)
            case FallToCheckpoint(reason=reason):
                sim.truth.fell(self, order, sim)
                self.break_down(reason)
            case _:
                assert_never(effect)

    def _read_done(self, machine: Cutover) -> None:
        """The reads are over: what they gave depends on which sources were still there."""
        sim, order = self.simulation, self.order
        if not self.alive or order is None or self.cutover is not machine:
            return
        if not order.takes_over:
            self.held_value = sim.truth.value(self.cutover_version) ^ sim.takes_fault("corrupt", self.member)
            self.held_version = self.cutover_version
            why = Reason("there is no source world", "read", self.cutover_rank)
            self.cutover_event(StateRead(Level.STATE, source_lost=True, reason=why))
            return
        assert order.source is not None
        if self.member not in order.target.members:
            self.cutover_event(StateRead(Level.EVERYTHING))
            return
        sources = [sim.agents[member].rank for member in order.source.members]
        if order.rung is Rung.RESCUE:
            self._rescue(order, sources)
            return
        lost = next((rank for rank in sources if rank is None or not rank.alive), None)
        if any(rank is None or not rank.alive for rank in sources):
            name = "a source" if lost is None else str(lost)
            reason = Reason(f"{name} is gone", "read", self.cutover_rank)
            # What has streamed in needs no source any more; only the last gradients do.
            level = Level.NOTHING if not self.rung.streams and sim.chance(0.4) else Level.STATE
            if level is Level.STATE:
                self._hold(sources)
            self.cutover_event(StateRead(level, source_lost=True, reason=reason))
            return
        self._hold(sources)
        if sim.takes_fault("gradients late", self.member):
            self.cutover_event(StateRead(Level.STATE, reason=Reason("gradients late", "read", self.cutover_rank)))
            return
        self.cutover_event(StateRead(Level.STATE if self.partial else Level.EVERYTHING))

    def _rescue(self, order: Order, sources: list[SimRank | None]) -> None:
        """A survivor has read its share of what only leavers hold; when one of them died, before or after that."""
        lost = any(rank is None or not rank.alive for rank in sources)
        late = self.simulation.takes_fault("gradients late", self.member)
        if late or (lost and self.simulation.random.random() < 0.5):
            reason = Reason("a leaver is gone", "read", self.cutover_rank)
            self.cutover_event(StateRead(Level.NOTHING, source_lost=lost, reason=reason))
            return
        self._hold(sources)
        self.cutover_event(StateRead(Level.STATE))

    def take_what_survivors_hold(self, order: Order) -> None:
        """After a rescue: masters and moments of all survivors, and of the leavers as far as survivors have them."""
        truth = self.simulation.truth
        survivors = {member for member in order.target.members if order.source and member in order.source.members}
        whole = survivors <= truth.certified.get(order.handoff_id, set())
        self.held_version = self.cutover_version
        self.held_value = truth.value(self.cutover_version) if whole else -1

    def _hold(self, sources: list[SimRank | None]) -> None:
        living = [rank for rank in sources if rank is not None and rank.alive]
        source = self if self.world is not None else (living[0] if living else None)
        self.held_version = self.cutover_version
        if source is None:
            self.held_value = self.simulation.truth.value(self.cutover_version)  # read before the last source died
        else:
            self.held_value = source.value if source.version == self.cutover_version else -1
        if self.simulation.takes_fault("corrupt", self.member):
            self.held_value ^= 1

    def _certified(self, machine: Cutover) -> None:
        order = self.order
        if not self.alive or order is None or self.cutover is not machine:
            return
        equal = self.held_value == self.simulation.truth.value(self.held_version)
        sim = self.simulation
        if equal:
            sim.truth.certified.setdefault(order.handoff_id, set()).add(self.member)
        # Comparing is voting only for a rank that holds the gradients too: all others vote in a barrier of its own.
        is_vote = equal and order.takes_over and not order.rescues and machine.held is Level.EVERYTHING
        if is_vote and sim.takes_fault("barrier fails", self.member):
            # The others have this rank's part, and it alone sees the collective fail: in time, or just too late.
            sim.barrier(order).count_in(self)
            left_s = machine.next_deadline - sim.clock.now
            why = Reason("the collective failed", "certificate", self.cutover_rank)
            fails_s = sim.random.choice((0.5 * left_s, left_s + 0.015))
            sim.clock.after(fails_s, self.answer, machine, ComparisonFailed(why))
            return
        reason = None if equal else Reason("hashes differ", "certificate", self.cutover_rank, "decoder.layers.0/master")
        self.cutover_event(CertificateCompared(equal, reason))

    def _switch(self, redo: Reason | None) -> None:
        sim, order = self.simulation, self.order
        assert order is not None
        sim.truth.step_after_boundary(self, order.handoff_id, sim.store(order).record, in_target=True)
        self.decision = self.decision_read
        self.version, self.value = self.held_version, self.held_value
        self.world = sim.world_of(order)
        self.belongs_to = order.generation
        self.tag = 0
        self.redoing, self.reason = redo is not None, redo
        if self.redoing:
            self.partial = False
        else:
            self.apply_step(self.world, at_cutover=True)
            self._first_step_done()
        self.world.join(self)

    def _first_step_done(self) -> None:
        assert self.order is not None
        self.simulation.truth.first_steps.setdefault(self.order.handoff_id, set()).add(self.member)
        self.stage = RankStage.ACTIVE
        self.say()

    def _stay(self, reason: Reason, *, redo: bool) -> None:
        sim, order = self.simulation, self.order
        assert order is not None and self.world is not None
        sim.truth.step_after_boundary(self, order.handoff_id, sim.store(order).record, in_target=False)
        self.decision = self.decision_read
        self._drop(reason)
        if redo:
            self.partial = False
        else:
            self.apply_step(self.world, at_cutover=True)
        self.world.join(self)

    def _leave(self, reason: Reason) -> None:
        assert self.order is not None
        self.simulation.truth.left(self, self.order.handoff_id)
        self.decision = self.decision_read
        self.stage = RankStage.LEFT if self.decision.goes else RankStage.ABORTED
        self.reason = reason
        self.say()
        self.exit()


class Barrier:
    """The MIN over the target world of one handoff, or over the survivors; each rank may see it fail on its own."""

    def __init__(self, simulation: Simulation, order: Order) -> None:
        self.simulation = simulation
        self.order = order
        self.levels: dict[Member, Level] = {}
        self.ranks: dict[Member, SimRank] = {}
        self.machines: dict[Member, Cutover | None] = {}
        self.members = voters(order)

    def count_in(self, rank: SimRank) -> None:
        """The part of a rank that holds everything is here, but the result does not reach it."""
        self.levels[rank.member] = Level.EVERYTHING
        self._complete()

    def enter(self, rank: SimRank, level: Level, until: float) -> None:
        if rank.member in self.levels:
            self.simulation.clock.after(0.1, self._timed_out, rank)
            return
        self.levels[rank.member] = level
        self.ranks[rank.member] = rank
        self.machines[rank.member] = rank.cutover
        clock = self.simulation.clock
        clock.after(max(0.0, until - clock.now), self._timed_out, rank)
        self._complete()

    def _complete(self) -> None:
        if len(self.levels) < len(self.members):
            return
        clock, level = self.simulation.clock, min(self.levels.values())
        for peer in self.ranks.values():
            if self.simulation.takes_fault("barrier fails", peer.member):
                clock.after(0.1, self._timed_out, peer)
            else:
                delay_s = 0.01 + 0.2 * self.simulation.random.random()
                if self.order.rung is Rung.RESCUE and self.simulation.chance(0.1):
                    delay_s += 3.0 * self.simulation.random.random()  # It votes through the store, which may be slow.
                clock.after(delay_s, peer.answer, self.machines[peer.member], BarrierPassed(level))

    def _timed_out(self, rank: SimRank) -> None:
        missing = [member for member in self.members if member not in self.levels]
        name = f"{missing[0]} did not come" if missing else "the collective failed"
        event = BarrierFailed(Reason(name, "barrier", rank.cutover_rank))
        rank.answer(self.machines.get(rank.member, rank.cutover), event)
