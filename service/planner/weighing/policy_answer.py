"""What the policy's answer means for a job of the service: the nodes to run on, and what it should have. Pure."""

from collections import Counter
from collections.abc import Sequence

from service.planner.inputs import PlanInputs, PlanNode
from service.planner.weighing.policy_question import PolicyQuestion
from service.planner.weighing.wanted import PoolWant, WantedCapacity, said
from service.policy.types import PolicyDecision, PolicyVerdict, ScoredOption


def nodes_to_run_on(
    inputs: PlanInputs, asked: PolicyQuestion, ranked: Sequence[PlanNode], decision: PolicyDecision
) -> tuple[PlanNode, ...] | None:
    """The nodes of the option that the policy runs, in their order; None where nothing that is up is worth running."""
    option = decision.option
    if decision.verdict is PolicyVerdict.PAUSE or option is None or option.nodes < inputs.job.nodes.min:
        return None
    world, standing = inputs.world, asked.asked.standing
    if world is not None and standing is not None and decision.verdict is PolicyVerdict.STAY:
        if not standing.is_whole or (standing.layout, standing.place) != (option.layout, option.place):
            return None
        if dict(standing.use) == dict(option.use):
            members = set(world.node_ids())
            return tuple(node for node in ranked if node.node_id in members)
    kept = _taken(asked, ranked, dict(option.use), option.nodes, frozenset())
    kept |= _taken(asked, ranked, dict(option.hold), option.nodes - len(kept), kept)
    if len(kept) < option.nodes:
        return None
    return tuple(node for node in ranked if node.node_id in kept)


def wanted_of(
    inputs: PlanInputs,
    asked: PolicyQuestion,
    ranked: Sequence[PlanNode],
    run: Sequence[PlanNode] | None,
    decision: PolicyDecision,
) -> WantedCapacity | None:
    """What the job should have; None where the policy would have nothing. `run`: what it runs on, None where that is
    not the policy's choice: then nothing is given back."""
    best, policy = decision.best, inputs.job.policy
    if best is None or policy is None or not best.layout:
        return None
    hold, views = dict(decision.hold), {view.pool: view for view in asked.asked.pools}
    pools = []
    for name, seen in asked.pools.items():
        view = views[name]
        if view.held or hold.get(name):
            place = seen.place if asked.within is not None else ""
            pools.append(PoolWant(seen.pool, place, seen.market, view.usd_per_hour, view.held, hold.get(name, 0)))
    gives_back = _unused(inputs, asked, ranked, run, hold) if run is not None else ()
    reason = said(pools, gives_back, best.spares, policy.acquire_s)
    moved = _move(asked, best, decision.option if run is not None else None)
    return WantedCapacity(
        layout=best.layout,
        place=best.place if asked.within is not None else "",
        nodes=best.nodes,
        spares=best.spares,
        usd_per_hour=best.usd_per_hour,
        usd_per_hour_worth=best.utility_usd_per_hour,
        pools=tuple(pools),
        gives_back=gives_back,
        weighed=decision.alternatives,
        reason="; ".join(part for part in (moved, reason) if part),
    )


def _taken(
    asked: PolicyQuestion, ranked: Sequence[PlanNode], counts: dict[str, int], most: int, besides: frozenset[str]
) -> frozenset[str]:
    """The first nodes of each pool of the question, as many as it counts, `most` in all."""
    found: set[str] = set()
    for node in ranked:
        name = asked.name_of(node)
        if node.node_id in besides:
            counts[name] = counts.get(name, 0) - 1
    for node in ranked:
        name = asked.name_of(node)
        if len(found) < most and node.node_id not in besides and counts.get(name, 0) > 0:
            found.add(node.node_id)
            counts[name] -= 1
    return frozenset(found)


def _unused(
    inputs: PlanInputs, asked: PolicyQuestion, ranked: Sequence[PlanNode], run: Sequence[PlanNode], hold: dict[str, int]
) -> tuple[str, ...]:
    """Free nodes beyond what is held of their pool, if the policy was asked about it. Members that the job leaves are
    free only when it has left them."""
    members = set(inputs.world.node_ids()) if inputs.world is not None else set()
    busy = {node.node_id for node in run} | members
    used = Counter(asked.name_of(node) for node in ranked if node.node_id in {each.node_id for each in run})
    left = {name: count - used[name] for name, count in hold.items()}
    unused = []
    for node in ranked:
        name = asked.name_of(node)
        if node.node_id in busy or name not in asked.pools:
            continue
        if left.get(name, 0) > 0:
            left[name] -= 1
        else:
            unused.append(node.node_id)
    return tuple(sorted(unused))


def _move(asked: PolicyQuestion, best: ScoredOption, option: ScoredOption | None) -> str:
    """What going to another place costs, for a reason. `option`: what the job runs next; None where it goes on."""
    standing = asked.asked.standing
    if standing is None or best.place == standing.place:
        return ""
    view = next((each for each in asked.asked.pools if each.place == best.place), None)
    candidate = next((each for each in asked.asked.candidates if each.layout == best.layout), None)
    lost_s = max(candidate.change_s if candidate else 0.0, asked.asked.knobs.start_s)
    cost = f"{lost_s:.3g} s of training and {view.move_usd if view else 0.0:.2f} USD of egress"
    is_going = option is not None and option.place == best.place
    return f"{'moves' if is_going else 'wants to move'} from {standing.place} to {best.place}, which costs {cost}"
