"""Two policies to compare with, behind the same Protocol: take what there is, and Uniform Progress. Pure."""

from math import inf

from service.policy.choosing import decide, verdict_of
from service.policy.types import (
    Market,
    PolicyDecision,
    PolicyInputs,
    PolicyVerdict,
    PoolView,
    ScoredOption,
)
from service.policy.utility import curve_of


class ReactivePolicy:
    """Holds every spot node that it can get and runs the fastest layout on those that are up, at once and always."""

    name = "reactive"

    def decide(self, inputs: PolicyInputs) -> PolicyDecision:
        spot = [pool for pool in inputs.pools if pool.market is Market.SPOT]
        places = sorted({pool.place for pool in spot}, key=lambda place: (-_up(spot, place), place))
        curve = curve_of(inputs.candidates)
        for place in places:
            up = _up(spot, place)
            best = max((each for each in curve.best if each.nodes <= up), key=lambda each: each.nodes, default=None)
            if best is None:
                continue
            hold = tuple((pool.pool, pool.obtainable) for pool in spot if pool.place == place)
            usd = sum(pool.usd_per_hour * (pool.held + pool.coming) for pool in spot if pool.place == place)
            option = ScoredOption(best.layout, place, best.nodes, hold, best.tokens_per_s, usd, 0.0)
            return PolicyDecision(verdict_of(inputs, option), f"the fastest layout on {up} nodes", option, (option,))
        hold = tuple((pool.pool, pool.obtainable) for pool in spot)
        waiting = ScoredOption("", "", 0, hold, 0.0, sum(pool.usd_per_hour * pool.held for pool in spot), 0.0)
        return PolicyDecision(PolicyVerdict.PAUSE, "no layout fits what is up", waiting)


class UniformProgressPolicy:
    """Uniform Progress (Can't be late, NSDI 2024), for a gang that is one node here: spot wherever it is offered; else
    on-demand while progress is behind the straight line to the deadline. On-demand is left for spot only when progress
    is ahead by two starts, and never once what is left needs all of the time."""

    name = "uniform_progress"

    def decide(self, inputs: PolicyInputs) -> PolicyDecision:
        goal, standing = inputs.goal, inputs.standing
        if goal.deadline_in_s == inf or not inputs.candidates:
            return decide(inputs)
        candidate = inputs.candidates[0]
        start_s = inputs.knobs.rescued_s
        needs_s = goal.tokens_left / candidate.tokens_per_s
        done_s = goal.tokens_done / candidate.tokens_per_s
        line = (done_s + needs_s) / (goal.elapsed_s + goal.deadline_in_s)
        spot = sorted(
            (pool for pool in inputs.pools if pool.market is Market.SPOT and pool.held + pool.offered),
            key=lambda pool: (not pool.held, pool.usd_per_hour, pool.pool),
        )
        paid = [pool for pool in inputs.pools if pool.market is Market.ON_DEMAND]
        is_on_demand = standing is not None and any(pool.held for pool in paid)
        is_on_spot = standing is not None and not is_on_demand and bool(spot) and spot[0].held > 0
        must = goal.deadline_in_s < needs_s + 2 * start_s + inputs.knobs.decides_every_s
        is_behind = done_s < goal.elapsed_s * line
        is_ahead = done_s >= (goal.elapsed_s + 2 * start_s) * line
        if is_on_spot:
            return _run(inputs, spot[0], "spot until it is taken")
        if must or (is_on_demand and not is_ahead):
            return _run(inputs, paid[0], "on-demand: no time is left" if must else "on-demand until well ahead")
        if spot:
            return _run(inputs, spot[0], "spot is offered")
        if is_behind:
            return _run(inputs, paid[0], "on-demand: behind uniform progress")
        return PolicyDecision(PolicyVerdict.PAUSE, "not behind uniform progress, and no spot is offered")


def _up(pools: list[PoolView], place: str) -> int:
    return sum(pool.held for pool in pools if pool.place == place)


def _run(inputs: PolicyInputs, pool: PoolView, reason: str) -> PolicyDecision:
    candidate = inputs.candidates[0]
    option = ScoredOption(
        candidate.layout, pool.place, 1, ((pool.pool, 1),), candidate.tokens_per_s, pool.usd_per_hour, 0.0
    )
    return PolicyDecision(verdict_of(inputs, option), reason, option, (option,))
