"""How many nodes are worth their price to a job that says what a token is worth. Pure.

The policy weighs the best layout for each number of nodes by what its tokens bring and its nodes cost. It decides on
measured steps only: before the first, and wherever a price is not known, a job takes all nodes that make it faster.
"""

from collections import Counter
from dataclasses import dataclass, replace

from service.planner.choices import Candidates, best_choice, lies_whole, most_nodes, step_times
from service.planner.inputs import PlanInputs, PlanNode
from service.planner.placement import preferred
from service.policy.choosing import UtilityPolicy
from service.policy.types import Candidate, Goal, Market, PolicyInputs, PolicyKnobs, PoolView, StandingWorld

COUNTS_MAX = 32
"""So many numbers of nodes are weighed, evenly spread where there are more."""
PLACE = "here"
"""All nodes that a job may use can be in one world."""


@dataclass(frozen=True, slots=True)
class Worth:
    """The inputs with the nodes that are worth their price, and why these."""

    inputs: PlanInputs
    reason: str


def worth_their_price(inputs: PlanInputs, known: Candidates) -> Worth | None:
    """None where the job does not ask, or where it cannot be said."""
    policy = inputs.job.policy
    if policy is None or policy.usd_per_mtok is None or not inputs.step_seconds:
        return None
    ranked = preferred(inputs)
    prices = {node.pool: node.usd_per_hour for node in ranked if node.usd_per_hour is not None}
    if len(ranked) < inputs.job.nodes.min or any(node.usd_per_hour is None for node in ranked):
        return None
    held = Counter(node.pool for node in ranked)
    pools = tuple(PoolView(pool, PLACE, Market.SPOT, prices[pool], held=held[pool]) for pool in sorted(held))
    decision = UtilityPolicy().decide(
        PolicyInputs(
            pools=pools,
            candidates=_candidates(inputs, ranked, known),
            usd_per_hour_on_demand=max(prices.values()),
            standing=_standing(inputs),
            goal=Goal(usd_per_mtok=policy.usd_per_mtok),
            knobs=PolicyKnobs(gain_min=policy.gain_min, spares_max=0),
        )
    )
    at = f"at {policy.usd_per_mtok:g} USD per million tokens"
    if decision.option is None or decision.option.nodes < inputs.job.nodes.min:
        return Worth(inputs, f"no number of nodes is worth its price {at}, and the job goes on")
    left, kept = Counter(dict(decision.option.hold)), []
    for node in ranked:
        if left[node.pool] > 0:
            kept.append(node)
            left[node.pool] -= 1
    if len(kept) == len(ranked):
        return Worth(inputs, f"all of them are worth their price {at}")
    return Worth(replace(inputs, nodes=tuple(kept)), f"{len(kept)} of {len(ranked)} nodes are worth their price {at}")


def _candidates(inputs: PlanInputs, ranked: tuple[PlanNode, ...], known: Candidates) -> tuple[Candidate, ...]:
    """The best layout for each number of nodes, and the present one."""
    tokens = inputs.job.global_batch * inputs.job.model.seq_length
    least, most = inputs.job.nodes.min, most_nodes(inputs)
    counts = range(least, most + 1, max(1, -(-(most - least + 1) // COUNTS_MAX)))
    found = {}
    for count in {*counts, most}:
        best = best_choice(replace(inputs, nodes=ranked[:count]), known)
        if best is not None:
            found[count] = Candidate(
                str(best.layout), count, best.step.seconds, tokens, best.step.error, best.step.measured
            )
    world = inputs.world
    if world is not None and str(world.layout) not in {each.layout for each in found.values()}:
        step = step_times(inputs).of_layout(world.layout, whole=lies_whole(world.layout, world.members))
        nodes = len(world.node_ids())
        found[-nodes] = Candidate(str(world.layout), nodes, step.seconds, tokens, step.error, step.measured)
    return tuple(found[count] for count in sorted(found))


def _standing(inputs: PlanInputs) -> StandingWorld | None:
    world = inputs.world
    if world is None:
        return None
    members, pools = set(world.node_ids()), {node.node_id: node.pool for node in inputs.nodes}
    use = Counter(pools[name] for name in members if name in pools)
    whole = members <= set(pools)
    return StandingWorld(str(world.layout), len(members), PLACE, tuple(sorted(use.items())), is_whole=whole)
