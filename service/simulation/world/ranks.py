"""Simulated rank processes. What one does between an order and the boundary is decided by the product's `Pending`, and
in the pause by its `Cutover`; this is their host. Pure.

The training state is one number per version (`Truth.value`); what a target reads from a source is that number.
"""

from __future__ import annotations

import math
from typing import assert_never

from liver_core.handoff import Decision, FailedPart, FailureCause, HandoffId, Order, Reason, Rung
from liver_core.handoff.cutover import (
    BoundaryAgreed,
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
from service.simulation.world.observer import attempt_of
from service.simulation.world.parts import World
from service.simulation.world.rank_cutover import CuttingRank
from service.simulation.world.whole import Whole

_BUILDING = (RankStage.PREPARING, RankStage.STREAMING, RankStage.PREPARED, RankStage.READY)
SLOW_DROP_S, POLL_S, IMPORT_S = 4.0, 0.3, 0.3
CUTTING_OVER_DELAY_S = 0.25
RESERVE_S = 4.0
"""What a cutover at the end of a step would take, for whether the step is dropped."""


class SimRank(CuttingRank):
    """One process. Its control thread takes commands, its main thread steps or cuts over."""

    def __init__(self, simulation: Whole, member: Member) -> None:
        super().__init__(simulation, member)
        self.pending = simulation.machines.pending(member, trains=False)
        self.entering = False
        self.building: list[int] = []  # builds under way, in which it has not seen yet that they are of no use
        self.worlds_dropping = 0
        self.looks_for = 0  # the build for which this newcomer waits for the boundary, also without permission
        self.leased_until = math.inf
        self.is_condemned = False  # its agent ends it
        self.ends_after_step = False
        self.commands_until = 0.0
        self.reports_until = 0.0

    def __str__(self) -> str:
        return f"rank on {self.member}"

    @property
    def build_number(self) -> int:
        """Of the newest build."""
        return self.pending.build

    def trains_in(self, world: World) -> None:
        """This process has had a world from the beginning."""
        self.world = world
        self.pending = self.simulation.machines.pending(self.member, trains=True)

    # Commands of the agent.

    def prepare(self, order: Order) -> None:
        self._hello_now_and_then()
        if self.world is not None and order.generation <= self.world.generation:
            return
        self.simulation.observer.rank_prepares(self, order)
        if self.world is None and not self.entering:
            self.entering, self.order = True, order
            self.simulation.clock.after(IMPORT_S * self.simulation.draw(), self._enter, order)
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
        if self.simulation.conditions.chance(0.05):
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
        slow_s = 2.0 * self.simulation.draw() if self.simulation.conditions.chance(0.3) else 0.0
        self.simulation.clock.after(slow_s, self.exit)

    def end_after_step(self) -> None:
        """End with the others of its world, at a boundary that all are to end at; without a world at once."""
        self.ends_after_step = True
        if self.world is None:
            self.exit(Reason("it was told to end", "supervise", self.cutover_rank))
        else:
            self.world.look()

    def status(self) -> None:
        """An answer may be the stage of the last handoff, or just that the rank trains when that one is over."""
        just_trains = self.simulation.draw() < 0.5
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
        sim.observer.pending(before, event)
        if self.pending.order is not None:
            self._take_order(self.pending.order)
        for effect in effects:
            self._carry_out_pending(effect)
        if self.world is not None and not isinstance(event, BetweenSteps | BoundaryOver):
            self.world.look()
        for build in [each for each in self.building if self.pending.is_useless(each)]:
            self.building.remove(build)  # It looks now and then whether there is any use in going on.
            sim.clock.after(POLL_S * sim.draw(), self._end_build, build)

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
                sim.observer.build_begins(self)
                self.cutover_rank = order.rank_of(self.member)
                self.rung, self.found = Rung.STOP_AND_COPY, None
                self.building.append(build)
                takes_s = sim.conditions.connect_s if order.rung is Rung.RESCUE else sim.conditions.build_s
                sim.clock.after(takes_s(self.member), self._build_over, build)
            case Amend():
                self.found = None
            case Say(order=order, stage=stage, reason=reason):
                self._say_stage(order, stage, reason)
            case Connect(build=build):
                sim.connecting(self.pending_order()).enter(self, build)
                if self.cutover_rank == 0:
                    sim.connects_now(self.pending_order())
            case CutOver():
                self.begin_cutover()
            case DropWorld(build=build, beside=beside):
                self.worlds_dropping += 1
                slow = beside and sim.conditions.chance(0.1)
                sim.clock.after(SLOW_DROP_S * sim.draw() if slow else 0.0, self._dropped, build)
            case EndNewcomer():
                self.ends = True
                if self.pending.dropping is None:
                    self.exit()
            case Warn(text=text):
                sim.note(f"{self}: {text}")
            case _:
                assert_never(effect)

    def pending_order(self) -> Order:
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
        sim, felt, order = self.simulation, self.cutover_rank, self.pending_order()
        if sim.conditions.takes_fault("build fails", self.member):
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
        sim, order = self.simulation, self.pending_order()
        lacks = sim.conditions.connects and order.rung is not Rung.RESCUE
        self.feed(Built(build, BuiltWorld(streams=self.rung.streams, lacks_communicators=lacks, fell=fell)))
        if self.world is None:
            waits_s = order.boundary_by(self.member) - sim.agents[self.member].now
            sim.clock.after(max(0.05, waits_s + 0.01), self._time_is_over, build)

    def _time_is_over(self, build: int) -> None:
        """A newcomer ends by itself when no permission came before the deadline, or no boundary."""
        self.feed(Tick())
        if self.world is None and self.pending.awaits_boundary:
            text, peer = "no boundary was agreed before the deadline", FailureCause(FailedPart.PEER)
            reason = Reason(text, "ready", self.cutover_rank, cause=peer)
            self.feed(BoundaryMissed(build, reason))

    def _look_for_boundary(self) -> None:
        """A newcomer that has permission looks into the store; of a rescue the boundary may be long past."""
        self.looks_for = self.pending.build if self.pending.awaits_boundary else self.looks_for
        if (
            not self.alive
            or self.world is not None
            or self.looks_for != self.pending.build
            or self.pending.order is None
        ):
            return
        sim, order = self.simulation, self.pending_order()
        boundary = sim.store(order).boundary
        if boundary is not None and sim.store(order).reaches(self):
            sim.clock.after(0.05 + 0.3 * sim.draw(), self.boundary_found, self.pending.build, boundary)

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

    def hear_of_death(self, generation: int, member: Member) -> None:
        """An agent has seen that a rank of this world is dead: whatever waits for it here waits no more."""
        self.told_dead.add((generation, member))
        if not self.alive or self.stop_waiting_for_dead() or self.in_barrier_without(member):
            return
        if self.world is not None and self.world.generation == generation:
            self.world.hear_of_death(self, member)

    # A rank that the service starts.

    @property
    def has_lease(self) -> bool:
        """Whether it holds a step lease."""
        return self.simulation.clock.now < self.leased_until

    def begin_training(self, world: World, version: int) -> None:
        """All ranks of the start have loaded the checkpoint."""
        self.trains_in(world)
        self.version = version
        self.value = self.simulation.value(version)
        self.say()
        world.join(self)

    def newcomer_goes(self) -> None:
        """It is about to cut over to its first world."""
        self.simulation.observer.newcomer_goes(self)

    def goes_on(self) -> None:
        """It joins the others of its world again."""
        if self.world is not None:
            self.world.join(self)

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
        self.exit(reason)

    def exit(self, reason: Reason | None = None) -> None:
        """The process ends. Without a `reason` something else has killed it, or its agent did."""
        if self.alive:
            self.alive, world, self.world = False, self.world, None
            if world is not None:
                world.misses_rank()
            self.simulation.rank_exited(self, reason)

    def holds(self, handoff_id: str, generation: int) -> bool:
        """Whether anything of this handoff is still prepared or undecided here."""
        held = self.stage in (*_BUILDING, RankStage.CUTTING_OVER)
        return held and self.order is not None and attempt_of(self.order) == (handoff_id, generation)

    def made_steps(self, count: int) -> None:
        """So many in its world, counted by time."""
        is_right = self.value == self.simulation.value(self.version)
        self.version += count
        self.value = self.simulation.value(self.version) if is_right else -1

    def apply_step(self, world: World, *, at_cutover: bool = False) -> None:
        """One optimizer step in `world`. One that is handed over needs no step lease."""
        self.simulation.observer.gradients_whole(self)
        self.version += 1
        self.value = self.simulation.value(self.version) if self.value == self._right() else -1
        self.simulation.observer.step_applied(self, world, at_cutover=at_cutover)
        world.is_begun = True
        if self.redoing:
            self.redoing = False
            self._first_step_done()

    def _right(self) -> int:
        return self.simulation.value(self.version - 1)
