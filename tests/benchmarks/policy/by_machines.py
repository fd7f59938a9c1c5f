"""The same traces with every change carried by the product's machines, beside replays in which it is done at once."""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from service.planner.change_cost import STATE_BYTES_PER_PARAMETER, ChangeCost
from service.policy.choosing import UtilityPolicy
from service.policy.types import Candidate
from service.simulation.cluster_replay import ClusterRun, replay_cluster
from service.simulation.machines.change_times import ChangeTimes
from service.simulation.machines.enacted import counted
from service.simulation.machines.machine_replay import replay_by_machines
from service.simulation.replay_setup import ReplaySetup, Victims
from service.simulation.traces import CapacityTrace
from tests.benchmarks.policy.clusters import COUNTED, HOLDS_ALL, PARAMETERS, SMALL
from tests.benchmarks.policy.data import TRACES, long_steps, measured_layouts, trace

LOST_S = 5.0
USABLE = {120.0: 105 / 120, 30.0: 25 / 30}
"""Of the notices of AWS and of GCP."""
A40_PARAMETERS = 6.7e9


def machine_cases(folder: Path, cost: ChangeCost) -> Iterator[dict[str, Any]]:
    """GPT-1.5B with the notices of both clouds, and steps of some 200 s with those of 30 s."""
    del cost
    small = measured_layouts(folder, SMALL, LOST_S)
    for name in TRACES:
        found = trace(folder, name)
        for notice_s in USABLE:
            for share in (0.0, 0.05, 0.1):
                yield case_of(found, SMALL, small, _setup(notice_s, share), PARAMETERS[SMALL])
        if name != "g4dn":
            yield case_of(found, "gpt-3-6.7b-a40", long_steps(folder, LOST_S), _setup(30.0, 0.0), A40_PARAMETERS)


def _setup(notice_s: float, share: float) -> ReplaySetup:
    return replace(COUNTED, victims=Victims.NAMED, notice_s=notice_s, unannounced_share=share, counts_steps=True)


def case_of(
    found: CapacityTrace, model: str, layouts: Sequence[Candidate], setup: ReplaySetup, parameters: float
) -> dict[str, Any]:
    """Both replays of one setup, with no node given back, and how long each took."""
    times = ChangeTimes(state_bytes=STATE_BYTES_PER_PARAMETER * parameters, usable_share=USABLE[setup.notice_s])
    at_once, at_once_s = timed(lambda: replay_cluster(found, layouts, UtilityPolicy(), setup=setup, knobs=HOLDS_ALL))
    run, took_s = timed(
        lambda: replay_by_machines(found, layouts, UtilityPolicy(), setup=setup, times=times, knobs=HOLDS_ALL)
    )
    return {
        "trace": found.name, "model": model, "mode": "machines", "lost_s": LOST_S, "notice_s": setup.notice_s,
        "unannounced_share": setup.unannounced_share, "goodput": run.goodput, "goodput_at_once": at_once.goodput,
        "tokens_lost_by": {cause: tokens / run.ideal_tokens for cause, tokens in run.tokens_lost_by},
        "changes": run.changes, "changes_at_once": at_once.changes, "enacted": counted(run.enacted),
        "handoffs_refused": len(run.refused), "gave_up": run.gave_up, "took_s": took_s, "at_once_took_s": at_once_s,
    }  # fmt: skip


def timed(work: Callable[[], ClusterRun]) -> tuple[ClusterRun, float]:
    """With the processor time that it took."""
    begin = time.process_time()
    return work(), time.process_time() - begin
