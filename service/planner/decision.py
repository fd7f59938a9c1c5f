"""The planner: a target layout and its members, or why not; standing plans for every single loss. Pure."""

from dataclasses import replace

from agent.protocol.sync import LayoutForCount, StandingPlan
from agent.protocol.values import Placement
from liver_core.layout import Member, ParallelLayout
from liver_core.reshard import seat
from service.planner.feasibility import candidates
from service.planner.inputs import Alternative, LayoutUse, PlanInputs, PlannerDecision, PlannerVerdict, PlanNode
from service.planner.score import Score, score

GAIN_MIN = 0.03
"""The least predicted gain for which a job moves: predictions are not more accurate than this."""

STANDING_PLANS_MAX = 10_000
ALTERNATIVES_MAX, COUNTS_SHOWN_MAX = 16, 32
SPARES_MAX = 4
"""So many free nodes the agents of a job know, for losses in a row that the service does not hear of."""


def decide(inputs: PlanInputs) -> PlannerDecision:
    """What the job should run on, given the nodes it may use. `inputs.nodes` must not contain nodes that will go."""
    best = _best(inputs)
    if best is None:
        return PlannerDecision(PlannerVerdict.SUSPEND, _why_nothing(inputs))
    layout, nodes, expected = best
    target = Placement(layout=layout, members=place(layout, nodes, inputs))
    choice = f"{layout} on {len(target.node_ids())} of {len(inputs.nodes)} nodes, {_seconds(expected)} per step"
    choice += _at_risk(inputs, target)
    world = inputs.world
    if world is None:
        return PlannerDecision(PlannerVerdict.START, f"start {choice}", target)
    usable = {node.node_id for node in inputs.nodes}
    lost = [node_id for node_id in world.node_ids() if node_id not in usable]
    if lost:
        return PlannerDecision(PlannerVerdict.MOVE, f"without {', '.join(lost[:8])}: {choice}", target)
    if str(layout) == str(world.layout):
        return PlannerDecision(PlannerVerdict.STAY, f"{world.layout} on its nodes is still the best choice", None)
    now = score(inputs.job, world.layout, inputs.step_seconds)
    same_nodes = len(target.node_ids()) == len(world.node_ids())
    if same_nodes and (inputs.job.layouts.pinned or expected.seconds > now.seconds * (1 - GAIN_MIN)):
        return PlannerDecision(
            PlannerVerdict.STAY, f"{layout} on as many nodes gains too little over {world.layout}", None
        )
    if not inputs.job.layouts.pinned and expected.seconds > now.seconds * (1 - GAIN_MIN):
        return PlannerDecision(PlannerVerdict.STAY, f"{choice} is no gain over {_seconds(now)} in {world.layout}", None)
    return PlannerDecision(PlannerVerdict.MOVE, f"{choice} instead of {world.layout} at {_seconds(now)}", target)


def standing_plans(inputs: PlanInputs) -> tuple[StandingPlan, ...]:
    """One plan for each single node of the world: what the agents do, without asking the service, if it is lost."""
    world = inputs.world
    if world is None:
        return ()
    digest = inputs.digest()
    plans = []
    for node_id in world.node_ids()[:STANDING_PLANS_MAX]:
        decision = decide(replace(inputs, nodes=tuple(node for node in inputs.nodes if node.node_id != node_id)))
        plans.append(
            StandingPlan(
                parent=world.generation,
                leaving=(node_id,),
                target=decision.target if decision.verdict is PlannerVerdict.MOVE else None,
                plan_digest=digest,
                reason=decision.reason,
            )
        )
    return tuple(plans)


def spares(inputs: PlanInputs) -> tuple[str, ...]:
    """Free nodes that agents may take by themselves, the first choice first: at most as many as the world has nodes."""
    members = inputs.world.node_ids() if inputs.world is not None else ()
    free = tuple(node.node_id for node in _preferred(inputs) if node.node_id not in members)
    return free[: min(SPARES_MAX, len(members))]


def layouts_by_count(inputs: PlanInputs) -> tuple[LayoutForCount, ...]:
    """The layout for every number of nodes the job allows: one that fits whichever so many nodes are left; where none
    does, one that fits the largest of them."""
    job = inputs.job
    sizes = sorted(node.slots for node in inputs.nodes) or [1]
    sizes = [sizes[0]] * (job.nodes.min - len(sizes)) + sizes
    counts = range(job.nodes.min, min(job.nodes.max, len(sizes)) + 1)
    return tuple(_layout_for_count(inputs, sizes, count) for count in counts)


def _layout_for_count(inputs: PlanInputs, sizes: list[int], count: int) -> LayoutForCount:
    pinned, why = bool(inputs.job.layouts.pinned), ""
    for slots, which in ((sizes[:count], ""), (sizes[-count:], f" on nodes with {sum(sizes[-count:])} slots")):
        alone = tuple(PlanNode(f"any-{index}", size) for index, size in enumerate(slots))
        without = replace(inputs, nodes=alone, world=None)
        best = _best(without)
        if best is not None and (not pinned or len(best[1]) == count):
            return LayoutForCount(nodes=count, layout=best[0], reason=f"{best[0]}{which}, {_seconds(best[2])} per step")
        if best is None:
            why = _leaves_nodes_empty(without)
    return LayoutForCount(nodes=count, layout=None, reason=why or f"no layout fits {count} nodes")


