"""Whose settings count where a job goes on from a checkpoint: the job's, as in every world that it is handed to.

A rate that the job file names and the checkpoint would overrule is refused or told by name.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from liver_core.state.megatron_export import SCHEDULE
from liver_core.state.optimizer_chain import optimizer_chain
from liver_core.state.optimizer_step import hyper_parameters
from liver_core.training.job import TrainState

# What of a parameter group stands in a checkpoint. The rest is the job's, as the next world will have it too.
_OF_A_GROUP = ("lr", "weight_decay", "step")


def schedule_refusal(theirs: Mapping[str, Any] | None, scheduler: Any) -> str:
    """What differs between the schedule of a checkpoint and that of a job that was just built, and what to do. Empty
    where they are equal, where the job's count, and for schedulers other than Megatron's, which keep their own."""
    if not isinstance(scheduler, OptimizerParamScheduler) or scheduler.override_opt_param_scheduler or theirs is None:
        return ""
    if lacking := [name for name in SCHEDULE if name not in theirs]:
        return f"scheduler: has no {lacking[0]} there, so another one than Megatron's wrote it; build that one"
    ours = scheduler.state_dict()
    ignored = {"num_steps", *(("wd_incr_steps",) if _is_constant(theirs) else ())}
    unlike = ", ".join(
        f"{name} is {theirs[name]} there and {ours[name]} in the job"
        for name in SCHEDULE
        if name not in ignored and theirs[name] != ours[name]
    )
    if not unlike:
        return ""
    return (
        f"scheduler: {unlike} (in steps of the job's global_batch); must be equal, or build the scheduler with "
        "override_opt_param_scheduler=True for the job's (GptJob: override_opt_param_scheduler in args)"
    )


def overruled_rates(small: Mapping[str, Any], state: TrainState) -> str:
    """Rates of a job that was just built which do not count, since its scheduler is not Megatron's and those of the
    checkpoint are handed over. Empty if there are none."""
    if isinstance(state.scheduler, OptimizerParamScheduler):
        return ""
    names = ("weight_decay",) if state.scheduler is not None else ("lr", "weight_decay")
    pairs = ((name, _values(small["hyper_parameters"], name), _values(hyper_parameters(state), name)) for name in names)
    return "; ".join(
        f"{name} is {theirs} there and {ours} in the job: the checkpoint's counts until a scheduler sets another"
        for name, theirs, ours in pairs
        if theirs != ours
    )


def _values(groups: list[dict[str, Any]], name: str) -> str:
    return " and ".join(str(value) for value in sorted({group[name] for group in groups}))


@contextmanager
def keeping_settings(state: TrainState) -> Iterator[None]:
    """Around the load of an optimizer: of each parameter group rates and counts are loaded, other settings stay."""
    chain = optimizer_chain(state.optimizer)
    groups, counted = [{**group} for group in chain.groups], chain.form.counted
    yield
    for group, before in zip(chain.groups, groups, strict=True):
        kept = {name: group[name] for name in ("params", *_OF_A_GROUP, *counted) if name in group}
        group.clear()
        group.update({**before, **kept})


def with_rates_that_count(small: Mapping[str, Any], state: TrainState) -> dict[str, Any]:
    """The small state of a checkpoint whose tensors and groups are loaded, with the rates of the next step: those that
    stand there, or where the job's schedule counts those that it gives at that step."""
    scheduler, theirs = state.scheduler, small["scheduler"]
    if isinstance(scheduler, OptimizerParamScheduler) and theirs is not None:
        if _is_constant(theirs):  # It is compared all the same when it is loaded.
            theirs = {**theirs, "wd_incr_steps": scheduler.wd_incr_steps}
        if scheduler.override_opt_param_scheduler:
            scheduler.num_steps = 0
            scheduler.load_state_dict(theirs)
    return {**small, "scheduler": theirs, "hyper_parameters": hyper_parameters(state)}


def _is_constant(schedule: Mapping[str, Any]) -> bool:
    """Whether the weight decay is: then the length of its change means nothing."""
    return schedule.get("wd_incr_style") == "constant"
