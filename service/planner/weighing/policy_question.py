"""What the policy is asked about a job of the service: its nodes by pool and place, their prices and lives, its goal.

A pool of the question is nodes of one pool, in one place, sold in one way. Pure.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf

from agent.protocol.jobfile import OnePlace, PolicyRules
from service.planner.change_cost import state_bytes
from service.planner.inputs import PlanInputs, PlanNode, PoolMarket
from service.policy.types import (
    POOLS_MAX,
    Candidate,
    Goal,
    Market,
    PolicyInputs,
    PolicyKnobs,
    PoolView,
    StandingWorld,
)

ANYWHERE = "here"
"""All nodes that a job may use can be in one world."""
NO_ZONE = "no zone"
VIEWS_OF_ONE = 2
"""A pool in one place is asked about as it is priced, and on demand."""


@dataclass(frozen=True, slots=True)
class PoolSeen:
    """What a pool of the question stands for."""

    pool: str
    place: str
    market: Market


@dataclass(frozen=True, slots=True)
class PolicyQuestion:
    """What the policy is asked, and what its pools stand for, by their names there."""

    asked: PolicyInputs
    pools: Mapping[str, PoolSeen]
    within: OnePlace | None

    def name_of(self, node: PlanNode) -> str:
        """The pool of the question that the node is in."""
        return _name(node.pool, place_of(node, self.within), self.within)


def question(
    inputs: PlanInputs, policy: PolicyRules, nodes: Sequence[PlanNode], candidates: Sequence[Candidate]
) -> PolicyQuestion:
    """Of nodes whose prices are known."""
    pools, views = _pools(inputs, policy, nodes)
    standing = _standing(inputs, policy.within)
    if standing is not None:
        views = [_with_move(inputs, view, standing, pools) for view in views]
    on_demand = [each.on_demand_usd_per_hour for each in inputs.markets if each.on_demand_usd_per_hour is not None]
    asked = PolicyInputs(
        pools=tuple(views),
        candidates=tuple(candidates),
        usd_per_hour_on_demand=max(on_demand or [view.usd_per_hour for view in views], default=0.0),
        standing=standing,
        served_s=inputs.served_s,
        goal=_goal(inputs, policy),
        knobs=knobs_of(policy),
    )
    return PolicyQuestion(asked, pools, policy.within)


def knobs_of(policy: PolicyRules) -> PolicyKnobs:
    """Of a job that says so in its file."""
    return PolicyKnobs(
        gain_min=policy.gain_min,
        spares_max=policy.spares_max,
        on_demand=policy.on_demand,
        patience_s=policy.patience_s,
        start_s=policy.start_s,
        is_reproducible=policy.keep_tp,
    )


def place_of(node: PlanNode, within: OnePlace | None) -> str:
    """Where the node is: nodes of one place can be in one world."""
    match within:
        case None:
            return ANYWHERE
        case OnePlace.ZONE:
            return node.zone or NO_ZONE
        case OnePlace.POOL:
            return node.pool


def in_one_place(inputs: PlanInputs) -> PlanInputs:
    """With the nodes of one place only, where a world may not lie in two: of the place that it is in, as long as enough
    of its nodes are left there, or else of the one with the most slots."""
    within = inputs.job.policy.within if inputs.job.policy is not None else None
    if within is None or not inputs.nodes:
        return inputs
    members = set(inputs.world.node_ids()) if inputs.world is not None else set()
    slots: Counter[str] = Counter()
    mine: Counter[str] = Counter()
    count: Counter[str] = Counter()
    for node in inputs.nodes:
        place = place_of(node, within)
        slots[place] += node.slots
        count[place] += 1
        mine[place] += node.node_id in members
    enough = [place for place in slots if count[place] >= inputs.job.nodes.min] or list(slots)
    chosen = min(enough, key=lambda place: (-mine[place], -slots[place], place))
    return replace(inputs, nodes=tuple(node for node in inputs.nodes if place_of(node, within) == chosen))


def grouped_by_place(inputs: PlanInputs, ranked: Sequence[PlanNode]) -> list[tuple[PlanNode, ...]]:
    """The nodes of each place, in their order: first those of the place that `in_one_place` chooses. One empty group
    where there are no nodes."""
    within = inputs.job.policy.within if inputs.job.policy is not None else None
    groups: dict[str, list[PlanNode]] = {}
    if first := in_one_place(inputs).nodes:
        groups[place_of(first[0], within)] = []
    for node in ranked:
        groups.setdefault(place_of(node, within), []).append(node)
    return [tuple(nodes) for nodes in groups.values()] or [()]


def _name(pool: str, place: str, within: OnePlace | None) -> str:
    return f"{pool} in {place}" if within is OnePlace.ZONE else pool


def _pools(
    inputs: PlanInputs, policy: PolicyRules, nodes: Sequence[PlanNode]
) -> tuple[dict[str, PoolSeen], list[PoolView]]:
    """Each pool in each place where nodes of it are, and those that could be bought where no place need be known. Where
    they are more than a policy may be asked about, those that the job is in come first, then those with most nodes."""
    held = Counter((node.pool, place_of(node, policy.within)) for node in nodes)
    prices = {node.pool: node.usd_per_hour for node in nodes if node.usd_per_hour is not None}
    markets = {market.pool: market for market in inputs.markets}
    where = set(held)
    if policy.within is not OnePlace.ZONE:
        where |= {(pool, ANYWHERE if policy.within is None else pool) for pool in markets}
    seen: dict[str, PoolSeen] = {}
    views: list[PoolView] = []
    members = set(inputs.world.node_ids()) if inputs.world is not None else set()
    mine = {(node.pool, place_of(node, policy.within)) for node in nodes if node.node_id in members}
    first = sorted(where, key=lambda each: (each not in mine, -held[each], each))
    for pool, place in sorted(first[: POOLS_MAX // VIEWS_OF_ONE]):
        market = markets.get(pool, PoolMarket(pool))
        usd = prices.get(pool, market.usd_per_hour)
        if usd is None:
            continue
        name = _name(pool, place, policy.within)
        for view in _views(replace(market, usd_per_hour=usd), name, place, held[(pool, place)], policy):
            if view.obtainable:
                views.append(view)
                seen[view.pool] = PoolSeen(pool, place, view.market)
    return seen, views


def _views(market: PoolMarket, name: str, place: str, held: int, policy: PolicyRules) -> list[PoolView]:
    """As it is priced, and where that is spot also on demand. What costs as much as on demand is not taken back."""
    usd, on_demand = market.usd_per_hour or 0.0, market.on_demand_usd_per_hour
    acquire_s = policy.acquire_s
    if on_demand is not None and usd >= on_demand:
        offered = market.offered if policy.on_demand else 0
        return [PoolView(name, place, Market.ON_DEMAND, usd, held=held, offered=offered, acquire_s=acquire_s)]
    spot = PoolView(
        name,
        place,
        Market.SPOT,
        usd,
        held=held,
        offered=market.offered,
        acquire_s=acquire_s,
        life_s=inf if market.life_s is None else market.life_s,
        group_sizes=market.group_sizes or ((1, 1.0),),
        at_risk=market.ours,
    )
    if on_demand is None or not policy.on_demand:
        return [spot]
    offered = market.on_demand_offered
    bought = PoolView(f"{name} on demand", place, Market.ON_DEMAND, on_demand, offered=offered, acquire_s=acquire_s)
    return [spot, bought]


def _standing(inputs: PlanInputs, within: OnePlace | None) -> StandingWorld | None:
    """What the job runs on: whole where all of its nodes stay, and lie in one place."""
    world = inputs.world
    if world is None:
        return None
    members = set(world.node_ids())
    here = [node for node in inputs.nodes if node.node_id in members]
    places = Counter(place_of(node, within) for node in here)
    place = min(places, key=lambda each: (-places[each], each), default=ANYWHERE)
    use = Counter(_name(node.pool, place, within) for node in here if place_of(node, within) == place)
    is_whole = len(here) == len(members) and len(places) == 1
    return StandingWorld(str(world.layout), len(members), place, tuple(sorted(use.items())), is_whole=is_whole)


def _with_move(inputs: PlanInputs, view: PoolView, standing: StandingWorld, pools: Mapping[str, PoolSeen]) -> PoolView:
    """What leaves the pools that the job is in costs egress where the state goes to another place."""
    if view.place == standing.place:
        return view
    rates = {market.pool: market.egress_usd_per_gb or 0.0 for market in inputs.markets}
    left = [rates.get(pools[name].pool, 0.0) for name, _ in standing.use if name in pools]
    return replace(view, move_usd=max(left, default=0.0) * state_bytes(inputs.job) / 1e9)


def _goal(inputs: PlanInputs, policy: PolicyRules) -> Goal:
    left = inputs.remaining
    if left is None:
        return Goal(usd_per_mtok=policy.usd_per_mtok)
    tokens = inputs.job.global_batch * inputs.job.model.seq_length
    return Goal(
        usd_per_mtok=policy.usd_per_mtok,
        tokens_left=float(left.steps * tokens),
        deadline_in_s=inf if left.deadline_in_s is None else left.deadline_in_s,
        budget_left_usd=inf if left.usd is None else left.usd,
    )
