"""What is decided before it happens: plans for likely losses, spares, the layout for every number of nodes. Pure.

A loss that no standing plan covers is planned by the agents themselves, from the layouts by count: so only as many
plans are made as travel and are made at no cost worth naming.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from itertools import chain, combinations, islice
from math import comb, inf

from agent.protocol.sync import LayoutForCount, StandingPlan
from service.planner.by_count import BestByCount
from service.planner.choices import Candidates, Choice, best_choice, lies_near, step_times
from service.planner.decision import decide, seconds_of, too_few_ranks
from service.planner.feasibility import CANDIDATES_MAX
from service.planner.inputs import LossPlan, PlanInputs, PlannerVerdict, PlanNode, PoolMarket
from service.planner.placement import preferred
from service.planner.weighing.policy_question import in_one_place

SEATS_IN_PLANS_MAX = 16_384
"""So many ranks are named in the standing plans of a job. Of a larger job the agents seat the ranks themselves."""
DOMAINS_MAX, GROUPS = 16, (1, 2, 4, 8, 16, 32)
GROUPS_IN_PLANS_MAX = 64
"""So many groups of nodes that a pool may lose at once have a plan each, the likeliest first."""
GROUP_NODES_MAX = 16
"""A larger group is one of too many to have a plan of its own, but for a whole zone or pool."""
SIZES_SHOWN_MAX = 4
"""So many sizes of groups are shown of each pool, those that were lost most often."""
SPARES_MAX = 4
"""So many free nodes the agents of a job know, for losses in a row that the service does not hear of."""


def standing_plans(inputs: PlanInputs, known: Candidates | None = None) -> tuple[StandingPlan, ...]:
    """What the agents do at once, without asking the service, if exactly these nodes are lost: each node of the world,
    each zone and each pool of a world in several, and the groups that a pool is likely to lose at once, by the losses
    that were seen; as many as SEATS_IN_PLANS_MAX allows."""
    world = inputs.world
    if world is None:
        return ()
    known, digest, plans, seats = known or Candidates.of(inputs), inputs.digest(), [], 0
    members, planned = set(world.node_ids()), set[frozenset[str]]()
    for gone in chain(((node_id,) for node_id in world.node_ids()), _domains(inputs).values(), _likely_groups(inputs)):
        leaving = tuple(node_id for node_id in gone if node_id in members)
        if frozenset(leaving) in planned:
            continue
        planned.add(frozenset(leaving))
        seats += len(world.members)
        if seats > SEATS_IN_PLANS_MAX and plans:
            break
        decision = decide(without(inputs, gone), known)
        target = decision.target if decision.verdict is PlannerVerdict.MOVE else None
        plans.append(
            StandingPlan(
                parent=world.generation, leaving=leaving, target=target, plan_digest=digest, reason=decision.reason
            )
        )
    return tuple(plans)


def loss_plans(inputs: PlanInputs, known: Candidates | None = None) -> tuple[LossPlan, ...]:
    """What the job would run in after each kind of likely loss, with its step: one or several of its nodes, by their
    slots the largest first, as many as a pool has lost at once, and each zone and pool that it is in. No ranks are
    placed."""
    world = inputs.world
    if world is None:
        return ()
    known = known or Candidates.of(inputs)
    now = step_times(inputs).of_layout(world.layout, near=lies_near(world.layout, world.members))
    found = []
    for what, leaving in _kinds(inputs):
        left = in_one_place(without(inputs, leaving))
        best = best_choice(left, known) if len(left.nodes) >= inputs.job.nodes.min else None
        if best is None:
            ready = f"{len(left.nodes)} nodes are left, the job needs at least nodes.min {inputs.job.nodes.min}"
            reason = ready if len(left.nodes) < inputs.job.nodes.min else "no layout fits the nodes that are left"
            found.append(LossPlan(what, len(leaving), None, None, None, None, reason))
            continue
        slower = best.step.seconds / now.seconds if now.seconds > 0 else None
        reason = f"{best.layout}, {seconds_of(best.step)} per step{best.spread}"
        found.append(LossPlan(what, len(leaving), str(best.layout), best.step.seconds, best.step.error, slower, reason))
    return tuple(found)


def without(inputs: PlanInputs, leaving: tuple[str, ...]) -> PlanInputs:
    """The same without these nodes. Nothing is bought as fast as a loss comes."""
    gone = set(leaving)
    lost = Counter(node.pool for node in inputs.nodes if node.node_id in gone)
    markets = tuple(
        replace(
            market,
            offered=0,
            on_demand_offered=0,
            ours=None if market.ours is None else max(0, market.ours - lost[market.pool]),
        )
        for market in inputs.markets
    )
    return replace(inputs, nodes=tuple(node for node in inputs.nodes if node.node_id not in gone), markets=markets)


def _kinds(inputs: PlanInputs) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Each kind of loss once: nodes with as many slots are one kind."""
    slots = {node.node_id: node.slots for node in inputs.nodes}
    members = [name for name in (inputs.world.node_ids() if inputs.world else ()) if name in slots]
    ranked = sorted(members, key=lambda name: -slots[name])
    for size, count in sorted(Counter(slots[name] for name in members).items(), reverse=True):
        first = next(name for name in ranked if slots[name] == size)
        yield f"one of {count} nodes with {size} slots", (first,)
    for count in GROUPS:
        if 1 < count < len(members):
            yield f"any {count} nodes", tuple(ranked[:count])
    pools = _members_by_pool(inputs)
    for market in inputs.markets:
        there = sorted(pools.get(market.pool, ()), key=lambda name: -slots[name])
        often = sorted(market.group_sizes, key=lambda each: (-each[1], each[0]))
        for count, share in [each for each in often if 1 < each[0] < len(there)][:SIZES_SHOWN_MAX]:
            yield f"{count} nodes of pool {market.pool}, {share:.0%} of its losses", tuple(there[:count])
    yield from _domains(inputs).items()


