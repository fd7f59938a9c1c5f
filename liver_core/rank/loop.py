"""The training loop of one rank: steps, boundaries, and the switch from one world to the next.

Worlds change only in the main thread, at a boundary. Commands come from another thread and only store requests in a
`BoundaryRequests`. Preparation runs in a thread of its own; its result waits for the next boundary.
"""

from __future__ import annotations

import logging
import statistics
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from liver_core.device.moments import Moment, moment
from liver_core.device.rank_device import own_device
from liver_core.handoff.cutover import (
    ApplyStepInSource,
    ApplyStepInTarget,
    BoundaryAgreed,
    Cutover,
    FallToCheckpoint,
    Leave,
    RedoBatchInSource,
    RedoBatchInTarget,
)
from liver_core.handoff.messages import Decision, Order, RankStage, Reason
from liver_core.layout import Member
from liver_core.rank.active_world import ActiveWorld, Timings
from liver_core.rank.after_step import AfterStep, CheckpointPlan, Ended, Ending, check_finite
from liver_core.rank.boundary_requests import BoundaryRequests
from liver_core.rank.checkpoint_writer import CheckpointWriter
from liver_core.rank.cutover.cutover_run import CutoverRun, Outcome, Probe
from liver_core.rank.droppable_step import DropRule, StepPlace, do_step
from liver_core.rank.metrics.step_metrics import StepMeasures, StepMetrics, measures_before
from liver_core.rank.next_world import COLLECT_AFTER_S, NextWorld
from liver_core.rank.pending_handoff import NoPartInHandoff, PendingHandoff
from liver_core.rank.prepare.memory_plan import take_place
from liver_core.rank.prepare.preparation import Preparation
from liver_core.rank.prepare.prepare_settings import PrepareSettings
from liver_core.rank.reporter import Listener, StageReporter
from liver_core.rank.rescue.rescue_preparation import RescuePreparation
from liver_core.rank.rescue.rescue_run import RescueRun
from liver_core.rank.retire import Retirement
from liver_core.rank.step_boundary import StepTotals, agree, meet, read_numbers, start_total
from liver_core.rank.step_lease import await_lease
from liver_core.rank.store_exchange import cause_of
from liver_core.state.megatron_optimizer import GRAD, settle_moments
from liver_core.state.optimizer_step import apply_step, refresh_weights, release_gradients, start_norm
from liver_core.state.small_state import TrainingProgress, collect, install, reseed
from liver_core.steady_clock import PROCESS_CLOCK
from liver_core.training.cursor import DataCursor, chained, digest_part
from liver_core.training.job import TrainingJob
from liver_core.worlds.groups import plainly
from liver_core.worlds.megatron import activate
from liver_core.worlds.peer_deaths import PeerDeath, PeerDeaths

if TYPE_CHECKING:
    from liver_core.rank.metrics.event_files import EventFiles

_log = logging.getLogger(__name__)


