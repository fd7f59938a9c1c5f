"""Nodes of one pool: what is lost at changes of a fixed cost, of the fitted cost, with short notices, and by giving
nodes back."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import mean
from typing import Any

from service.planner.change_cost import STATE_BYTES_PER_PARAMETER, ChangeCost
from service.policy.choosing import UtilityPolicy
from service.policy.remembering import RememberingPolicy
from service.policy.types import (
    Candidate,
    Goal,
    PolicyDecision,
    PolicyInputs,
    PolicyKnobs,
    PolicyVerdict,
    ScoredOption,
)
from service.simulation.cluster_replay import ClusterRun, replay_cluster
from service.simulation.comparing import Comparison, compare
from service.simulation.count_oracles import oracle_tokens
from service.simulation.replay_setup import ReplaySetup, Victims, grid_of
from service.simulation.traces import CapacityTrace
from tests.benchmarks.policy.data import TRACES, long_steps, measured_layouts, trace

SPOT_USD, ON_DEMAND_USD = 0.918, 3.06
SMALL, LARGE = "gpt-1.5b", "gpt-6.7b"
PARAMETERS = {SMALL: 1.5e9, LARGE: 6.7e9}
FIXED_S = (2.0, 5.0)
DRAWS = 20
MINUTE_S = 60.0
A40_PARTS = 32
"""Of a batch of 1,024 as micro-batches of 32 samples. No version of LiveR keeps them: what that would bring."""
HOLDS_ALL = PolicyKnobs(releases=False)
"""Tokens first: no node is given back, so that the distance to the oracles is that of the choice of layouts."""
COUNTED = ReplaySetup(usd_per_hour=SPOT_USD, usd_per_hour_on_demand=ON_DEMAND_USD, victims=Victims.COUNTED)


def fixed_cases(folder: Path, cost: ChangeCost) -> Iterator[dict[str, Any]]:
    """A change costs 2 s, 5 s, or what the fitted model says; losses are announced as they happen."""
    for name in TRACES:
        for lost_s in (*FIXED_S, cost.lost_s(STATE_BYTES_PER_PARAMETER * PARAMETERS[SMALL])):
            mode = "fixed" if lost_s in FIXED_S else "fitted"
            layouts = measured_layouts(folder, SMALL, lost_s)
            found = compare(trace(folder, name), layouts, setup=COUNTED, knobs=HOLDS_ALL)
            case = case_of(found, SMALL, mode, lost_s)
            if name == "p3":
                case["baselines"] |= parcae_replayed(folder, layouts) | {"parcae_own_scores": parcae(folder)}
            yield case


def notice_cases(folder: Path, cost: ChangeCost) -> Iterator[dict[str, Any]]:
    """Notices of 30 s, some losses without; steps of a few seconds and of some 200 s."""
    del cost
    for name in TRACES:
        tables: list[tuple[str, Sequence[Candidate]]] = [(SMALL, measured_layouts(folder, SMALL, 5.0))]
        if name != "g4dn":
            tables.append(("gpt-3-6.7b-a40", long_steps(folder, 5.0)))
        for model, layouts in tables:
            for share in (0.0, 0.05, 0.1):
                setup = replace(
                    COUNTED, victims=Victims.NAMED, notice_s=30.0, unannounced_share=share, counts_steps=True
                )
                found = compare(trace(folder, name), layouts, setup=setup, knobs=HOLDS_ALL)
                yield case_of(found, model, "notices", 5.0)
                if model != SMALL:
                    kept = replace(setup, step_parts=A40_PARTS)
                    found = compare(trace(folder, name), layouts, setup=kept, knobs=HOLDS_ALL)
                    yield case_of(found, model, "notices, parts of steps kept", 5.0)


def release_cases(folder: Path, cost: ChangeCost) -> Iterator[dict[str, Any]]:
    """Nodes that buy nothing are given back, and take two minutes to come again; losses are drawn at random."""
    del cost
    for name in TRACES:
        for model in (LARGE, SMALL):
            yield released(trace(folder, name), measured_layouts(folder, model, 5.0), model)


def released(found: CapacityTrace, layouts: Sequence[Candidate], model: str) -> dict[str, Any]:
    """The mean over draws of who is lost, against holding all nodes with the same draws."""
    setup = replace(COUNTED, victims=Victims.DRAWN, acquire_s=120.0)
    grid = grid_of(found, setup)
    policy, ours, held = RememberingPolicy(UtilityPolicy()), [], []
    for seed in range(1, DRAWS + 1):
        drawn = replace(setup, seed=seed)
        ours.append(replay_cluster(found, layouts, policy, setup=drawn))
        held.append(replay_cluster(found, layouts, policy, setup=drawn, knobs=HOLDS_ALL))
    return {
        "trace": found.name, "model": model, "mode": "release", "lost_s": 5.0, "notice_s": 0.0,
        "unannounced_share": 0.0, "acquire_s": 120.0, "draws": DRAWS,
        "goodput": mean(run.goodput for run in ours),
        "regret_count_oracle": _regret(ours, oracle_tokens(grid, layouts, knows_victims=False)),
        "regret_victim_oracle": _regret(ours, oracle_tokens(grid, layouts, knows_victims=True)),
        "usd_per_mtok": mean(run.usd_per_mtok for run in ours),
        "usd_vs_hold_all": sum(run.usd for run in ours) / sum(run.tokens for run in ours)
        / (sum(run.usd for run in held) / sum(run.tokens for run in held)) - 1,
        "tokens_vs_hold_all": sum(run.tokens for run in ours) / sum(run.tokens for run in held),
        "usd_over_optimum": None, "deadline_missed": None,
        "baselines": {"hold_all": {"goodput": mean(run.goodput for run in held)}},
    }  # fmt: skip


def _regret(runs: Sequence[ClusterRun], oracle: float) -> float:
    return 1 - mean(run.tokens for run in runs) / oracle


def case_of(found: Comparison, model: str, mode: str, lost_s: float) -> dict[str, Any]:
    """One case as the report has it."""
    facts = found.facts()
    kept = ("trace", "notice_s", "unannounced_share", "goodput", "regret_count_oracle", "regret_victim_oracle",
            "usd_per_mtok", "usd_vs_hold_all", "tokens_vs_hold_all", "baselines", "tokens_lost_by",
            "node_hours_by_cause", "changes")  # fmt: skip
    case = {name: facts[name] for name in kept}
    ideal = facts["ideal_tokens"] or 1.0
    case["tokens_lost_by"] = {cause: tokens / ideal for cause, tokens in facts["tokens_lost_by"].items()}
    return case | {"model": model, "mode": mode, "lost_s": lost_s, "usd_over_optimum": None, "deadline_missed": None}


class Published:
    """What was decided elsewhere, minute by minute: the layout that is used, if it fits what is up."""

    def __init__(self, name: str, layouts: Sequence[str], candidates: Sequence[Candidate]) -> None:
        self.name = name
        self._layouts, self._candidates = layouts, {each.layout: each for each in candidates}

    def decide(self, inputs: PolicyInputs) -> PolicyDecision:
        """Holds all nodes, as those who published it did."""
        minute = min(int(inputs.goal.elapsed_s // MINUTE_S), len(self._layouts) - 1)
        pool = inputs.pools[0]
        chosen = self._candidates.get(self._layouts[minute])
        if chosen is None or chosen.nodes > pool.held:
            return PolicyDecision(PolicyVerdict.PAUSE, "the layout that was published does not fit")
        hold = ((pool.pool, pool.obtainable),)
        option = ScoredOption(chosen.layout, pool.place, chosen.nodes, hold, chosen.tokens_per_s, 0.0, 0.0)
        return PolicyDecision(PolicyVerdict.MOVE, self.name, option)


def parcae_replayed(folder: Path, layouts: Sequence[Candidate]) -> dict[str, dict[str, float]]:
    """Parcae's published decisions on the whole trace, with our costs of a change and our score."""
    rows = json.loads((folder / f"parcae/liveput_res-{SMALL}_p3_gbs128_mbs1.json").read_text())
    setup = replace(COUNTED, decides_every_s=MINUTE_S)
    # With tokens left, the policy is told the time.
    goal = Goal(tokens_left=1e18)
    found = {}
    for name in ("throughut-opt", "liveput-truth", "liveput-predict"):
        policy = Published(name, [f"PP{row[name][1]}xDP{row[name][0]}" for row in rows], layouts)
        run = replay_cluster(trace(folder, "p3"), layouts, policy, setup=setup, goal=goal)
        spelled = name.replace("throughut-opt", "reactive").replace("-", "_")
        found[f"parcae_{spelled}"] = {"goodput": run.goodput, "usd_per_mtok": run.usd_per_mtok}
    return found


def parcae(folder: Path) -> dict[str, float]:
    """Shares of the ideal of Parcae's published decisions on the whole trace, scored with its own costs of a change."""
    rows = json.loads((folder / "anchors/parcae_replay.json").read_text())
    row = next(row for row in rows if row["model"].startswith(SMALL) and row["seg"] == "full")
    return {key.removesuffix("_frac_ideal"): value for key, value in row.items() if key.endswith("_frac_ideal")}