def _domains(inputs: PlanInputs) -> dict[str, tuple[str, ...]]:
    """All nodes of each zone and of each pool that the world is in, free ones too, where it has more than one node
    there; none of the zones where all of its nodes are in one, and of the pools alike."""
    members = set(inputs.world.node_ids() if inputs.world else ())
    found: dict[str, tuple[str, ...]] = {}
    for kind, name_of in (("zone", _zone), ("pool", _pool)):
        names = sorted({name_of(node) for node in inputs.nodes if node.node_id in members})
        for name in names[:DOMAINS_MAX] if len(names) > 1 else ():
            leaving = tuple(node.node_id for node in inputs.nodes if name_of(node) == name)
            if name and len(members & set(leaving)) > 1:
                found[f"{kind} {name}"] = leaving
    return found


def _zone(node: PlanNode) -> str:
    return node.zone


def _pool(node: PlanNode) -> str:
    return node.pool


def _members_by_pool(inputs: PlanInputs) -> dict[str, list[str]]:
    """The nodes of the world that are up, in rank order."""
    pool_of = {node.node_id: node.pool for node in inputs.nodes}
    found: dict[str, list[str]] = {}
    for name in inputs.world.node_ids() if inputs.world else ():
        if name in pool_of:
            found.setdefault(pool_of[name], []).append(name)
    return found


def _likely_groups(inputs: PlanInputs) -> Iterator[tuple[str, ...]]:
    """Members of one pool that may go together, the likeliest sets first: of a loss of as many nodes of the pool as it
    has lost at once before, each of ours is as likely to be one."""
    found: list[tuple[float, list[str], int]] = []
    pools = _members_by_pool(inputs)
    for market in inputs.markets:
        members = pools.get(market.pool, [])
        for count in range(2, min(len(members), GROUP_NODES_MAX) + 1):
            if chance := _chance_of_set(market, len(members), count):
                found.append((chance, members, count))
    ranked = sorted(found, key=lambda each: (-each[0], each[2], each[1]))
    return islice(
        chain.from_iterable(combinations(members, count) for _, members, count in ranked), GROUPS_IN_PLANS_MAX
    )