class RankLoop:
    """One rank process of one job. Call `run` in the main thread, and the command methods from any other, those of
    `requests` too."""

    def __init__(
        self,
        job: TrainingJob,
        member: Member,
        settings: PrepareSettings,
        listener: Listener,
        *,
        last_step: int | None = None,
        checkpoints: CheckpointPlan | None = None,
        drop_rule: DropRule | None = None,
        stops_at_nonfinite: bool = True,
        validate_every: int | None = None,
        event_files: EventFiles | None = None,
        probe: Probe = lambda point: None,
    ) -> None:
        """`stops_at_nonfinite`: end as FAILED before a step whose loss or gradient norm is not finite is applied.

        Raises ValueError if `drop_rule` is set but the job's steps cannot be dropped, or `validate_every` but the job
        has no validation."""
        if drop_rule is not None:
            drop_rule.check(job)
        self.job = job
        self.member = member
        self.settings = settings
        self.listener = listener
        self.drop_rule = drop_rule
        self.stops_at_nonfinite = stops_at_nonfinite
        self.probe = probe
        self.requests = BoundaryRequests()
        self.deaths = PeerDeaths()
        self.active: ActiveWorld | None = None
        self.retirement: Retirement | None = None
        self.progress = TrainingProgress(0, DataCursor(0, job.global_batch, job.micro_batch), 0)
        self.timings = Timings()
        self.checkpoints = CheckpointWriter(listener.checkpointed, listener.checkpoint_failed, self.requests.standing)
        self.metrics = StepMetrics(job, listener, event_files)
        self.after_step = AfterStep(
            job,
            self.requests,
            self.checkpoints,
            self.metrics,
            rule=checkpoints,
            last_step=last_step,
            validate_every=validate_every,
        )
        self._reporter = StageReporter(listener)
        self._stage = self._reporter.stage
        self.pending = PendingHandoff(member, self.requests, self._reporter, self._preparation, self.deaths)
        self.decided: tuple[str, Decision] = ("", Decision.UNDECIDED)
        self._switched = False
        self._step_began = 0.0
        self._certificate = ""
        self._redone: Reason | None = None
        self._phase = "start"

    @property
    def handoff_id(self) -> str | None:
        """The handoff that this rank prepares, waits for, cuts over, drops, or keeps the old world for."""
        pending, retirement = self.pending.handoff_id, self.retirement
        return pending if pending is not None or retirement is None else retirement.handoff_id

    @property
    def following(self) -> NextWorld | None:
        """The next world, once it is built."""
        return self.pending.following

    @property
    def preparation(self) -> Preparation | None:
        """The preparation that builds the next world, or has built it."""
        return self.pending.preparation

    # Commands, from any thread.

    def prepare(self, request: Order) -> None:
        """Begin to build the next world, or accept a newer plan revision. Repeated or old orders change nothing."""
        if self.active is None or request.generation > self.active.world.generation:
            self.pending.prepare(request)

    def permit(self, handoff_id: str, plan_revision: int) -> None:
        """Show the ready tag from the next boundary on."""
        self.pending.permit(handoff_id, plan_revision)

    def withdraw(self, handoff_id: str) -> None:
        """Stop showing the ready tag. Has no effect if the boundary was agreed first."""
        self.pending.withdraw(handoff_id)

    def abort(self, handoff_id: str, reason: Reason) -> None:
        """Drop the next world. Has no effect if the boundary was agreed first."""
        self.pending.abort(handoff_id, reason)

    def peer_died(self, death: PeerDeath) -> None:
        """An agent says that a rank of one of this rank's worlds is dead: end what waits for it on the device."""
        self.deaths.note(death, ())  # Known before the worlds are looked up: one that is made after that is checked.
        pending = self.pending.worlds()  # First: the next world is the active one before it is pending no more.
        self.deaths.note(death, (*pending, *(() if self.active is None else (self.active.world,))))

    # The main thread.

    def run(self, first: Order) -> Ended:
        """Join the world of `first`, then train until there is no more work. Returns how it ended."""
        try:
            self._enter(first)
            while True:
                self._step()
        except Ended as ended:
            self.after_step.close()
            return ended
        except RuntimeError as error:  # Of torch, if a peer is gone or late. This world cannot do another step.
            _log.exception("the rank of %s cannot continue: error in phase %s", self.member, self._phase)
            return self._broken(error)
        finally:
            self.metrics.close()

    def _broken(self, error: RuntimeError) -> Ended:
        """The world in which this rank trains is lost, and so is a handoff in progress. The checkpoint rung is next."""
        reason = Reason(f"{type(error).__name__}: {plainly(error)}", self._phase, cause=cause_of(error))
        if self.active is not None:
            reason = self.deaths.named(replace(reason, rank=self.active.world.rank), self.active.world.roster)
        reason = replace(reason, text=f"the world cannot go on: {reason.text}")
        if self._phase == "switch" or self._switched:
            under_way = self.following or (self.retirement.following if self.retirement is not None else None)
            stage = RankStage.BROKEN
        else:
            under_way, stage = self.following or self.preparation, RankStage.ABORTED
        if under_way is not None:
            self._stage(under_way.request, stage, reason=reason)
        self.pending.report_drop()
        return Ended(Ending.BROKEN, reason.as_felt())

    def _enter(self, request: Order) -> None:
        """A new process: build, wait for permission, wait for the boundary of the source world, then cut over."""
        try:
            following, version = self.pending.enter(request)
        except NoPartInHandoff as dropped:
            raise Ended(Ending.ABORTED, dropped.reason) from dropped
        # The first step of this world, or the rescue, may outlast the deadline. Report now that the boundary is past:
        # otherwise the agent would abort it.
        self._reporter.cutting_over(following.request)
        agreed = BoundaryAgreed(version, dropped=bool(following.boundary.get("dropped")))
        self._finish_cutover(self._cutover(following, agreed).run(), None, None)

    def _step(self) -> None:
        """Do one global batch: train, agree, then step here or hand the step over."""
        self._step_began = time.monotonic()  # Before a stream attaches, which is told since when the version stands.
        self._maintain()
        active = self.active
        assert active is not None
        world, started = active.world, time.monotonic()
        self._phase = "training"
        self._note_first_forward()
        batches = self.progress.cursor.batches(world.coordinates.dp, world.layout.dp)
        active.live.step_tensors.begin()
        result = do_step(self.job, active, batches, self.drop_rule, self._drops)
        if result is None:
            self._drop_step(active)
            return
        started += self._do_put_off(active)
        reduced = moment(own_device())
        self.probe("reduced")
        self._phase = "boundary"
        numbers = read_numbers(result, start_norm(active.state))
        self.deaths.check(world)
        part = digest_part(self.progress.step + 1, batches, world.coordinates)
        totalling = start_total(numbers.result, part, world.everyone, self.pending.chain(self.progress.step))
        word = self.pending.word()
        self.probe("asked")
        boundary = agree(word, world.everyone, has_lease=self.requests.has_lease())
        totals = replace(totalling.wait(), norm=numbers.norm)
        if totals.has_loss:
            self._check_finite("loss", totals.loss, active, (float(numbers.result.loss_sum),))
        following = self.pending.settle(boundary.agreement)
        if following is not None:
            self._hand_over(active, following, totals, reduced)
            return
        waited_s = await_lease(boundary, self.requests, world.everyone, self.progress.step + 1)
        measured = self._apply(active, totals, started + waited_s, reduced, waited_s)
        self.after_step.do(active, self.progress, measured, boundary.agreement)

    def _do_put_off(self, active: ActiveWorld) -> float:
        """What is due after a step that was handed over. Returns the seconds it took, which are not the step's."""
        began = time.monotonic()
        self.after_step.do_put_off(active)
        return time.monotonic() - began

    def _drops(self, place: StepPlace) -> bool:
        """Between two parts of a step: whether all ranks agree to drop it.

        Also does the upkeep that otherwise waits for a boundary and does not change the world: the next boundary may be
        too far away.
        """
        active, self._phase = self.active, "boundary"
        assert active is not None and self.drop_rule is not None
        self._step_began += self._do_put_off(active)
        self._maintain()
        self.probe(f"part {place.part}")
        needs_s = self.drop_rule.needs_s(time.monotonic() - self._step_began, place.done)
        word = self.pending.word_between_parts(needs_s)
        following = self.pending.settle(agree(word, active.world.everyone).agreement)
        self._phase = "training"
        return following is not None

    def _apply(
        self, active: ActiveWorld, totals: StepTotals, started: float, reduced: Moment, waited_s: float = 0.0
    ) -> StepMeasures:
        """The optimizer step in the world that reduced the gradients. `waited_s`: since then, for a step lease."""
        self._phase = "optimizer step"
        norm, stream = totals.norm, self.pending.stream()
        assert norm is not None, "this world reduced the gradients, so it knows their norm"
        self._check_finite("gradient norm", norm, active, active.live.regions[GRAD].tensors)
        if stream is not None and stream.attached:
            stream.before_step(active, self.progress.step + 1, norm, self.timings.steps)
        measured = measures_before(active.state, totals.loss, norm)
        apply_step(active.state, norm)
        settle_moments(active.live)
        if stream is not None and stream.attached:
            stream.after_step(self.progress.step + 1)
        ended = moment(own_device())
        self._advance(active, totals, ended.at_s - started)
        self.timings.steps.append(ended.at_s - started)
        self.timings.applied(reduced, ended, waited_s=waited_s)
        self._note_first_step()
        return measured

    def _check_finite(self, what: str, value: float, active: ActiveWorld, here: Sequence[torch.Tensor | float]) -> None:
        """`value` is of the step that comes next; `here` is what this rank adds to it."""
        if self.stops_at_nonfinite:
            text = f"{what} of step {self.progress.step + 1}"
            check_finite(text, value, here=here, group=active.world.everyone, phase=self._phase)

    def _advance(self, active: ActiveWorld, totals: StepTotals, seconds: float) -> None:
        step = self.progress.step + 1
        self.progress = TrainingProgress(
            step, self.progress.cursor.advanced(), chained(self.progress.digest, totals.sample_digest)
        )
        self.listener.step(active.world.generation, self.progress, totals, seconds)

    # Handing over.

    def _drop_step(self, active: ActiveWorld) -> None:
        """All ranks have dropped the step in progress: hand over the state from before it."""
        following, dropped = self.following, moment(own_device())
        assert following is not None
        following.measures["dropped_s"] = dropped.at_s - self._step_began
        self._hand_over(active, following, None, dropped)

    def _hand_over(self, active: ActiveWorld, following: NextWorld, totals: StepTotals | None, reduced: Moment) -> None:
        """`totals` of the step handed over, None if it was dropped. `reduced`: when it was reduced or dropped."""
        self._reporter.cutting_over(following.request)
        reduced_s = reduced.host_s()
        boundary = BoundaryAgreed(self.progress.step, dropped=totals is None)
        outcome = self._cutover(following, boundary, active, totals).run()
        outcome.measures["reduced_at_utc"] = PROCESS_CLOCK.utc_at(reduced_s)
        outcome.measures["median_step_s"] = statistics.median(self.timings.steps or [0.0])
        # A dropped step has no gradients to apply, so its pause contains no optimizer step.
        outcome.measures["optimizer_s"] = 0.0 if totals is None else statistics.median(self.timings.optimizer or [0.0])
        self._finish_cutover(outcome, totals, reduced)

    def _cutover(
        self,
        following: NextWorld,
        boundary: BoundaryAgreed,
        active: ActiveWorld | None = None,
        totals: StepTotals | None = None,
    ) -> CutoverRun:
        request = following.request
        machine = Cutover(
            rank=request.rank_of(self.member),
            in_source=following.source_rank is not None,
            in_target=following.target_rank is not None,
            deadlines=request.cutover,
            boundary=boundary,
            now=time.monotonic(),
            rescues=request.rescues,
        )

        def posted() -> dict[str, Any]:
            assert active is not None
            small = collect(self.job, active.state, active.live, self.progress)
            same = {"version": self.progress.step, "small": small}
            if totals is None:
                return same | {"dropped": True}
            return same | {"totals": [totals.loss, totals.tokens, totals.sample_digest]}

        preparation = self.preparation
        if isinstance(preparation, RescuePreparation):
            return RescueRun(
                following, active, machine, boundary_of=posted, probe=self.probe, complete=preparation.complete
            )
        dead = partial(self.deaths.said_of, request.source)
        return CutoverRun(following, active, machine, boundary_of=posted, totals=totals, probe=self.probe, dead=dead)

    def _finish_cutover(self, outcome: Outcome, totals: StepTotals | None, reduced: Moment | None) -> None:
        following = self.following
        assert following is not None
        self.decided = (following.request.handoff_id, outcome.decision)
        following.measures.update(outcome.measures)
        match outcome.ending:
            case ApplyStepInTarget():
                self._switch(following, outcome, None)
            case RedoBatchInTarget(reason=reason):
                self._switch(following, outcome, reason)
            case ApplyStepInSource(reason=reason):
                assert self.active is not None and totals is not None and reduced is not None
                self.pending.drop_beside_training(reason)
                meet(self.active.world.everyone)  # No rank may be gone since the boundary, or no step is made.
                measured = self._apply(self.active, totals, reduced.at_s, reduced)
                self.after_step.do(self.active, self.progress, measured, None)
            case RedoBatchInSource(reason=reason):
                assert self.active is not None
                self.active.live.step_tensors.put_back()
                self.pending.drop_beside_training(reason)
            case Leave(reason=reason) if outcome.decision.goes:
                self._leave(following, outcome, reason)
            case Leave(reason=reason):
                self.pending.drop(reason)
                raise Ended(Ending.ABORTED, reason)
            case FallToCheckpoint(reason=reason):
                reason = self.deaths.named(reason, following.request.source, following.request.target)
                self._stage(following.request, RankStage.BROKEN, reason=reason, measures=following.measures)
                raise Ended(Ending.BROKEN, reason.as_felt())

    def _switch(self, following: NextWorld, outcome: Outcome, redo: Reason | None) -> None:
        """GO: the next world becomes the active one. It applies the step that was handed over. With a reason `redo` it
        does the batch again instead."""
        started, self._phase = time.monotonic(), "switch"
        assert following.world is not None and following.state is not None and following.live is not None
        old, self.active = self.active, ActiveWorld(following.world, following.state, following.live)
        if old is not None:
            release_gradients(old.state)
        take_place(following, old)
        activate(following.world)
        boundary = outcome.boundary or following.boundary
        small = boundary["small"] if boundary else following.small
        if small is None:
            reseed(self.job, following.world, 0)
        else:
            self.progress = install(small, self.job, following.state, following.live, following.world)
        following.install_step_tensors(before=redo is not None)
        self.probe("switched")
        measured = None
        if redo is not None:
            refresh_weights(following.state)
        else:
            gradients = following.live.regions[GRAD].tensors
            self._check_finite("gradient norm", boundary["norm"], self.active, gradients)
            measured = measures_before(following.state, boundary["totals"][0], boundary["norm"])
            apply_step(following.state, boundary["norm"])
            settle_moments(following.live)
        self.pending.take()
        self.timings = Timings()
        following.measures["switch_s"] = time.monotonic() - started
        if self.retirement is not None:
            # The order to retire the previous old world never came. Do not keep two old worlds.
            self.retirement.free_in_background(after_s=COLLECT_AFTER_S)
        self.retirement = Retirement(following.request.handoff_id, old, following)
        self._switched = True
        self._certificate, self._redone = outcome.certificate, redo
        if measured is not None:
            self._advance(self.active, StepTotals(*boundary["totals"]), time.monotonic() - started)
            self.after_step.put_off(self.active, self.progress, measured)
        if self.after_step.is_last(self.progress.step):
            self._end_at_switch(self.active)

    def _end_at_switch(self, active: ActiveWorld) -> None:
        """The job is done with the step handed over, or with the checkpoint that this world began from."""
        self._note_first_forward()
        self._note_first_step()
        self.after_step.do_put_off(active)
        raise Ended(Ending.FINISHED)

    def _note_first_forward(self) -> None:
        if self._switched and self.retirement is not None:
            self.retirement.following.begins_forward()

    def _note_first_step(self) -> None:
        """After its first step, a new world no longer needs the old one: report "active"."""
        if not self._switched or self.retirement is None:
            return
        self._switched = False
        following = self.retirement.following
        following.has_stepped(self.timings.steps[-1] if self.timings.steps else None)
        self._stage(
            following.request,
            RankStage.ACTIVE,
            reason=self._redone,
            measures=following.measures,
            certificate=self._certificate,
        )

    def _leave(self, following: NextWorld, outcome: Outcome, reason: Reason) -> None:
        """A leaver that has read GO: report it, stay readable until the new world is up, then exit. In a rescue all of
        its state has been read, so it exits at once."""
        measures, certificate = following.measures, outcome.certificate
        self._stage(following.request, RankStage.LEFT, reason=reason, measures=measures, certificate=certificate)
        self.probe("leave")
        stays_s = 0.0 if following.request.rescues else following.request.cutover.store_s
        handoff_id, requests = following.request.handoff_id, self.requests
        requests.wait_for(
            lambda: handoff_id in requests.retired or requests.stored.stop is not None, time.monotonic() + stays_s
        )
        following.drop()
        raise Ended(Ending.LEFT, reason)

    # Upkeep.

    def _maintain(self) -> None:
        """Between steps or their parts: handle aborts and retired worlds, and attach a waiting stream to the steps."""
        self.pending.maintain()
        for handoff_id in self.requests.take_retired():
            if self.retirement is not None and self.retirement.handoff_id == handoff_id and not self._switched:
                retirement, self.retirement = self.retirement, None
                retirement.free_in_background()
        stream = self.pending.stream()
        if stream is not None and not stream.attached:
            stream.attach(self.progress.step, self.timings.steps, since=self._step_began)

    def _preparation(self, request: Order, build: int) -> Preparation:
        return (RescuePreparation if request.rescues else Preparation)(
            request,
            self.member,
            self.job,
            self.active,
            self.settings,
            aborted=partial(self.pending.is_useless, build),
            superseded=partial(self.pending.is_superseded, build),
            streaming=partial(self.pending.streams_now, build),
            probe=self.probe,
            check_peers=self.deaths.check,
        )
