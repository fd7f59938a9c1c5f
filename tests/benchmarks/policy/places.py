"""Jobs with a deadline in many places, prices by month, and the start on the first node against the start as a gang."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from statistics import mean, median
from typing import Any

from service.planner.change_cost import STATE_BYTES_PER_PARAMETER, ChangeCost
from service.policy.choosing import UtilityPolicy
from service.policy.plain_policies import UniformProgressPolicy
from service.policy.remembering import RememberingPolicy
from service.policy.types import Candidate, Policy, PolicyKnobs
from service.simulation.cluster_replay import replay_cluster
from service.simulation.deadline_bound import least_cost_usd
from service.simulation.deadline_replay import DeadlineRun, replay
from service.simulation.moving import MoveCosts, moves_between
from service.simulation.places import DeadlineJob, PlaceSeries
from service.simulation.replay_setup import ReplaySetup
from tests.benchmarks.policy.clusters import LARGE, PARAMETERS, SMALL
from tests.benchmarks.policy.data import (
    V100_ON_DEMAND_ZONE,
    h100,
    h100_on_demand_zone,
    links,
    monthly_prices,
    v100,
    zone_trace,
)

HOUR_S = 3_600.0
RATIOS = (1.0, 1.05, 1.1, 1.15, 1.2, 1.3, 1.5, 2.0, 3.0)
MONTHS_RATIO = 1.5
MOVED_RATIOS = (1.1, 1.5, 2.0)
WORK_S, START_S = 40 * HOUR_S, 600.0
WATCHED_S = 2 * 24 * HOUR_S
"""The policy has seen so much of the offers before the job begins."""
WINDOWS = 3
GANG, RUNS_S = 16, 24 * HOUR_S
POLICIES: tuple[Policy, ...] = (UtilityPolicy(), UniformProgressPolicy())


def deadline_cases(folder: Path, cost: ChangeCost) -> Iterator[dict[str, Any]]:
    """Every deadline ratio on both sets of zones, over windows spread evenly."""
    del cost
    for name, series in (("h100_13_zones", h100(folder)[0]), ("v100_9_zones", v100(folder))):
        for ratio in RATIOS:
            yield deadline_case(name, series, ratio, WINDOWS)


def moving_cases(folder: Path, cost: ChangeCost) -> Iterator[dict[str, Any]]:
    """Some of them again where the state must come along: of GPT-6.7B to the H100, of GPT-1.5B to the V100. Runs and
    bound pay for its bytes and wait for the link."""
    del cost
    found = links(folder)
    for name, series, zone, model in (
        ("h100_13_zones", h100(folder)[0], h100_on_demand_zone(folder), LARGE),
        ("v100_9_zones", v100(folder), V100_ON_DEMAND_ZONE, SMALL),
    ):
        moved_bytes = STATE_BYTES_PER_PARAMETER * PARAMETERS[model]
        moves = moves_between((*series.places, zone), found, state_bytes=moved_bytes)
        for ratio in MOVED_RATIOS:
            yield deadline_case(name, series, ratio, WINDOWS, moves) | {"mode": "deadline, moves paid", "model": model}


def deadline_case(
    name: str, series: PlaceSeries, ratio: float, windows: int, moves: MoveCosts | None = None
) -> dict[str, Any]:
    """Sums over the windows; each against the least that its window could have cost."""
    job = DeadlineJob(WORK_S, WORK_S * ratio + START_S, START_S, moves=moves)
    runs: dict[str, list[DeadlineRun]] = {policy.name: [] for policy in POLICIES}
    least = []
    for cut, begin in windows_of(series, job, windows):
        least.append(least_cost_usd(cut.cut(begin, cut.ticks), job))
        for policy in POLICIES:
            runs[policy.name].append(replay(cut, job, policy, begin=begin, knobs=PolicyKnobs()))
    ours, baseline = (runs[policy.name] for policy in POLICIES)
    over = [run.usd / usd - 1 for run, usd in zip(ours, least, strict=True)]
    return {
        "trace": name, "model": "gang", "mode": "deadline", "deadline_ratio": ratio, "windows": windows,
        "lost_s": START_S, "notice_s": 0.0, "unannounced_share": 0.0, "goodput": None, "regret_count_oracle": None,
        "regret_victim_oracle": None, "usd_per_mtok": None, "usd_vs_hold_all": None, "tokens_vs_hold_all": None,
        "usd": mean(run.usd for run in ours), "usd_least": mean(least),
        "usd_over_optimum": mean(run.usd for run in ours) / mean(least) - 1, "worst_window": max(over),
        "deadline_missed": sum(run.is_missed for run in ours), "moves": mean(run.moves for run in ours),
        "egress_usd": mean(run.egress_usd for run in ours),
        "baselines": {"uniform_progress": {
            "usd_over_optimum": mean(run.usd for run in baseline) / mean(least) - 1,
            "deadline_missed": sum(run.is_missed for run in baseline),
        }},
    }  # fmt: skip


def windows_of(series: PlaceSeries, job: DeadlineJob, windows: int) -> Iterator[tuple[PlaceSeries, int]]:
    """Parts of the series that end at the deadline, and the tick of each at which the job begins."""
    watched, length = int(WATCHED_S // series.tick_s), int(job.deadline_s // series.tick_s) + 1
    last = series.ticks - length
    for index in range(windows):
        begin = watched + (last - watched) * index // max(1, windows - 1)
        yield series.cut(begin - watched, begin + length), watched


def months(folder: Path) -> list[dict[str, Any]]:
    """The H100 zones at the prices of every month, one ratio and window; places without a price are left out."""
    series, regions = h100(folder)
    found = []
    for month, prices in sorted(monthly_prices(folder).items()):
        priced = [at for at, region in enumerate(regions) if region in prices]
        some = replace(
            series,
            places=tuple(series.places[at] for at in priced),
            offered=tuple(series.offered[at] for at in priced),
            usd_per_hour=tuple(series.usd_per_hour[at] for at in priced),
        )
        spot = [prices[regions[at]][0] for at in priced]
        case = deadline_case(month, some.priced(spot, min(prices[regions[at]][1] for at in priced)), MONTHS_RATIO, 1)
        kept = {name: case[name] for name in ("usd", "usd_over_optimum", "deadline_missed")}
        found.append({"month": month, "places": len(priced)} | kept)
    return found


def starts(folder: Path) -> dict[str, float]:
    """Sixteen nodes of one H100 in each zone, from every hour that the data have a day after: all at once, or from the
    first node on. What could be had is the free ideal."""
    series, _ = h100(folder)
    layouts = tuple(Candidate(f"DP{n}", n, 10.0 / n + 0.1, 1_000_000, change_s=5.0) for n in range(1, GANG + 1))
    per_hour, span = int(HOUR_S // series.tick_s), int(RUNS_S // series.tick_s)
    policy = RememberingPolicy(UtilityPolicy())
    sums, ratios = {"gang_tokens": 0.0, "first_node_tokens": 0.0, "obtainable_tokens": 0.0}, []
    hours = (series.ticks - span) // per_hour + 1
    for place in range(len(series.places)):
        for hour in range(hours):
            found = zone_trace(series, place, hour * per_hour, hour * per_hour + span)
            first, gang = (
                replay_cluster(found, layouts, policy, setup=ReplaySetup(gang=at_least, tick_s=series.tick_s))
                for at_least in (0, GANG)
            )
            sums["gang_tokens"] += gang.tokens
            sums["first_node_tokens"] += first.tokens
            sums["obtainable_tokens"] += first.ideal_tokens
            if first.ideal_tokens:
                ratios.append(first.goodput)
    return sums | {"runs": len(ratios), "median_ratio": median(ratios), "worst_ratio": min(ratios)}
