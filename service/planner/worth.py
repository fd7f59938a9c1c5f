"""How many nodes a job should use of those it may: by what its tokens are worth, its budget and its deadline. Pure.

The best layout for each number of nodes is weighed on measured steps only: before the first, a job takes all nodes that
make it faster. So it does where a price is not known, which nothing can be weighed without. It is never stopped here.
"""

from collections import Counter
from dataclasses import dataclass, replace
from math import inf

from service.planner.change_cost import expected_change
from service.planner.choices import Candidates, best_choice, lies_whole, most_nodes, step_times
from service.planner.goals import Alert, CountOption, Within, within_goals
from service.planner.inputs import PlanInputs, PlanNode, PoolMarket
from service.planner.placement import preferred
from service.policy.choosing import UtilityPolicy
from service.policy.types import (
    Candidate,
    Goal,
    Market,
    PolicyDecision,
    PolicyInputs,
    PolicyKnobs,
    PoolView,
    StandingWorld,
)

COUNTS_MAX = 32
"""So many numbers of nodes are weighed, evenly spread where there are more."""
POOLS_SHOWN_MAX = 3
HOUR_S = 3_600.0
PLACE = "here"
"""All nodes that a job may use can be in one world."""


@dataclass(frozen=True, slots=True)
class Weighed:
    """The inputs with the nodes that the job should use, and why these; what is wrong; what was weighed."""

    inputs: PlanInputs
    reason: str = ""
    alerts: tuple[tuple[Alert, str], ...] = ()
    options: tuple[CountOption, ...] = ()


def weighed(inputs: PlanInputs, known: Candidates) -> Weighed | None:
    """None where the job asks for nothing, or nothing can be said."""
    value, left = _usd_per_mtok(inputs), inputs.remaining
    ranked = preferred(inputs)
    unpriced = sorted({node.pool for node in ranked if node.usd_per_hour is None})
    alerts: tuple[tuple[Alert, str], ...] = ()
    if left is not None and left.usd is not None and unpriced:
        alerts = ((Alert.UNPRICED, f"its budget is not planned with: pool {unpriced[0]} has no price"),)
    asks = left is not None or (value is not None and not unpriced)
    if not asks or not inputs.step_seconds or len(ranked) < inputs.job.nodes.min:
        return Weighed(inputs, alerts=alerts) if alerts else None
    candidates = _candidates(inputs, ranked, known)
    if not candidates:
        return None
    by_price = value is not None and not unpriced
    options = _options(candidates, sorted(ranked, key=lambda node: node.usd_per_hour or 0.0) if by_price else ranked)
    within = Within(frozenset(option.nodes for option in options))
    if left is not None:
        within = within_goals(options, left, len(inputs.world.node_ids()) if inputs.world else None)
    alerts += within.alerts
    if by_price and value is not None:
        allowed = tuple(each for each in candidates if each.nodes in within.counts)
        decision = UtilityPolicy().decide(_asked(inputs, ranked, allowed, value))
        found = _by_price(inputs, ranked, decision, value)
        if found is not None:
            return replace(found, alerts=alerts, options=_with_worth(options, decision))
    best = min((each for each in options if each.nodes in within.counts), key=lambda each: (each.step_s, each.nodes))
    if within.counts == {option.nodes for option in options} or best.nodes == len(ranked):
        reason = f"no number of nodes is worth its price at {value:g} USD per million tokens" if by_price else ""
        return Weighed(inputs, reason and f"{reason}, and the job goes on", alerts, options)
    reason = f"{best.nodes} of {len(ranked)} nodes by what is left of its time and its budget"
    return Weighed(replace(inputs, nodes=ranked[: best.nodes]), reason, alerts, options)


def _usd_per_mtok(inputs: PlanInputs) -> float | None:
    return inputs.job.policy.usd_per_mtok if inputs.job.policy else None


def _asked(
    inputs: PlanInputs, ranked: tuple[PlanNode, ...], candidates: tuple[Candidate, ...], value: float
) -> PolicyInputs:
    """What the policy is asked, of nodes whose prices are known."""
    held = Counter(node.pool for node in ranked)
    prices = {node.pool: node.usd_per_hour or 0.0 for node in ranked}
    markets = {market.pool: market for market in inputs.markets}
    pools = tuple(_pool(markets.get(pool, PoolMarket(pool)), prices[pool], held[pool]) for pool in sorted(held))
    on_demand = [each.on_demand_usd_per_hour for each in inputs.markets if each.on_demand_usd_per_hour is not None]
    policy = inputs.job.policy
    return PolicyInputs(
        pools=pools,
        candidates=candidates,
        usd_per_hour_on_demand=max(on_demand or prices.values()),
        standing=_standing(inputs),
        goal=Goal(usd_per_mtok=value),
        knobs=PolicyKnobs(gain_min=policy.gain_min if policy else 0.0, spares_max=0),
    )


