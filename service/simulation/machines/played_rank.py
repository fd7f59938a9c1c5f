"""A rank process as its agent sees it: it prepares, shows its tag at boundaries, cuts over by the product's machine.

Pure. Nothing is moved: that a target holds the state follows from who still lives once the time for reading is over.
"""

from typing import assert_never

from liver_core.handoff import (
    BoundaryPhase,
    Cutover,
    Decision,
    HandoffId,
    Order,
    RankStage,
    Reason,
    Rung,
    drop_word,
    pack,
)
from liver_core.handoff.cutover import (
    ApplyStepInSource,
    ApplyStepInTarget,
    BuildTarget,
    CertificateCompared,
    CompareCertificates,
    CutoverEffect,
    CutoverEvent,
    CutoverState,
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
from liver_core.handoff.participant_events import RankReported
from liver_core.handoff.ready_tag import NOTHING_WANTED
from liver_core.layout import Member
from service.simulation.machines.cutover_scene import CutoverScene, Voter
from service.simulation.machines.meeting import Meeting, PlayedWorld

_HELD = (RankStage.PREPARING, RankStage.STREAMING, RankStage.PREPARED, RankStage.READY)
SOON_S = 0.01


class PlayedRank(Voter):
    """One process. `order`: the handoff that it has a part in; `decision`: what it has read of it."""

    def __init__(self, ground: Meeting, member: Member) -> None:
        super().__init__(member)
        self.order: Order | None = None
        self.stage = RankStage.TRAINING
        self.cutover: Cutover | None = None
        self._ground = ground
        self._reason: Reason | None = None
        self._tag = self._builds = 0
        self._early: CutoverScene | None = None

    # What its agent commands.

    def prepare(self, order: Order) -> None:
        """Build the next world beside the running one; what was built for this target already is kept."""
        held = self.order if self.order is not None and self.order.handoff_id == order.handoff_id else None
        if self.stage is RankStage.CUTTING_OVER or (held and held.plan_revision == order.plan_revision):
            return self._say()
        if held and held.target_revision == order.target_revision and self.stage in _HELD:
            self.order, self._tag = order, 0
            return self._say()
        self.order, self.stage, self._tag = order, RankStage.PREPARING, 0
        self._reason, self.decision, self.cutover, self._early = None, Decision.UNDECIDED, None, None
        self._builds += 1
        if order.streams:
            self._ground.time.after(self._ground.times.build_s, self._reach, self._builds, RankStage.STREAMING)
        self._ground.time.after(self._ground.prepared_in_s(order), self._reach, self._builds, RankStage.PREPARED)
        self._say()
        return None

    def _reach(self, build: int, stage: RankStage) -> None:
        if self.alive and build == self._builds and self.stage in (RankStage.PREPARING, RankStage.STREAMING):
            self.stage = stage
            self._say()

    def permit(self, handoff_id: HandoffId, plan_revision: int, tag: int) -> None:
        """Show the tag from the next boundary on."""
        order = self.order
        if order is None or (order.handoff_id, order.plan_revision) != (handoff_id, plan_revision):
            return
        if self.stage is RankStage.PREPARED:
            self._tag, self.stage = tag, RankStage.READY
        self._say()
        if self.stage is RankStage.READY and self._early is not None:
            self.begin_cutover(self._early)
        self._ground.look_for_boundary()

    def withdraw(self, handoff_id: HandoffId) -> None:
        """Take the tag back, unless the boundary was first."""
        if self.order is not None and self.order.handoff_id == handoff_id and self.stage is RankStage.READY:
            self._tag, self.stage = 0, RankStage.PREPARED
        self._say()

    def abort(self, handoff_id: HandoffId, reason: Reason) -> None:
        """Drop what was prepared, unless the boundary was first."""
        if self.order is None or self.order.handoff_id != handoff_id:
            self._ground.rank_said(self, RankReported(handoff_id, self._generation, RankStage.ABORTED, reason=reason))
        elif self.stage in _HELD:
            self._drop(reason)
        else:
            self._say()

    def retire(self, handoff_id: HandoffId) -> None:
        """What the older world held is freed: from now on it just trains."""
        if self.order is not None and self.order.handoff_id == handoff_id and self.stage is RankStage.ACTIVE:
            self.order, self.cutover, self.stage = None, None, RankStage.TRAINING

    def _say(self) -> None:
        handoff_id = HandoffId("") if self.order is None else self.order.handoff_id
        revision = None if self.order is None else self.order.plan_revision
        said = RankReported(handoff_id, self._generation, self.stage, self.decision, self._reason, revision)
        self._ground.rank_said(self, said)

    @property
    def _generation(self) -> int:
        return 0 if self.world is None else self.world.roster.generation

    @property
    def cutover_is_over(self) -> bool:
        """Whether it waits for nothing in a cutover: what was decided is known."""
        machine = self.cutover
        return machine is None or machine.state in (CutoverState.DECIDED, CutoverState.FELL)

    def word(self, *, between_parts: bool) -> int:
        """What it shows to the others of its world."""
        shown = pack(self._tag, BoundaryPhase.READY) if self._tag else NOTHING_WANTED
        if not between_parts:
            return shown
        drops = self.order is not None and self.order.rung is Rung.DROP_STEP
        return drop_word(shown) if drops else NOTHING_WANTED

    # How it ends.

    def _drop(self, reason: Reason) -> None:
        self.stage, self._tag, self.cutover, self._reason = RankStage.ABORTED, 0, None, reason
        self._builds += 1
        self._say()
        if self.world is None:
            self.exit()

    def break_down(self, reason: Reason) -> None:
        """It cannot go on in any world."""
        if self.alive:
            self.stage, self._reason = RankStage.BROKEN, reason
            self._say()
            self._ground.rank_failed(self, reason)
            self.exit()

    def exit(self) -> None:
        """The process ends by itself, or its agent ends it."""
        if self.alive:
            self.alive, self.world = False, None
            self._ground.rank_exited(self)

    # The cutover.

    def begin_cutover(self, scene: CutoverScene) -> None:
        """The boundary was agreed; a newcomer goes once its own permission has come."""
        order = self.order
        if not self.alive or order is None or order.handoff_id != scene.order.handoff_id:
            return
        if self.stage is not RankStage.READY:
            self._early = scene if self.stage in _HELD else None
            return
        self.stage, self._reason = RankStage.CUTTING_OVER, None
        self._say()
        now = self._ground.time.now
        self.cutover = Cutover(
            rank=order.rank_of(self.member),
            in_source=order.source is not None and self.member in order.source.members,
            in_target=self.member in order.target.members,
            deadlines=order.cutover,
            boundary=scene.boundary,
            now=now,
            rescues=order.rescues,
        )
        self._carry_out(scene, self.cutover.begin())

    def answer(self, scene: CutoverScene, machine: Cutover, event: CutoverEvent) -> None:
        """What `machine` asked for; one that was given up hears nothing any more."""
        if self.alive and machine is self.cutover:
            self._carry_out(scene, machine.handle(event, self._ground.time.now))

    def _tick(self, scene: CutoverScene, machine: Cutover) -> None:
        if self._ground.time.now >= machine.next_deadline:
            self.answer(scene, machine, Tick())

    def _carry_out(self, scene: CutoverScene, effects: tuple[CutoverEffect, ...]) -> None:
        machine = self.cutover
        assert machine is not None
        for effect in effects:
            self._do(scene, machine, effect)
        if machine.next_deadline < float("inf"):
            self._ground.time.at(machine.next_deadline + SOON_S, self._tick, scene, machine)

    def _do(self, scene: CutoverScene, machine: Cutover, effect: CutoverEffect) -> None:
        time = self._ground.time
        match effect:
            case ReadState():
                time.after(scene.read_s if machine.in_target else 0.0, self._have_read, scene, machine)
            case CompareCertificates():
                time.after(0.0, self.answer, scene, machine, CertificateCompared(equal=True))
            case EnterBarrier(level=level, until=until):
                scene.enter_barrier(self, machine, level, until)
            case ProposeDecision(wish=wish):
                scene.ask(self, machine, wish)
            case ReadDecision(not_before=not_before):
                time.at(not_before, scene.ask, self, machine, Decision.UNDECIDED)
            case BuildTarget(until=until):
                scene.build(self, machine, until)
            case ApplyStepInTarget() | RedoBatchInTarget():
                scene.switch(self, again=isinstance(effect, RedoBatchInTarget))
            case ApplyStepInSource(reason=reason) | RedoBatchInSource(reason=reason):
                self._drop(reason)
                scene.stay(self)
            case Leave(reason=reason):
                self.stage = RankStage.LEFT if self.decision.goes else RankStage.ABORTED
                self._reason = reason
                self._say()
                self.exit()
            case FallToCheckpoint(reason=reason):
                self.break_down(reason)
            case _:
                assert_never(effect)

    def _have_read(self, scene: CutoverScene, machine: Cutover) -> None:
        """What the reads gave depends on which sources live. What has streamed in needs none any more: only the last
        gradients do."""
        order, is_whole = scene.order, scene.sources_live()
        reason = None if is_whole else Reason("a source is gone", "read", machine.rank)
        if not machine.in_target:
            read = StateRead(Level.EVERYTHING)
        elif order.rescues:
            read = StateRead(Level.STATE if is_whole else Level.NOTHING, source_lost=not is_whole, reason=reason)
        elif not is_whole:
            read = StateRead(Level.STATE if order.streams else Level.NOTHING, source_lost=True, reason=reason)
        else:
            read = StateRead(Level.STATE if scene.boundary.dropped else Level.EVERYTHING)
        self.answer(scene, machine, read)

    def step_in(self, world: PlayedWorld) -> None:
        """Its first step in `world` is done: of a handoff, or of a start."""
        self.world, self._tag = world, 0
        if self.order is not None:
            self.stage = RankStage.ACTIVE
        self._say()
