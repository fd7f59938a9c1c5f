"""Simulated rank processes. What one does between an order and the boundary is decided by the product's `Pending`, and
in the pause by its `Cutover`; this is their host. Pure.

The training state is one number per version (`Truth.value`); what a target reads from a source is that number.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, assert_never

from liver_core.handoff import Cutover, Decision, HandoffId, Order, Reason, Rung
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
from liver_core.handoff.pending import PendingState
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
    PendingEvent,
    Permitted,
    RankEnds,
    Say,
    StreamBegan,
    Warn,
    Withdrawn,
)
from liver_core.handoff.ready_tag import Agreement
from liver_core.layout import Member

if TYPE_CHECKING:
    from tests.simulation.simulation import Simulation
    from tests.simulation.worlds import SimWorld

_BUILDING = (RankStage.PREPARING, RankStage.STREAMING, RankStage.PREPARED, RankStage.READY)
SLOW_DROP_S, POLL_S, IMPORT_S = 4.0, 0.3, 0.3
CUTTING_OVER_DELAY_S = 0.25
RESERVE_S = 4.0
"""What a cutover at the end of a step would take, for whether the step is dropped."""


class SimRank:
    """One process. Its control thread takes commands, its main thread steps or cuts over."""

    def __init__(self, simulation: Simulation, member: Member) -> None:
        self.simulation = simulation
        self.member = member
        self.alive = True
        self.world: SimWorld | None = None
        self.version = 0
        self.value = 1
        self.pending = simulation.machines.pending(member, trains=False)
        self.order: Order | None = None  # of the newest handoff, also when that is over
        self.stage = RankStage.TRAINING  # of that handoff, as reported
        self.reason: Reason | None = None
        self.rung = Rung.STOP_AND_COPY  # how the state truly moves, once all ranks have agreed on it
        self.entering = False
        self.building: list[int] = []  # builds under way, in which it has not seen yet that they are of no use
        self.worlds_dropping = 0
        self.looks_for = (
            0  # the build for which this newcomer waits for the boundary, also when permission is withdrawn
        )
        self.ends = False  # once the next world is dropped
        self.cutover: Cutover | None = None
        self.cutover_rank = 0
        self.cutover_version = 0
        self.found: BoundaryAgreed | None = None  # the boundary that this rank cuts over at
        self.partial = False  # the step was dropped, so that its gradients are not whole
        self.held_version = -1
        self.held_value = -1
        self.decision_read = Decision.UNDECIDED
        self.decision = Decision.UNDECIDED  # of the last handoff, as reported
        self.is_cutting_untold = False
        self.redoing = False
        self.belongs_to = 1  # the generation that its agent takes it for
        self.leased_until = math.inf
        self.commands_until = 0.0
        self.reports_until = 0.0

    def __str__(self) -> str:
        return f"rank on {self.member}"

    @property
    def build_number(self) -> int:
        """Of the newest build."""
        return self.pending.build

    def trains_in(self, world: SimWorld) -> None:
        """This process has had a world from the beginning."""
        self.world = world
        self.pending = self.simulation.machines.pending(self.member, trains=True)

    # Commands of the agent.

    def prepare(self, order: Order) -> None:
        self._hello_now_and_then()
        if self.world is not None and order.generation <= self.world.generation:
            return
        self.simulation.truth.rank_prepares(self, order)
        if self.world is None and not self.entering:
            self.entering, self.order = True, order
            self.simulation.clock.after(IMPORT_S * self.simulation.random.random(), self._enter, order)
        else:
            self.feed(OrderCame(order))

    def _enter(self, order: Order) -> None:
        self.feed(Entered(order))

    def permit(self, handoff_id: HandoffId, plan_revision: int, tag: int) -> None:
        self.feed(Permitted(handoff_id, plan_revision))
        self._look_for_boundary()

    def withdraw(self, handoff_id: HandoffId) -> None:
        self.feed(Withdrawn(handoff_id))

    def abort(self, handoff_id: HandoffId, reason: Reason) -> None:
        self.feed(Aborted(handoff_id, reason))
        if self.world is None:
            self.simulation.clock.after(0.01, self.feed, BetweenSteps())

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

    # The pending handoff.

    def feed(self, event: PendingEvent) -> None:
        """Have the machine take it, and carry out what follows."""
        if not self.alive:
            return
        sim = self.simulation
        before = self.pending.state
        effects = self.pending.handle(event, sim.agents[self.member].now)
        sim.coverage.pending(before, event)
        if self.pending.order is not None:
            self._take_order(self.pending.order)
        for effect in effects:
            self._carry_out_pending(effect)
        for build in [each for each in self.building if self.pending.is_useless(each)]:
            self.building.remove(build)  # It looks now and then whether there is any use in going on.
            sim.clock.after(POLL_S * sim.random.random(), self._end_build, build)

    def _take_order(self, order: Order) -> None:
        held, self.order = self.order, order
        if held is not None and held.handoff_id == order.handoff_id:
            return
        self.reason, self.rung, self.found = None, Rung.STOP_AND_COPY, None
        self.decision = self.decision_read = Decision.UNDECIDED
        self.cutover = None

    def _carry_out_pending(self, effect: PendingEffect) -> None:
        sim = self.simulation
        match effect:
            case BuildWorld(build=build, order=order):
                sim.truth.build_begins(self)
                self.cutover_rank = order.rank_of(self.member)
                self.rung, self.found = Rung.STOP_AND_COPY, None
                self.building.append(build)
                needs_s = sim.connect_s(self.member) if order.rung is Rung.RESCUE else sim.build_s(self.member)
                sim.clock.after(needs_s, self._build_over, build)
            case Amend():
                self.found = None
            case Say(order=order, stage=stage, reason=reason):
                self._say_stage(order, stage, reason)
            case Connect(build=build):
                sim.connecting(self._pending_order()).enter(self, build)
                if self.cutover_rank == 0:
                    sim.connects_now(self._pending_order())
            case CutOver():
                self._begin_cutover()
            case DropWorld(build=build, beside=beside):
                self.worlds_dropping += 1
                slow = beside and sim.chance(0.1)
                sim.clock.after(SLOW_DROP_S * sim.random.random() if slow else 0.0, self._dropped, build)
            case EndNewcomer():
                self.ends = True
                if self.pending.dropping is None:
                    self.exit()
            case Warn(text=text):
                sim.note(f"{self}: {text}")
            case _:
                assert_never(effect)

    def _pending_order(self) -> Order:
        assert self.pending.order is not None
        return self.pending.order

    def _say_stage(self, order: Order, stage: RankStage, reason: Reason | None) -> None:
        if self.order is None or order.handoff_id == self.order.handoff_id:
            self.order, self.stage, self.reason = order, stage, reason
            self.say()
            return
        report = RankReported(order.handoff_id, self.generation, stage, Decision.UNDECIDED, reason, order.plan_revision)
        self.simulation.rank_says(self, report)

    def _end_build(self, build: int) -> None:
        self.feed(BuildFailed(build, Reason("aborted", "prepare", self.cutover_rank)))

    def _build_over(self, build: int) -> None:
        if not self.alive or build not in self.building:
            return
        sim, felt, order = self.simulation, self.cutover_rank, self._pending_order()
        if sim.takes_fault("build fails", self.member):
            self.building.remove(build)
            self.feed(BuildFailed(build, Reason("the build failed", "build", felt)))
        elif order.rung.streams:
            self.feed(StreamBegan(build))
            sim.convergence(order).enter(self)
        else:
            self._built(build, None)

    def streamed(self, verdict: Rung, reason: Reason | None) -> None:
        """All ranks have agreed how the state moves: it is certified, or it is copied at the boundary after all."""
        self.rung = verdict
        self._built(self.pending.build, reason)

    def stream_breaks(self, reason: Reason) -> None:
        """The build fails while the state streams."""
        self.building.remove(self.pending.build)
        self.feed(BuildFailed(self.pending.build, reason))

    def _built(self, build: int, fell: Reason | None) -> None:
        self.building.remove(build)
        sim, order = self.simulation, self._pending_order()
        lacks = sim.plan.connects and order.rung is not Rung.RESCUE
        self.feed(Built(build, BuiltWorld(streams=self.rung.streams, lacks_communicators=lacks, fell=fell)))
        if self.world is None:
            waits_s = order.boundary_by(self.member) - sim.agents[self.member].now
            sim.clock.after(max(0.05, waits_s + 0.01), self._time_is_over, build)

    def _time_is_over(self, build: int) -> None:
        """A newcomer ends by itself when no permission came before the deadline, or no boundary."""
        self.feed(Tick())
        if self.world is None and self.pending.awaits_boundary:
            reason = Reason("no boundary was agreed before the deadline", "ready", self.cutover_rank)
            self.feed(BoundaryMissed(build, reason))

    def _look_for_boundary(self) -> None:
        """A newcomer that has permission looks into the store; of a rescue the boundary may be long past."""
        self.looks_for = self.pending.build if self.pending.awaits_boundary else self.looks_for
        if not self.alive or self.world is not None or self.looks_for != self.pending.build:
            return
        sim, order = self.simulation, self._pending_order()
        boundary = sim.store(order).boundary
        if boundary is not None and sim.store(order).reaches(self):
            sim.clock.after(0.05 + 0.3 * sim.random.random(), self.boundary_found, self.pending.build, boundary)

    def boundary_found(self, build: int, boundary: BoundaryAgreed) -> None:
        """What a newcomer has waited for is in the store."""
        if self.alive and self.world is None and build == self.pending.build and self.cutover is None:
            self.found = boundary
            self.feed(BoundaryFound(build))

    def _dropped(self, build: int) -> None:
        self.worlds_dropping -= 1
        self.feed(Dropped(build))
        if self.ends:
            self.exit()

    # Boundaries.

    @property
    def is_past_boundary(self) -> bool:
        """Whether it cuts over."""
        return self.pending.state is PendingState.CUTTING

    @property
    def connects(self) -> bool:
        """Whether it makes communicators now, and does not train."""
        return self.pending.state is PendingState.CONNECTING

    def connected(self, build: int, problem: Reason | None) -> None:
        """It has made them, or sees that it cannot; the first answer counts."""
        lacks = self.pending.world is not None and self.pending.world.lacks_communicators
        if not self.alive or build != self.pending.build or not lacks or (self.world is not None and not self.connects):
            return
        if self.world is None and problem is not None:
            self.feed(BoundaryMissed(build, problem))
            return
        self.feed(Connected(build, problem))
        if self.world is None:
            self._look_for_boundary()
        else:
            self.maintain()
            self.world.go_on()

    def maintain(self) -> None:
        """Between two steps, or two parts of one."""
        self.feed(BetweenSteps())

    def word(self) -> int:
        return self.pending.show()

    def word_between_parts(self, left_s: float) -> int:
        return self.pending.show_between_parts(left_s + RESERVE_S, self.simulation.agents[self.member].now)

    def boundary_over(self, agreement: Agreement | None, *, dropped: bool) -> None:
        """It learns what all ranks of its world have agreed on."""
        self.found = BoundaryAgreed(self.version, dropped)
        self.feed(BoundaryOver(agreement))

    # A rank that the service starts.

    @property
    def has_lease(self) -> bool:
        """Whether it holds a step lease."""
        return self.simulation.clock.now < self.leased_until

    def begin_training(self, world: SimWorld, version: int) -> None:
        """All ranks of the start have loaded the checkpoint."""
        self.trains_in(world)
        self.version = version
        self.value = self.simulation.truth.value(version)
        self.say()
        world.join(self)

    # What the process says and how it ends.

    @property
    def generation(self) -> int:
        return 0 if self.world is None else self.world.generation

    def say(self) -> None:
        if self.is_cutting_untold:
            self.is_cutting_untold = False
            stage, self.stage = self.stage, RankStage.CUTTING_OVER
            self._say_now()
            self.stage = stage
            if stage is RankStage.CUTTING_OVER:
                return
        self._say_now()

    def _say_now(self) -> None:
        handoff_id = HandoffId("") if self.order is None else self.order.handoff_id
        revision = None if self.order is None else self.order.plan_revision
        self.simulation.rank_says(
            self, RankReported(handoff_id, self.generation, self.stage, self.decision, self.reason, revision)
        )

    def break_down(self, reason: Reason) -> None:
        """The world in which it trains is lost. So is a handoff that is only prepared, or not over."""
        if not self.alive:
            return
        pending = self.pending.order
        if self.pending.state is PendingState.CUTTING or self.redoing:
            self.stage, self.reason = RankStage.BROKEN, reason
            self.say()
        elif pending is not None:
            self._say_stage(pending, RankStage.ABORTED, reason)
        self.feed(RankEnds())
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

    def _begin_cutover(self) -> None:
        sim, order, boundary = self.simulation, self._pending_order(), self.found
        assert boundary is not None
        if self.world is None:
            sim.truth.newcomer_goes(self)
        sim.truth.boundary_passed(self, order, dropped=boundary.dropped)
        self.stage, self.reason = RankStage.CUTTING_OVER, None
        self.cutover_version, self.partial = boundary.version, boundary.dropped
        self.is_cutting_untold = True
        sim.clock.after(CUTTING_OVER_DELAY_S, self._say_cutting_over)
        in_source = order.source is not None and self.member in order.source.members
        if in_source and order.source is not None:
            sim.store(order).version = boundary.version
            if order.source.rank_of(self.member) == 0:
                sim.boundary_posted(order, boundary)
        self.cutover = sim.machines.cutover(
            rank=self.cutover_rank,
            in_source=in_source,
            in_target=self.member in order.target.members,
            deadlines=order.cutover,
            boundary=boundary,
            now=sim.clock.now,
            rescues=order.rung is Rung.RESCUE,
        )
        for effect in self.cutover.begin():
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
        is_vote = equal and not order.rescues and machine.held is Level.EVERYTHING
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
        self.cutover = None
        self.feed(CutoverEnded())
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
        self.cutover = None
        self.feed(CutoverEnded(reason, beside=True))
        if redo:
            self.partial = False
        else:
            self.apply_step(self.world, at_cutover=True)
        self.world.join(self)

    def _leave(self, reason: Reason) -> None:
        assert self.order is not None
        self.simulation.truth.left(self, self.order.handoff_id)
        self.decision = self.decision_read
        if not self.decision.goes:
            self.cutover = None
            self.feed(CutoverEnded(reason))
            self.ends = True
            return
        self.stage, self.reason = RankStage.LEFT, reason
        self.say()
        self.exit()
