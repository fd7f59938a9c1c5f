"""A simulated rank in the pause: the host of the product's `Cutover`. Pure.

The training state is one number per version (`SimulatedWorld.value`); what a target reads from a source is that number.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Sequence
from typing import assert_never

from liver_core.handoff import Cutover, Decision, FailedPart, FailureCause, Order, RankStage, Reason, Rung
from liver_core.handoff.cutover import (
    ApplyStepInSource,
    ApplyStepInTarget,
    BoundaryAgreed,
    BuildTarget,
    CertificateCompared,
    CompareCertificates,
    ComparisonFailed,
    CutoverEffect,
    CutoverEvent,
    CutoverState,
    DecisionRead,
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
from liver_core.handoff.pending_events import CutoverEnded, PendingEvent
from liver_core.layout import Member
from service.simulation.world.observer import attempt_of
from service.simulation.world.parts import RankInPause, World
from service.simulation.world.whole import Whole

CUTTING_OVER_DELAY_S = 0.25
_FELT = FailureCause(FailedPart.PEER)
FEELS_NOTHING = 0.4
"""Share of ranks that have no connection to the one that is gone."""


class CuttingRank:
    """One process, as far as it cuts over. `version`, `value`: its training state; `held_version`, `held_value`: what
    it holds for the next world, -1 where nothing. `partial`: the step was dropped, so that gradients are not whole."""

    def __init__(self, simulation: Whole, member: Member) -> None:
        self.simulation = simulation
        self.member = member
        self.alive = True
        self.world: World | None = None
        self.version = 0
        self.value = 1
        self.order: Order | None = None  # of the newest handoff, also when that is over
        self.stage = RankStage.TRAINING  # of that handoff, as reported
        self.reason: Reason | None = None
        self.rung = Rung.STOP_AND_COPY  # how the state truly moves, once all ranks have agreed on it
        self.ends = False  # once the next world is dropped
        self.cutover: Cutover | None = None
        self.cutover_rank = 0
        self.cutover_version = 0
        self.found: BoundaryAgreed | None = None  # the boundary that this rank cuts over at
        self.partial = False
        self.held_version = -1
        self.held_value = -1
        self.decision_read = Decision.UNDECIDED
        self.decision = Decision.UNDECIDED  # of the last handoff, as reported
        self.is_cutting_untold = False
        self.redoing = False
        self.belongs_to = 1  # the generation that its agent takes it for
        self.told_dead: set[tuple[int, Member]] = set()  # of which worlds agents have said so
        self._read_until = 0.0
        self.waits_for_dead: Cutover | None = None  # the cutover in which it reads from somebody who is gone

    @abstractmethod
    def feed(self, event: PendingEvent) -> None:
        """Have the pending machine take it."""

    @abstractmethod
    def say(self) -> None:
        """Tell the agent where it stands."""

    @abstractmethod
    def exit(self, reason: Reason | None = None) -> None:
        """The process ends."""

    @abstractmethod
    def break_down(self, reason: Reason) -> None:
        """It can go on in no world."""

    @abstractmethod
    def apply_step(self, world: World, *, at_cutover: bool = False) -> None:
        """One optimizer step in `world`."""

    @abstractmethod
    def newcomer_goes(self) -> None:
        """It is about to cut over to its first world."""

    @abstractmethod
    def goes_on(self) -> None:
        """It joins the others of its world again."""

    @abstractmethod
    def pending_order(self) -> Order:
        """Of the handoff that it has a part in."""

    # The cutover.

    def begin_cutover(self) -> None:
        sim, order, boundary = self.simulation, self.pending_order(), self.found
        assert boundary is not None
        if self.world is None:
            self.newcomer_goes()
        sim.observer.boundary_passed(self, order, dropped=boundary.dropped)
        self.stage, self.reason = RankStage.CUTTING_OVER, None
        self.cutover_version, self.partial = boundary.version, boundary.dropped
        self.is_cutting_untold = True
        sim.clock.after(CUTTING_OVER_DELAY_S, self._say_cutting_over)
        in_source = order.source is not None and self.member in order.source.members
        if in_source and order.source is not None:
            sim.store(order).version = boundary.version
            if order.source.rank_of(self.member) == 0:
                sim.boundary_posted(order, boundary)
        machine = self.cutover = sim.machines.cutover(
            rank=self.cutover_rank,
            in_source=in_source,
            in_target=self.member in order.target.members,
            deadlines=order.cutover,
            boundary=boundary,
            now=sim.clock.now,
            rescues=order.rung is Rung.RESCUE,
        )
        for effect in machine.begin():
            self._carry_out(effect)
        self.cutover_tick_later()

    def _say_cutting_over(self) -> None:
        """As in the product, it is told late, or just before whatever else is told."""
        if self.alive and self.is_cutting_untold:
            self.say()

    def answer(self, machine: Cutover | None, event: CutoverEvent) -> None:
        """What `machine` asked for; an answer to the machine of an older handoff finds nobody."""
        if machine is self.cutover:
            self.cutover_event(event)

    def cutover_event(self, event: CutoverEvent) -> None:
        if not self.alive or self.cutover is None:
            return
        if isinstance(event, DecisionRead):
            self.decision_read = event.decision
        machine = self.cutover
        before = machine.state
        effects = machine.handle(event, self.simulation.clock.now)
        self.simulation.observer.cutover(before, event)
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
                self._read_until = until
                clock.after(sim.conditions.read_s(self, until), self._read_done, self.cutover)
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
                self._goes(None)
            case RedoBatchInTarget(reason=reason):
                self._goes(reason)
            case ApplyStepInSource(reason=reason) | RedoBatchInSource(reason=reason):
                self._stay(reason, redo=isinstance(effect, RedoBatchInSource))
            case Leave(reason=reason):
                self._leave(reason)
            case FallToCheckpoint(reason=reason):
                sim.observer.fell(self, order)
                self.break_down(reason)
            case _:
                assert_never(effect)

    def _read_done(self, machine: Cutover | None) -> None:
        """The reads are over: what they gave depends on which sources were still there."""
        sim, order = self.simulation, self.order
        if not self.alive or order is None or machine is None or self.cutover is not machine:
            return
        if machine.state is not CutoverState.READING:
            return  # It has waited for somebody who was dead, and was told so.
        assert order.source is not None
        if self.member not in order.target.members:
            self.cutover_event(StateRead(Level.EVERYTHING))
            return
        sources = [sim.agents[member].rank for member in order.source.members]
        if self._does_not_feel(order, machine):
            return
        if order.rung is Rung.RESCUE:
            self._rescue(order, sources)
            return
        lost = next((rank for rank in sources if rank is None or not rank.alive), None)
        if any(rank is None or not rank.alive for rank in sources):
            name = "a source" if lost is None else str(lost)
            reason = Reason(f"{name} is gone", "read", self.cutover_rank, cause=_FELT)
            # What has streamed in needs no source any more; only the last gradients do.
            level = Level.NOTHING if not self.rung.streams and sim.conditions.chance(0.4) else Level.STATE
            if level is Level.STATE:
                self._hold(sources)
            self.cutover_event(StateRead(level, source_lost=True, reason=reason))
            return
        self._hold(sources)
        if sim.conditions.takes_fault("gradients late", self.member):
            self.cutover_event(StateRead(Level.STATE, reason=Reason("gradients late", "read", self.cutover_rank)))
            return
        self.cutover_event(StateRead(Level.STATE if self.partial else Level.EVERYTHING))

    def stop_waiting_for_dead(self) -> bool:
        """It is told who is gone. Whether it has waited for that."""
        machine = self.cutover
        if machine is None or self.waits_for_dead is not machine or machine.state is not CutoverState.READING:
            return False
        self._read_done(machine)
        return True

    def knows_dead(self, members: Iterable[Member]) -> bool:
        """Whether it has been told of all of these, in the worlds of its handoff."""
        order = self.order
        worlds = () if order is None else (order.parent, order.generation)
        return all(any((world, member) in self.told_dead for world in worlds) for member in members)

    def in_barrier_without(self, dead: Member) -> bool:
        """The same of the others' vote, where `dead` has not voted."""
        machine = self.cutover
        if machine is None or machine.state is not CutoverState.VOTED or self.order is None:
            return False
        self.simulation.barrier(self.order).hear_of_death(self, dead)
        return True

    def _does_not_feel(self, order: Order, machine: Cutover) -> bool:
        """Whether it goes on waiting for somebody who is gone: until it is told, or until its reads must end. Who reads
        from the dead rank over a connection feels that it is gone, some others do not."""
        sim = self.simulation
        assert order.source is not None
        gone = [member for member in order.source.members if sim.is_gone(member)]
        if not gone or self.waits_for_dead is machine or self.knows_dead(gone):
            return False
        if not sim.conditions.chance(FEELS_NOTHING):
            return False
        self.waits_for_dead = machine
        sim.clock.after(max(0.0, self._read_until - sim.clock.now - 0.1), self._read_done, machine)
        return True

    def _rescue(self, order: Order, sources: Sequence[RankInPause | None]) -> None:
        """A survivor has read its share of what only leavers hold; when one of them died, before or after that."""
        lost = any(rank is None or not rank.alive for rank in sources)
        late = self.simulation.conditions.takes_fault("gradients late", self.member)
        if late or (lost and self.simulation.draw() < 0.5):
            reason = Reason("a leaver is gone", "read", self.cutover_rank, cause=_FELT)
            self.cutover_event(StateRead(Level.NOTHING, source_lost=lost, reason=reason))
            return
        self._hold(sources)
        self.cutover_event(StateRead(Level.STATE))

    def take_what_survivors_hold(self, order: Order) -> None:
        """After a rescue: masters and moments of all survivors, and of the leavers as far as survivors have them."""
        survivors = {member for member in order.target.members if order.source and member in order.source.members}
        whole = survivors <= self.simulation.certified.get(attempt_of(order), set())
        self.held_version = self.cutover_version
        self.held_value = self.simulation.value(self.cutover_version) if whole else -1

    def _hold(self, sources: Sequence[RankInPause | None]) -> None:
        living = [rank for rank in sources if rank is not None and rank.alive]
        source = self if self.world is not None else (living[0] if living else None)
        self.held_version = self.cutover_version
        if source is None:
            self.held_value = self.simulation.value(self.cutover_version)  # read before the last source died
        else:
            self.held_value = source.value if source.version == self.cutover_version else -1
        if self.simulation.conditions.takes_fault("corrupt", self.member):
            self.held_value ^= 1

    def _certified(self, machine: Cutover | None) -> None:
        order = self.order
        if not self.alive or order is None or machine is None or self.cutover is not machine:
            return
        equal = self.held_value == self.simulation.value(self.held_version)
        sim = self.simulation
        if equal:
            sim.certified.setdefault(attempt_of(order), set()).add(self.member)
        # Comparing is voting only for a rank that holds the gradients too: all others vote in a barrier of its own.
        is_vote = equal and not order.rescues and machine.held is Level.EVERYTHING
        if is_vote and sim.conditions.takes_fault("barrier fails", self.member):
            # The others have this rank's part, and it alone sees the collective fail: in time, or just too late.
            sim.barrier(order).count_in(self)
            left_s = machine.next_deadline - sim.clock.now
            why = Reason("the collective failed", "certificate", self.cutover_rank)
            fails_s = 0.5 * left_s if sim.draw() < 0.5 else left_s + 0.015
            sim.clock.after(fails_s, self.answer, machine, ComparisonFailed(why))
            return
        reason = None if equal else Reason("hashes differ", "certificate", self.cutover_rank, "decoder.layers.0/master")
        self.cutover_event(CertificateCompared(equal, reason))

    def _goes(self, redo: Reason | None) -> None:
        sim, order = self.simulation, self.order
        assert order is not None
        sim.observer.goes(self, order, again=redo is not None)
        if (after_s := sim.conditions.switch_s(self)) > 0:
            sim.clock.after(after_s, self._switch_later, self.cutover, redo)
        else:
            self._switch(redo)

    def _switch_later(self, machine: Cutover | None, redo: Reason | None) -> None:
        if self.alive and machine is self.cutover:
            self._switch(redo)

    @property
    def waits_to_switch(self) -> bool:
        """Whether it knows that it goes, and has not made its first step in the next world."""
        machine = self.cutover
        return self.alive and machine is not None and machine.state is CutoverState.DECIDED and self.decision_read.goes

    def _switch(self, redo: Reason | None) -> None:
        sim, order = self.simulation, self.order
        assert order is not None
        sim.observer.step_after_boundary(self, order.handoff_id, sim.store(order).record, in_target=True)
        self.decision = self.decision_read
        self.version, self.value = self.held_version, self.held_value
        self.world = sim.world_of(order)
        self.belongs_to = order.generation
        self.cutover = None
        self.feed(CutoverEnded())
        self.redoing, self.reason = redo is not None, redo
        if self.redoing:
            self.partial = False
        else:
            self.apply_step(self.world, at_cutover=True)
            self._first_step_done()
        self.goes_on()

    def _first_step_done(self) -> None:
        assert self.order is not None
        self.simulation.observer.first_step(self, self.order)
        self.stage = RankStage.ACTIVE
        self.say()

    def _stay(self, reason: Reason, *, redo: bool) -> None:
        sim, order = self.simulation, self.order
        assert order is not None and self.world is not None
        sim.observer.step_after_boundary(self, order.handoff_id, sim.store(order).record, in_target=False)
        self.decision = self.decision_read
        self.cutover = None
        self.feed(CutoverEnded(reason, beside=True))
        if redo:
            self.partial = False
        else:
            self.apply_step(self.world, at_cutover=True)
        self.goes_on()

    def _leave(self, reason: Reason) -> None:
        assert self.order is not None
        self.simulation.observer.left(self, self.order.handoff_id)
        self.decision = self.decision_read
        if not self.decision.goes:
            self.cutover = None
            self.feed(CutoverEnded(reason))
            self.ends = True
            return
        self.stage, self.reason = RankStage.LEFT, reason
        self.say()
        self.exit()
