"""What a job would have done on a trace of capacity: the one call of the terminal and of the service. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

from agent.protocol.jobfile import JobFile
from liver_core.handoff.rung_costs import Prefer
from liver_core.layout.parallel import ParallelLayout
from service.planner.change_cost import ChangeCost, shipped_cost, state_bytes
from service.planner.weighing.policy_question import knobs_of
from service.policy.price_book import PriceSteps, constant, read_prices
from service.policy.types import Candidate, Goal, PolicyKnobs
from service.simulation.comparing import Comparison, compare
from service.simulation.job_layouts import candidates_of
from service.simulation.machines.change_times import ChangeTimes
from service.simulation.replay_setup import ReplaySetup
from service.simulation.traces import CapacityTrace

USD_PER_HOUR, USD_PER_HOUR_ON_DEMAND = 1.0, 3.0
"""Of a node, where nobody gives prices: what comes out compares policies, and is no bill."""
SETUP = ReplaySetup(notice_s=120.0, unannounced_share=0.05, acquire_s=120.0, counts_steps=True)
"""Notices as AWS gives them, one loss in twenty without, two minutes to get a node back that was given back."""

COSTS_ALIKE = "prefer: total: in a replay every rung costs the same, and the shortest pause is taken"


@dataclass(frozen=True, slots=True)
class WhatIf:
    """What is asked. `slots_per_node`: GPUs of a node; `change_s`: training time that a change loses, None: by `cost`
    and the size of the job's state; `usd_per_mtok`: what a million tokens is worth, None: as the job says, else by
    on-demand prices; `acquire_s`, `spares_max`, `gain_min`: in place of what the job's own policy says; `measured`: the
    seconds of a step by layout, of layouts in which the job has run. `times`: of the parts of a change, where the
    product's machines are to carry every one; the job's state, checkpoints and parts of steps are put in."""

    setup: ReplaySetup = SETUP
    slots_per_node: int = 1
    device: str = "A100"
    change_s: float | None = None
    cost: ChangeCost | None = None
    usd_per_mtok: float | None = None
    acquire_s: float | None = None
    spares_max: int | None = None
    gain_min: float | None = None
    measured: tuple[tuple[str, float], ...] = ()
    times: ChangeTimes | None = None


@dataclass(frozen=True, slots=True)
class WhatIfAnswer:
    """How it went under each policy, and what a change was taken to cost. `is_guess`: the state of the job is smaller
    or larger than any whose change was measured. `not_followed`: what the job's file says of changes, and was not
    done."""

    comparison: Comparison
    lost_s: float
    lost_s_source: str
    is_guess: bool
    not_followed: tuple[str, ...] = ()

    def facts(self) -> dict[str, Any]:
        """What a program reads."""
        lost = {"lost_s": self.lost_s, "lost_s_is_extrapolated": self.is_guess, "lost_s_source": self.lost_s_source}
        return self.comparison.facts() | lost | {"not_followed": list(self.not_followed)}


class GangError(ValueError):
    """More nodes are asked for than the job can use."""


def read_node_prices(text: str | None) -> tuple[PriceSteps, float]:
    """Of a node, in USD per hour: on spot over time, and on demand. `text`: CSV with pools `spot` and `on-demand`; its
    first moment is the begin of the trace where it has dates. Raises PriceError."""
    flat = {"spot": USD_PER_HOUR, "on-demand": USD_PER_HOUR_ON_DEMAND}
    book = constant(flat) if text is None else read_prices(text).from_its_begin()
    return book.of("spot"), book.at("on-demand", 0.0)


def what_if(job: JobFile, trace: CapacityTrace, asked: WhatIf) -> WhatIfAnswer:
    """Replays the trace under LiveR's policy and those it is compared with. Raises GangError for a gang that the job
    cannot use, and ValueError where no layout of the job fits its own limits, or the trace has too many ticks."""
    cost = asked.cost or shipped_cost()
    layouts = candidates_of(
        job,
        slots_per_node=asked.slots_per_node,
        device=asked.device,
        cost=cost,
        change_s=asked.change_s,
        measured=asked.measured,
    )
    if not layouts:
        limits = f"nodes.min {job.nodes.min} to nodes.max {job.nodes.max}"
        raise ValueError(f"no layout of the job fits {limits} of {asked.slots_per_node} slots")
    if asked.setup.gang > (most := max(each.nodes for each in layouts)):
        raise GangError(f"must be at most {most}, the most nodes that a layout of the job uses, is {asked.setup.gang}")
    times = None if asked.times is None else _times_of(job, asked.times, layouts)
    setup, goal, knobs = by_own_policy(job, asked)
    found = compare(trace, layouts, setup=setup, goal=goal, knobs=knobs, times=times)
    is_guess = asked.change_s is None and cost.is_extrapolated(state_bytes(job))
    source = "the request" if asked.change_s is not None else cost.source
    return WhatIfAnswer(found, layouts[0].change_s, source, is_guess, _not_followed(job, times))


def by_own_policy(job: JobFile, asked: WhatIf) -> tuple[ReplaySetup, Goal, PolicyKnobs]:
    """What the job's own policy says of a replay, as if it ran in the service, but for what is asked otherwise."""
    policy = job.policy
    knobs = knobs_of(policy) if policy is not None else PolicyKnobs()
    knobs = replace(
        knobs,
        spares_max=knobs.spares_max if asked.spares_max is None else asked.spares_max,
        gain_min=knobs.gain_min if asked.gain_min is None else asked.gain_min,
    )
    own = policy.acquire_s if policy is not None else asked.setup.acquire_s
    worth = policy.usd_per_mtok if policy is not None else None
    setup = replace(asked.setup, acquire_s=own if asked.acquire_s is None else asked.acquire_s)
    return setup, Goal(usd_per_mtok=worth if asked.usd_per_mtok is None else asked.usd_per_mtok), knobs


def _times_of(job: JobFile, asked: ChangeTimes, layouts: Sequence[Candidate]) -> ChangeTimes:
    """For the job's state, its checkpoints in steps of a usual length (none where its file has none), and where its
    steps may be dropped."""
    every_s = None
    if job.checkpoint is not None:
        every_s = job.checkpoint.every_steps * median(each.step_time_s for each in layouts)
    parts: dict[str, float | None] = {}
    if (rule := job.drop_step) is not None:
        batches = {each.layout: job.micro_batches(ParallelLayout.parse(each.layout)) for each in layouts}
        parts = {name: rule.part_of_step(count) for name, count in batches.items()}
    return replace(
        asked,
        state_bytes=state_bytes(job),
        checkpoint_every_s=every_s,
        parts_of_step=tuple((name, share) for name, share in parts.items() if share is not None),
    )


def _not_followed(job: JobFile, times: ChangeTimes | None) -> tuple[str, ...]:
    """What the file says and such a replay does not do."""
    return (COSTS_ALIKE,) if times is not None and job.prefer is Prefer.TOTAL else ()