def place(layout: ParallelLayout, nodes: tuple[PlanNode, ...], inputs: PlanInputs) -> tuple[Member, ...]:
    """The member of each rank: survivors first and in their old rank order, so that most state is already in place;
    then other slots in the order of the nodes. But a TP group lies on one node wherever one can hold it."""
    chosen = {node.node_id for node in nodes}
    slots = {node.node_id: node.slots for node in nodes}
    kept = [member for member in (inputs.world.members if inputs.world else ()) if member.node_id in chosen]
    kept = [member for member in kept if member.slot < slots[member.node_id]]
    taken = set(kept)
    free = [
        member
        for node in nodes
        for member in (Member(node_id=node.node_id, slot=slot) for slot in range(node.slots))
        if member not in taken
    ]
    return seat(layout, kept, free)


def alternatives(inputs: PlanInputs) -> tuple[Alternative, ...]:
    """What the decision was made among, the best first: on most nodes, then with the least seconds per step."""
    ranked, found = _preferred(inputs), []
    for count in list(_counts(inputs))[:COUNTS_SHOWN_MAX]:
        scored = _scored(inputs, ranked[:count])
        found += [Alternative(str(layout), count, expected.seconds, expected.measured) for expected, layout in scored]
    return tuple(found[:ALTERNATIVES_MAX])


def _best(inputs: PlanInputs) -> tuple[ParallelLayout, tuple[PlanNode, ...], Score] | None:
    """Most nodes first (pinned layouts are by node count), then the least seconds per step."""
    ranked = _preferred(inputs)
    for count in _counts(inputs):
        if found := _scored(inputs, ranked[:count]):
            expected, layout = found[0]
            return layout, ranked[:count], expected
    return None


def _counts(inputs: PlanInputs) -> range:
    job = inputs.job
    return range(min(len(inputs.nodes), job.nodes.max), job.nodes.min - 1, -1)


def _scored(inputs: PlanInputs, nodes: tuple[PlanNode, ...]) -> list[tuple[Score, ParallelLayout]]:
    """The layouts that may run on all of `nodes`, the fastest first."""
    job, slots = inputs.job, sum(node.slots for node in nodes)
    found = candidates(job, nodes=len(nodes), slots=slots, history=_history(inputs, len(nodes)))
    usable = (layout for layout in found if _nodes_used(layout, nodes) >= job.nodes.min)
    scored = [(score(job, layout, inputs.step_seconds), layout) for layout in usable]
    return sorted(scored, key=lambda item: item[0].seconds)


def _history(inputs: PlanInputs, count: int) -> tuple[LayoutUse, ...]:
    """The history that decides which pinned layout is next. A world that keeps its nodes keeps its layout: otherwise a
    job with `prefer_change` would move for ever."""
    world = inputs.world
    if world is None or len(world.node_ids()) != count or not inputs.history:
        return inputs.history
    usable = {node.node_id for node in inputs.nodes}
    return inputs.history[:-1] if all(node_id in usable for node_id in world.node_ids()) else inputs.history


def _preferred(inputs: PlanInputs) -> tuple[PlanNode, ...]:
    """Nodes of the present world first, in rank order; then the others: larger ones, of those the ones that no cloud
    has warned of, then by name. That a member may be taken moves no job."""
    order = {node_id: index for index, node_id in enumerate(inputs.world.node_ids())} if inputs.world else {}
    new = len(order)
    return tuple(sorted(inputs.nodes, key=lambda n: (order.get(n.node_id, new), -n.slots, n.is_at_risk, n.node_id)))


def _at_risk(inputs: PlanInputs, target: Placement) -> str:
    """The target's nodes that a cloud has warned of, for a reason."""
    named = {node.node_id for node in inputs.nodes if node.is_at_risk} & set(target.node_ids())
    return f" (the cloud may soon take {', '.join(sorted(named)[:8])})" if named else ""


def _nodes_used(layout: ParallelLayout, nodes: tuple[PlanNode, ...]) -> int:
    used, slots = 0, 0
    for node in nodes:
        if slots >= layout.world_size:
            break
        used, slots = used + 1, slots + node.slots
    return used


def _why_nothing(inputs: PlanInputs) -> str:
    job, others = inputs.job, f" ({inputs.others})" if str(inputs.others) else ""
    if len(inputs.nodes) < job.nodes.min:
        ready = len(inputs.nodes) + inputs.others.taken
        return f"{ready} nodes are ready{others}, the job needs at least nodes.min {job.nodes.min}"
    if why := _leaves_nodes_empty(inputs):
        return why + others
    rules = "pinned" if job.layouts.pinned else "allowed" if job.layouts.allowed else "possible"
    slots = sum(node.slots for node in inputs.nodes)
    return f"no {rules} layout fits {len(inputs.nodes)} nodes with {slots} slots{others}"


def _leaves_nodes_empty(inputs: PlanInputs) -> str:
    """Why layouts that fit do not count: nodes are filled one after the other, and fewer than the job needs would be
    used. Empty where none fits."""
    job, nodes = inputs.job, _preferred(inputs)[: inputs.job.nodes.max]
    slots, history = sum(node.slots for node in nodes), _history(inputs, len(nodes))
    used = [
        (_nodes_used(found, nodes), found) for found in candidates(job, nodes=len(nodes), slots=slots, history=history)
    ]
    if not used:
        return ""
    most, layout = max(used, key=lambda item: (item[0], item[1].world_size))
    return f"{layout} fits on {most} of {len(nodes)} nodes, and the job needs at least nodes.min {job.nodes.min}"


def _seconds(value: Score) -> str:
    return f"{value.seconds:.3g} s {'measured' if value.measured else 'predicted'}"
