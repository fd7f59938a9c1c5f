"""One trace under LiveR's policy, under what it is compared with, and against what could have been had. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from service.policy.choosing import UtilityPolicy
from service.policy.plain_policies import ReactivePolicy
from service.policy.types import Candidate, Goal, Policy, PolicyKnobs
from service.simulation.cluster_replay import ClusterRun, replay_cluster
from service.simulation.count_oracles import oracle_tokens
from service.simulation.machines.change_times import ChangeTimes
from service.simulation.machines.enacted import counted
from service.simulation.machines.machine_replay import replay_by_machines
from service.simulation.replay_ledger import hours_by_cause
from service.simulation.replay_setup import ReplaySetup, grid_of
from service.simulation.traces import CapacityTrace

RESTART_S, CHECKPOINT_EVERY_S = 55.0, 600.0
"""Of a restart from a checkpoint: 6.6 s of rendezvous, 43 s of restart and 5 s of building the model, as measured by
Parcae's authors on 32 V100 nodes; a checkpoint every ten minutes."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """The runs of one trace, and the bounds. The first run is LiveR's."""

    trace: CapacityTrace
    setup: ReplaySetup
    runs: tuple[ClusterRun, ...]
    names: tuple[str, ...]
    count_oracle_tokens: float
    victim_oracle_tokens: float

    def facts(self) -> dict[str, Any]:
        """What a program reads."""
        ours, hold_all = self.runs[0], self.runs[self.names.index("hold_all")]
        return {
            "trace": self.trace.name,
            "hours": self.trace.end_s / 3_600.0,
            "notice_s": self.setup.notice_s,
            "unannounced_share": self.setup.unannounced_share,
            "goodput": ours.goodput,
            "tokens": ours.tokens,
            "ideal_tokens": ours.ideal_tokens,
            "usd": ours.usd,
            "usd_per_mtok": ours.usd_per_mtok,
            "changes": ours.changes,
            "regret_count_oracle": _short_of(ours.tokens, self.count_oracle_tokens),
            "regret_victim_oracle": _short_of(ours.tokens, self.victim_oracle_tokens),
            "tokens_vs_hold_all": ours.tokens / hold_all.tokens if hold_all.tokens else 1.0,
            "usd_vs_hold_all": ours.usd_per_mtok / hold_all.usd_per_mtok - 1
            if hold_all.tokens and ours.tokens
            else 0.0,
            "tokens_lost_by": dict(ours.tokens_lost_by),
            "node_hours_by_cause": hours_by_cause(ours),
            "enacted": counted(ours.enacted),
            "handoffs_refused": len(ours.refused),
            "gave_up": ours.gave_up,
            "baselines": {
                name: {"goodput": run.goodput, "usd_per_mtok": run.usd_per_mtok if run.tokens else None}
                for name, run in zip(self.names[1:], self.runs[1:], strict=True)
            },
        }


def compare(
    trace: CapacityTrace,
    candidates: Sequence[Candidate],
    *,
    setup: ReplaySetup,
    goal: Goal | None = None,
    knobs: PolicyKnobs | None = None,
    times: ChangeTimes | None = None,
) -> Comparison:
    """Replays the trace under each policy with the same losses. None gets more nodes than the job can use: `hold_all`
    as many spares as ours may have, and those that know no spares none. With `times` the product's machines carry the
    changes, but for those of `checkpoint_restart`, which has no such machines."""
    knobs, grid = knobs or PolicyKnobs(), grid_of(trace, setup)
    restarting = tuple(replace(each, change_s=RESTART_S) for each in candidates)
    restarts = replace(setup, checkpoint_every_s=CHECKPOINT_EVERY_S)
    keeps, spareless = replace(knobs, releases=False), replace(knobs, spares_max=0)

    def run(policy: Policy, its_knobs: PolicyKnobs) -> ClusterRun:
        if times is None:
            return replay_cluster(trace, candidates, policy, setup=setup, knobs=its_knobs, goal=goal)
        return replay_by_machines(trace, candidates, policy, setup=setup, times=times, knobs=its_knobs, goal=goal)

    runs = {
        "liver": run(UtilityPolicy(), knobs),
        "hold_all": run(UtilityPolicy(), keeps),
        "reactive": run(ReactivePolicy(), spareless),
        "checkpoint_restart": replay_cluster(
            trace, restarting, ReactivePolicy(), setup=restarts, knobs=spareless, goal=goal
        ),
    }
    return Comparison(
        trace,
        setup,
        tuple(runs.values()),
        tuple(runs),
        oracle_tokens(grid, candidates, knows_victims=False),
        oracle_tokens(grid, candidates, knows_victims=True),
    )


def _short_of(tokens: float, oracle: float) -> float:
    return 1.0 - tokens / oracle if oracle > 0 else 0.0