def _pool(market: PoolMarket, usd_per_hour: float, held: int) -> PoolView:
    """What costs as much as on demand is not taken back."""
    on_demand = market.on_demand_usd_per_hour
    if on_demand is not None and usd_per_hour >= on_demand:
        return PoolView(market.pool, PLACE, Market.ON_DEMAND, usd_per_hour, held=held)
    return PoolView(
        market.pool,
        PLACE,
        Market.SPOT,
        usd_per_hour,
        held=held,
        life_s=inf if market.life_s is None else market.life_s,
        group_sizes=market.group_sizes or ((1, 1.0),),
    )


def _by_price(
    inputs: PlanInputs, ranked: tuple[PlanNode, ...], decision: PolicyDecision, value: float
) -> Weighed | None:
    """The nodes that the policy holds; None where none are worth their price."""
    at = f"at {value:g} USD per million tokens"
    if decision.option is None or decision.option.nodes < inputs.job.nodes.min:
        return None
    left, kept = Counter(dict(decision.option.hold)), []
    for node in ranked:
        if left[node.pool] > 0:
            kept.append(node)
            left[node.pool] -= 1
    if len(kept) == len(ranked):
        return Weighed(inputs, f"all of them are worth their price {at}{_lives(inputs)}")
    reason = f"{len(kept)} of {len(ranked)} nodes are worth their price {at}{_lives(inputs)}"
    return Weighed(replace(inputs, nodes=tuple(kept)), reason)


def _lives(inputs: PlanInputs) -> str:
    """When the next losses are expected, for a reason: of the pools that lose nodes first."""
    known = sorted(
        (each.life_s, each.pool, f"{each.losses} losses in {each.watched_h:g} h")
        for each in inputs.markets
        if each.life_s is not None
    )
    told = (f"{pool} in {life_s / HOUR_S:.2g} h, after {seen}" for life_s, pool, seen in known[:POOLS_SHOWN_MAX])
    return f"; next losses expected of {', '.join(told)}" if known else ""


def _options(
    candidates: tuple[Candidate, ...], nodes: list[PlanNode] | tuple[PlanNode, ...]
) -> tuple[CountOption, ...]:
    """The fastest for each number of nodes, which are the first of `nodes`."""
    found: dict[int, CountOption] = {}
    for each in candidates:
        prices = [node.usd_per_hour for node in nodes[: each.nodes]]
        usd = None if None in prices else sum(price for price in prices if price is not None)
        if each.nodes not in found or each.step_time_s < found[each.nodes].step_s:
            found[each.nodes] = CountOption(each.nodes, each.layout, each.step_time_s, usd)
    return tuple(found[count] for count in sorted(found))


def _with_worth(options: tuple[CountOption, ...], decision: PolicyDecision) -> tuple[CountOption, ...]:
    worth = {(each.layout, each.nodes): each.utility_usd_per_hour for each in reversed(decision.alternatives)}
    return tuple(replace(each, usd_per_hour_worth=worth.get((each.layout, each.nodes))) for each in options)


def _candidates(inputs: PlanInputs, ranked: tuple[PlanNode, ...], known: Candidates) -> tuple[Candidate, ...]:
    """The best layout for each number of nodes, and the present one."""
    tokens = inputs.job.global_batch * inputs.job.model.seq_length
    change_s = expected_change(inputs.job, inputs.changes).lost_s if inputs.markets else 0.0
    least, most = inputs.job.nodes.min, most_nodes(inputs)
    counts = range(least, most + 1, max(1, -(-(most - least + 1) // COUNTS_MAX)))
    found = {}
    for count in {*counts, most}:
        best = best_choice(replace(inputs, nodes=ranked[:count]), known)
        if best is not None:
            found[count] = Candidate(
                str(best.layout), count, best.step.seconds, tokens, best.step.error, best.step.measured, change_s
            )
    world = inputs.world
    if world is not None and str(world.layout) not in {each.layout for each in found.values()}:
        step = step_times(inputs).of_layout(world.layout, whole=lies_whole(world.layout, world.members))
        nodes = len(world.node_ids())
        found[-nodes] = Candidate(str(world.layout), nodes, step.seconds, tokens, step.error, step.measured, change_s)
    return tuple(found[count] for count in sorted(found))


def _standing(inputs: PlanInputs) -> StandingWorld | None:
    world = inputs.world
    if world is None:
        return None
    members, pools = set(world.node_ids()), {node.node_id: node.pool for node in inputs.nodes}
    use = Counter(pools[name] for name in members if name in pools)
    whole = members <= set(pools)
    return StandingWorld(str(world.layout), len(members), PLACE, tuple(sorted(use.items())), is_whole=whole)