def _chance_of_set(market: PoolMarket, members: int, count: int) -> float:
    """How often, a second, the pool loses exactly `count` given ones of the job's `members` nodes there, and of our
    other nodes there any. 0 where its life is not known."""
    ours = max(market.ours or 0, members)
    others, life_s = ours - members, market.life_s or inf
    sets = (
        share * comb(others, size - count) / comb(ours, size)
        for size, share in market.group_sizes
        if count <= size <= ours
    )
    return sum(sets) / life_s


def spares(inputs: PlanInputs) -> tuple[str, ...]:
    """Free nodes that agents may take by themselves, the first choice first: at most as many as the world has nodes."""
    inputs = in_one_place(inputs)
    members = inputs.world.node_ids() if inputs.world is not None else ()
    free = tuple(node.node_id for node in preferred(inputs) if node.node_id not in members)
    return free[: min(SPARES_MAX, len(members))]


def layouts_by_count(inputs: PlanInputs, known: Candidates | None = None) -> tuple[LayoutForCount, ...]:
    """The layout for every number of nodes the job allows: one that fits whichever so many nodes are left; where none
    does, one that fits the largest of them."""
    job = inputs.job
    sizes = sorted(node.slots for node in inputs.nodes) or [1]
    sizes = [sizes[0]] * (job.nodes.min - len(sizes)) + sizes
    counts = range(job.nodes.min, min(job.nodes.max, len(sizes)) + 1)
    if known is None or len(inputs.nodes) < job.nodes.min:
        known = Candidates.of(replace(inputs, nodes=_fleet(inputs, sizes)))
    if job.layouts.pinned or len(known.by_step) >= CANDIDATES_MAX:
        # Pinned layouts depend on the number of nodes, and a list that was cut is made anew for each.
        pinned = {each.nodes for each in job.layouts.pinned} or set(counts)
        return tuple(
            _layout_for_count(inputs, known, sizes, count)
            if count in pinned
            else LayoutForCount(nodes=count, layout=None, reason=_not_pinned(count))
            for count in counts
        )
    times = step_times(replace(inputs, nodes=_fleet(inputs, sizes[:1])))
    smallest, largest = (
        BestByCount.of(known, row[: counts.stop - 1], job.nodes.min, times).choices for row in (sizes, sizes[::-1])
    )
    return tuple(
        _named(count, smallest[count], "")
        if count in smallest
        else _named(count, largest[count], _on_the_largest(sizes, count))
        if count in largest
        else _layout_for_count(inputs, known, sizes, count)
        for count in counts
    )


def _not_pinned(count: int) -> str:
    return f"no layout is pinned for {count} node{'s' * (count > 1)}"


def _named(count: int, best: Choice, which: str) -> LayoutForCount:
    reason = f"{best.layout}{which}, {seconds_of(best.step)} per step"
    return LayoutForCount(nodes=count, layout=best.layout, reason=reason)


def _on_the_largest(sizes: list[int], count: int) -> str:
    return f" on nodes with {sum(sizes[-count:])} slots"


def _layout_for_count(inputs: PlanInputs, known: Candidates, sizes: list[int], count: int) -> LayoutForCount:
    """Of one number of nodes, or why none fits."""
    pinned, why = bool(inputs.job.layouts.pinned), ""
    for slots, which in ((sizes[:count], ""), (sizes[-count:], _on_the_largest(sizes, count))):
        alone = replace(inputs, nodes=_fleet(inputs, slots), world=None)
        best = best_choice(alone, known)
        if best is not None and (not pinned or best.most == count):
            return _named(count, best, which)
        if best is None:
            why = too_few_ranks(alone)
    return LayoutForCount(nodes=count, layout=None, reason=why or f"no layout fits {count} nodes")


def _fleet(inputs: PlanInputs, slots: list[int]) -> tuple[PlanNode, ...]:
    """Nodes of these sizes, alike otherwise."""
    device = next((node.device for node in inputs.nodes if node.device), "")
    return tuple(PlanNode(f"any-{index}", size, device=device) for index, size in enumerate(slots))
