"""The checks of a job in a world of one rank, in the order in which a job meets them."""

from __future__ import annotations

import math
import os
import statistics
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from liver_core.layout import LayoutError, Manifest, ParallelLayout, check_fits
from liver_core.layout.fit import AXES_THAT_RUN, EXPERTS_RUN, further_axes
from liver_core.rank.droppable_step import DropRule, do_step
from liver_core.same_value import same_number, same_value
from liver_core.state.built_state import tied_embeddings
from liver_core.state.checkpoint import CheckpointError, check_ours, read_small_state
from liver_core.state.checkpoint_damage import damage_of
from liver_core.state.megatron_checkpoint import read_megatron_checkpoint
from liver_core.state.optimizer_chain import optimizer_chain
from liver_core.state.replay_check import check_replay
from liver_core.state.step_counts import UnsupportedState
from liver_core.streaming.header import HeaderError
from liver_core.training.cursor import DataCursor
from liver_core.training.entrypoint import check_names, find_class, import_user_module, make_job
from liver_core.training.job import StepResult, TrainingJob
from liver_core.trial.findings import Finding, Findings, missing, ok, raised, warning
from liver_core.trial.layout_choice import USUAL, build_one_rank, choose
from liver_core.trial.trial_world import TrialStep, TrialWorld

ONE_RANK = ParallelLayout()
HOOK_SHARE = 0.1
"""Of a step: what on_step may take before it is worth a warning."""
ROUNDING_SHARE = 1e-5
"""Of a loss: what may differ between two runs of the same step on a machine whose operations are not deterministic."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialPlan:
    """What the command reads from a job file. `layouts`: those that it names; `layout`: try the job in this
    one too, and where it is empty in the one that `choose` finds."""

    entrypoint: str
    args: dict[str, Any]
    global_batch: int
    micro_batch: int
    seed: int
    workdir: str | None
    layouts: tuple[str, ...]
    layout: str
    steps: int
    drop_every: int | None
    validates: bool = False
    start_from: str | None = None

    def new_job(self) -> TrainingJob:
        """The job object, made anew."""
        factory = find_class(import_user_module(self.entrypoint, self.workdir), self.entrypoint)
        return make_job(
            factory, self.args, global_batch=self.global_batch, micro_batch=self.micro_batch, seed=self.seed
        )


class JobTrial:
    """One plan. `run` makes all checks; `steps` is what the job's own steps gave, `draws` whether they use random
    numbers, `layout` the one in which to run it once more; empty if there is none."""

    def __init__(self, plan: TrialPlan, findings: Findings) -> None:
        self.plan = plan
        self.findings = findings
        self.steps: list[TrialStep] = []
        self.draws = False
        self.layout = plan.layout
        self._worlds = 0
        self._made: TrainingJob | None = None
        self._first: TrialWorld | None = None
        self._manifest: Manifest | None = None
        self._saved: dict[str, torch.Tensor] = {}
        self._small: dict[str, Any] = {}
        self._half = max(1, plan.steps // 2)
        self._path = ""

    def run(self) -> bool:
        """All checks, up to one that others rest on and that found something missing. Returns whether all were made."""
        with tempfile.TemporaryDirectory(prefix="liver-try-") as folder:
            self._path = os.path.join(folder, "step-000000001")
            checks = self._checks()
            for number, (name, look, others_rest_on_it) in enumerate(checks):
                if not self.findings.check(name, look, others_rest_on_it=others_rest_on_it):
                    self.findings.say({"not_made": [later for later, _, _ in checks[number + 1 :]]})
                    return False
        self._measure()
        return True

    def _checks(self) -> list[tuple[str, Callable[[], Finding], bool]]:
        """Name, check, and whether the later ones rest on what it finds."""
        parts = [("step in parts", self._step_in_parts, False)] if self.plan.drop_every is not None else []
        starts = [("start_from", self._start_from, False)] if self.plan.start_from is not None else []
        validation = [("validate", self._validation, False)] if self.plan.validates else []
        return [
            ("module", self._import, True),
            ("class", self._construct, True),
            ("build", self._build, True),
            ("next world", self._next_world, True),
            ("optimizer", self._optimizer, True),
            ("parameters", self._parameters, True),
            ("layouts", self._layouts, False),
            ("builds", self._builds, False),
            *starts,
            ("warm_up", self._warm_up, True),
            ("initial values", self._initial_values, True),
            ("step", self._one_step, True),
            ("same batch", self._same_batch, True),
            *parts,
            ("replay", self._replay, False),
            ("steps", self._steps, True),
            *validation,
            ("same seed", self._same_seed, False),
            ("checkpoint", self._checkpoint, False),
            ("on_step", self._hooks, False),
            ("imports", self._imports, False),
        ]

    @property
    def _job(self) -> TrainingJob:
        assert self._made is not None
        return self._made

    @property
    def _world(self) -> TrialWorld:
        assert self._first is not None
        return self._first

    def _import(self) -> Finding:
        module = import_user_module(self.plan.entrypoint, self.plan.workdir)
        find_class(module, self.plan.entrypoint)
        return ok(f"{self.plan.entrypoint} in {getattr(module, '__file__', None) or 'a module without a file'}")

    def _construct(self) -> Finding:
        self._made = self.plan.new_job()
        return ok(f"{type(self._job).__name__} takes its arguments")

    def _new_world(self, job: TrainingJob) -> TrialWorld:
        self._worlds += 1
        return TrialWorld(job, ONE_RANK, 0, dist.HashStore(), f"try-{self._worlds}")

    def _build(self) -> Finding:
        self._first = self._new_world(self._job)
        started = time.monotonic()
        try:
            self._first.build()
        except AssertionError as error:
            if not traceback.extract_tb(error.__traceback__)[-1].filename.endswith("/parallel_state.py"):
                raise
            raise UnsupportedState(
                f"{error}: build asks Megatron's global parallel_state, which knows no world while one is built; take "
                "sizes and ranks from world, and pass pg_collection=world.collection to Megatron"
            ) from error
        return ok(f"in {time.monotonic() - started:.2f} s")

    def _next_world(self) -> Finding:
        if self._world.build_draws():
            return missing(
                "build draws random numbers, which moves the random streams of the world that trains meanwhile; set "
                "perform_initialization=False in TransformerConfig (config_for does it) and draw nothing in build"
            )
        return ok("builds beside a world that trains: without memory, without random numbers")

    def _optimizer(self) -> Finding:
        chain = optimizer_chain(self._world.state.optimizer)
        kind = f"DistributedOptimizer over {type(chain.inner[0]).__name__}"
        buckets = sum(len(buffer.buckets) for buffer in chain.buffers)
        return ok(f"{kind}, {buckets} gradient bucket{'s' if buckets > 1 else ''}")

    def _parameters(self) -> Finding:
        self._manifest = self._world.describe()
        specs = self._manifest.parameters
        split = sum(spec.tp_dim is not None for spec in specs)
        elements = sum(spec.numel for spec in specs)
        self._world.lay_out(self._manifest)
        text = f"{len(specs)} parameters of {elements} elements, {split} of them split by TP"
        if tied_embeddings(self._world.state):
            return warning(
                f"{text}; embeddings are tied, which runs with PP1 only: allow such layouts only, or build with "
                "share_embeddings_and_output_weights=False"
            )
        return ok(text, parameters=len(specs), elements=elements)

    def _layouts(self) -> Finding:
        assert self._manifest is not None
        named = self.plan.layouts
        refusals = {text: why for text in named if (why := self._refusal(text))}
        if refusals:
            problems = "; ".join(f"{text}: {why}" for text, why in refusals.items())
            return missing(f"layouts: {problems}", supported=[text for text in named if text not in refusals])
        text = ", ".join(named) or "none named: all that divide the model"
        has, said = self._manifest.num_experts, self.plan.args.get("num_experts") or 0
        if has != said:
            text = f"model.num_experts is {said or 'not given'}, and the model has {has or 'none'}"
            return warning(f"{text}: the planner chooses layouts by it", supported=list(named))
        return ok(f"{text}. {EXPERTS_RUN}" if has else text, supported=list(named))

    def _builds(self) -> Finding:
        """One rank of each layout that can run, and the choice of the one that is run."""
        named = {ParallelLayout.parse(text): text for text in self.plan.layouts or USUAL}
        tried = [text for layout, text in named.items() if layout != ONE_RANK and not self._refusal(text)]
        self.layout = self.plan.layout or choose(tried, processors=len(os.sched_getaffinity(0)))
        problems: list[Finding] = []
        for text in tried:
            self._worlds += 1
            try:
                build_one_rank(self._job, ParallelLayout.parse(text), name=f"try-{self._worlds}")
            except Exception as error:
                # The user's code may raise anything.
                found = raised(error)
                problems.append(replace(found, text=f"{text}: {found.text}"))
        self.findings.say({"built": tried, "ran": ["TP1"]})
        if problems:
            return replace(problems[0], text="; ".join(each.text for each in problems))
        return ok(f"one rank of each of {', '.join(tried)}" if tried else "no layout of several ranks can run")

    def _refusal(self, text: str) -> str:
        """Why the job cannot run on this layout, or nothing."""
        assert self._manifest is not None
        try:
            layout = ParallelLayout.parse(text)
            if further := further_axes(layout):
                return f"{further} is not supported, {AXES_THAT_RUN}"
            if layout.pp > 1 and tied_embeddings(self._world.state):
                return "tied embeddings run with PP1 only"
            check_fits(self._manifest, layout)
            DataCursor(0, self.plan.global_batch, self.plan.micro_batch).batches(0, layout.dp)
            self._job.check_layout(layout)
        except (LayoutError, ValueError) as error:
            return str(error)
        return ""

    def _start_from(self) -> Finding:
        path = self.plan.start_from
        assert path is not None
        if not os.path.isdir(path):
            return warning(f"{path} is not on this machine; every node must be able to read it")
        try:
            theirs = read_megatron_checkpoint(path)
            if theirs is None:
                if damage := damage_of(Path(path)):
                    return missing(f"checkpoint {path}: {damage}")
                text = f"goes on after step {read_small_state(path)['step']}"
                overruled = check_ours(path, self._job, self._world.state, self._world.world)
                return warning(f"{text}; {overruled}") if overruled else ok(text)
            theirs.check(self._job, self._world.state, self._world.world)
            for text in self.plan.layouts:
                theirs.check_layout(ParallelLayout.parse(text))
        except CheckpointError as error:
            return missing(str(error))
        return ok(f"goes on after iteration {theirs.iteration} of Megatron's training")

    def _warm_up(self) -> Finding:
        started = time.monotonic()
        self._job.warm_up()
        return ok(f"in {time.monotonic() - started:.2f} s, outside of any pause")

    def _initial_values(self) -> Finding:
        assert self._manifest is not None
        for spec in self._manifest.parameters:
            first, second = (
                self._job.initial_parameter(spec, torch.Generator().manual_seed(self.plan.seed)) for _ in range(2)
            )
            if not isinstance(first, torch.Tensor) or tuple(first.shape) != spec.shape:
                found = f"shape {tuple(first.shape)}" if isinstance(first, torch.Tensor) else type(first).__name__
                return missing(
                    f"initial_parameter: gives {found} for {spec.name}, must be the whole parameter of {spec.shape}"
                )
            if not torch.equal(first, second):
                return missing(
                    f"initial_parameter: gives {spec.name} differently from one generator state; draw from the "
                    "generator it is given and from nothing else"
                )
        self._world.fill()
        return ok(f"{len(self._manifest.parameters)} parameters, by name and generator")

    def _one_step(self) -> Finding:
        """The first forward and backward pass, and what the job says of it; the optimizer does not step."""
        before, batches = self._world.weights(), self._world.batches
        result = self._world.gradients()
        if not isinstance(result, StepResult):
            return missing(f"step: returned a {type(result).__name__}; it must return a StepResult")
        if self._world.live.optimizer.has_stepped or not torch.equal(before, self._world.weights()):
            return missing("step: it steps the optimizer or changes weights; the loop does the optimizer step")
        if result.loss_count != len(batches):
            return missing(
                f"step: loss_count is {result.loss_count}, must be {len(batches)}: the micro-batches whose losses are "
                "in loss_sum, on ranks that compute a loss"
            )
        if not math.isfinite(float(result.loss_sum)):
            return missing(f"step: loss is {result.loss_sum} in the first step; look at data and initial values")
        if not float(self._world.reduced().abs().sum()):
            return missing("step: all gradients are zero after it; it must run backward and reduce gradients")
        self.draws = self._world.step_draws()
        text = f"loss {result.loss_sum / result.loss_count:.6f} over {len(batches)} micro-batches"
        text += ", with random numbers such as dropout" if self.draws else ""
        return ok(text) if result.tokens else warning(f"{text}; tokens is 0, so no throughput can be shown")

    def _same_batch(self) -> Finding:
        """The same sample ids twice, with the same weights and random streams: the same loss and gradients."""
        world = self._world
        first, reduced = world.gradients(), world.reduced()
        second = world.gradients()
        losses = f"loss {first.loss_sum / first.loss_count!r}, then {second.loss_sum / second.loss_count!r}"
        if not _close(float(first.loss_sum), float(second.loss_sum)):
            return missing(
                f"the same sample ids give {losses}; a batch must depend on its sample ids and the seed only, not on "
                "an iterator that goes on: after a handoff another process asks for the next ids"
            )
        growth = float(world.reduced().norm() / reduced.norm())
        if not _close(growth, 1.0):
            return missing(
                f"the same batch gives {growth:.2f} times the gradients the second time; step must begin with "
                "state.model.zero_grad_buffer() and state.optimizer.zero_grad()"
            )
        if not same_number(float(first.loss_sum), float(second.loss_sum)) or not torch.equal(reduced, world.reduced()):
            return warning(
                f"the same batch gives {losses}: equal but for rounding, some operation is not deterministic"
            )
        return ok("the same sample ids give the same loss and gradients twice")

    def _another_world(self) -> TrialWorld:
        """A world of a job object of its own, laid out and not filled yet."""
        assert self._manifest is not None
        job = self.plan.new_job()
        world = self._new_world(job)
        world.build()
        world.lay_out(self._manifest)
        job.warm_up()
        return world

    def _step_in_parts(self) -> Finding:
        assert self.plan.drop_every is not None
        rule, world = DropRule(self.plan.drop_every), self._world
        rule.check(self._job)
        whole, gradients = world.gradients(), world.reduced()
        world.gradients()
        world.rewind()
        active: Any = world
        parts = do_step(self._job, active, world.batches, rule, lambda place: False)
        assert parts is not None
        same_loss = same_number(float(whole.loss_sum), float(parts.loss_sum))
        if not same_loss or not torch.equal(gradients, world.reduced()):
            return missing("step_in_parts: gives another loss or other gradients than step; must be equal bit for bit")
        return ok(f"equal to step in parts of {rule.every} micro-batches")

    def _replay(self) -> Finding:
        """Which rung handoffs of this job take."""
        try:
            check_replay(self._world.live)
        except (UnsupportedState, HeaderError) as error:
            return warning(f"handoffs copy all state in the pause (stop-and-copy): {error}", rung="stop-and-copy")
        return ok("handoffs can be live: optimizer steps can be replayed bit for bit", rung="live")

    def _steps(self) -> Finding:
        world = self._world
        world.fill()
        for number in range(1, self.plan.steps + 1):
            self.steps.append(world.step())
            if not math.isfinite(self.steps[-1].loss) or not math.isfinite(self.steps[-1].norm):
                return missing(
                    f"step {number}: loss is {self.steps[-1].loss}, gradient norm {self.steps[-1].norm}; look at data, "
                    "learning rate and initial values"
                )
            if number == self._half:
                world.save(self._path)
                self._saved, self._small = world.contents(), world.small_state()
                # So that what is loaded draws the same numbers from here on.
                world.reseed()
        self.findings.say({"state_bytes": world.live.device_bytes})
        losses = [step.loss for step in self.steps]
        text = ", ".join(f"{loss:.6f}" for loss in losses)
        return ok(f"losses {text}", losses=losses, norms=[step.norm for step in self.steps])

    def _validation(self) -> Finding:
        """One validation of the trained model, and what it may not change."""
        if not self._job.has_validation():
            return missing(f"validate: {type(self._job).__name__} has none, but the job file has validate_every_steps")
        world, started = self._world, time.monotonic()
        before, gradients = world.weights(), world.reduced()
        self._job.validate(world.progress.step, world.state, world.world)
        if not torch.equal(before, world.weights()) or not torch.equal(gradients, world.reduced()):
            return missing(
                "validate: it changes weights or gradients; evaluate under torch.no_grad(), without backward"
            )
        return ok(f"in {time.monotonic() - started:.3f} s, outside of any pause")

    def _same_seed(self) -> Finding:
        self._world.close()
        again = self._another_world()
        again.fill()
        steps = [again.step() for _ in range(self._half)]
        again.reseed()
        steps += [again.step() for _ in self.steps[self._half :]]
        again.close()
        if difference := _first_difference(self.steps, steps):
            return _unequal(self.steps, steps, f"a new job with the same seed gives other numbers: {difference}", _SEED)
        return ok(f"{len(steps)} steps of a new job with the same seed are equal bit for bit")

    def _checkpoint(self) -> Finding:
        world = self._another_world()
        world.load(self._path)
        for kind, tensor in world.contents().items():
            if not torch.equal(tensor, self._saved[kind]):
                return missing(f"checkpoint: {kind} differs after it was loaded")
        small = world.small_state()
        for part in ("scheduler", "hyper_parameters", "job"):
            if not same_value(small[part], self._small[part]):
                return missing(
                    f"checkpoint: {part} is {small[part]} after loading, was {self._small[part]}; load_state_dict and "
                    "load_small_state must bring back all that state_dict and small_state gave"
                )
        steps = [world.step() for _ in self.steps[self._half :]]
        world.close()
        size = sum(entry.stat().st_size for entry in os.scandir(self._path))
        if difference := _first_difference(self.steps[self._half :], steps, after=self._half):
            text = f"from the checkpoint training goes on otherwise: {difference}"
            return _unequal(self.steps[self._half :], steps, text, _STATE)
        return ok(f"saved after step {self._half}, loaded into a new job, equal bit for bit", checkpoint_bytes=size)

    def _hooks(self) -> Finding:
        longest, step_s = max(step.hook_s for step in self.steps), self._step_s
        text = f"at most {longest:.3f} s a step, beside {step_s:.3f} s"
        if longest > HOOK_SHARE * step_s:
            return warning(f"{text}; every step takes that much longer, so keep it short")
        return ok(text)

    def _imports(self) -> Finding:
        """What is imported late counts too."""
        check_names()
        return ok("none has the name of a package of LiveR")

    @property
    def _step_s(self) -> float:
        """The first step allocates; it does not count."""
        return statistics.median(step.seconds for step in self.steps[1:] or self.steps)

    def _measure(self) -> None:
        slowest = max(step.seconds for step in self.steps[1:] or self.steps)
        self.findings.say({"step_s": self._step_s, "step_s_max": slowest})


_SEED = "draw numbers from self.seed only, and keep nothing between jobs of a process"
_STATE = "keep no state outside of model, optimizer, scheduler and small_state"


def _unequal(first: list[TrialStep], second: list[TrialStep], text: str, change: str) -> Finding:
    """Missing where training is another one; a warning where it is the same but for rounding."""
    if all(_close(one.loss, other.loss) for one, other in zip(first, second, strict=True)):
        return warning(f"{text}; but for rounding they are equal: some operation is not deterministic")
    return missing(f"{text}; {change}")


def _close(first: float, second: float) -> bool:
    return abs(first - second) <= ROUNDING_SHARE * abs(second)


def _first_difference(first: list[TrialStep], second: list[TrialStep], *, after: int = 0) -> str:
    for number, (one, other) in enumerate(zip(first, second, strict=True), start=after + 1):
        for name in ("loss", "norm"):
            if not same_number(getattr(one, name), getattr(other, name)):
                return f"{name} of step {number} is {getattr(one, name)!r}, then {getattr(other, name)!r}"
    return ""
