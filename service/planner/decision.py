"""The planner: a target layout and its members, or why not; standing plans for every single loss. Pure."""

from dataclasses import dataclass, replace

from agent.protocol.sync import LayoutForCount, StandingPlan
from agent.protocol.values import Placement
from liver_core.layout import Member, ParallelLayout
from service.planner.feasibility import candidates
from service.planner.inputs import Alternative, LayoutUse, PlanInputs, PlannerDecision, PlannerVerdict, PlanNode
from service.planner.placement import NodeChoice, place, preferred
from service.planner.step_time import StepEstimate, StepTimes

GAIN_MIN = 0.03
"""The least predicted gain for which a job moves: predictions are not more accurate than this."""

STANDING_PLANS_MAX = 10_000
ALTERNATIVES_MAX = 16
SPARES_MAX = 4
"""So many free nodes the agents of a job know, for losses in a row that the service does not hear of."""


@dataclass(frozen=True, slots=True)
class _Choice:
    """A layout that the job could run in. `most`: on at most so many nodes. `whole`: each TP group lies on one node."""

    layout: ParallelLayout
    step: StepEstimate
    most: int
    whole: bool


def decide(inputs: PlanInputs) -> PlannerDecision:
    """What the job should run on, given the nodes it may use. `inputs.nodes` must not contain nodes that will go."""
    best = _best(inputs)
    if best is None:
        return PlannerDecision(PlannerVerdict.SUSPEND, _why_nothing(inputs))
    choice, members = best
    layout, expected = choice.layout, choice.step
    target = Placement(layout=layout, members=members)
    named = f"{layout} on {len(target.node_ids())} of {len(inputs.nodes)} nodes, {_seconds(expected)} per step"
    named += _at_risk(inputs, target) + ("" if choice.whole else "; no nodes can hold each TP group whole")
    world = inputs.world
    if world is None:
        return PlannerDecision(PlannerVerdict.START, f"start {named}", target)
    usable = {node.node_id for node in inputs.nodes}
    lost = [node_id for node_id in world.node_ids() if node_id not in usable]
    if lost:
        return PlannerDecision(PlannerVerdict.MOVE, f"without {', '.join(lost[:8])}: {named}", target)
    if str(layout) == str(world.layout):
        return PlannerDecision(PlannerVerdict.STAY, f"{world.layout} on its nodes is still the best choice", None)
    now = _step_times(inputs).of_layout(world.layout, whole=_lies_whole(world.layout, world.members))
    gains = expected.seconds <= now.seconds * (1 - GAIN_MIN)
    same_nodes = len(target.node_ids()) == len(world.node_ids())
    if same_nodes and (inputs.job.layouts.pinned or not gains):
        return PlannerDecision(
            PlannerVerdict.STAY, f"{layout} on as many nodes gains too little over {world.layout}", None
        )
    if not inputs.job.layouts.pinned and not gains:
        return PlannerDecision(PlannerVerdict.STAY, f"{named} is no gain over {_seconds(now)} in {world.layout}", None)
    pinned = "" if gains else "; no faster, but pinned for so many nodes"
    return PlannerDecision(PlannerVerdict.MOVE, f"{named} instead of {world.layout} at {_seconds(now)}{pinned}", target)


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
    free = tuple(node.node_id for node in preferred(inputs) if node.node_id not in members)
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
        best = next(iter(_choices(without)), None)
        if best is not None and (not pinned or best.most == count):
            reason = f"{best.layout}{which}, {_seconds(best.step)} per step"
            return LayoutForCount(nodes=count, layout=best.layout, reason=reason)
        if best is None:
            why = _too_few_ranks(without)
    return LayoutForCount(nodes=count, layout=None, reason=why or f"no layout fits {count} nodes")


def alternatives(inputs: PlanInputs) -> tuple[Alternative, ...]:
    """What the decision was made among, the best first."""
    found, times = [], _step_times(inputs)
    for choice in _choices(inputs)[:ALTERNATIVES_MAX]:
        members = place(choice.layout, _room(inputs, choice.most), inputs.world.members if inputs.world else ())
        nodes = len({member.node_id for member in members or ()})
        step, predicted = choice.step, times.predicted(choice.layout, whole=choice.whole)
        found.append(Alternative(str(choice.layout), nodes, step.seconds, step.measured, step.error, predicted.seconds))
    return tuple(found)


def _best(inputs: PlanInputs) -> tuple[_Choice, tuple[Member, ...]] | None:
    """The first choice that can be placed, and its members."""
    world = inputs.world.members if inputs.world else ()
    for choice in _choices(inputs):
        members = place(choice.layout, _room(inputs, choice.most), world)
        if members is not None:
            return choice, members
    return None


def _choices(inputs: PlanInputs) -> list[_Choice]:
    """The layouts that can run, the best first: pinned ones by the number of nodes, others by the seconds of a step."""
    if not inputs.job.layouts.pinned:
        return sorted(_possible(inputs, min(len(inputs.nodes), inputs.job.nodes.max)), key=lambda c: c.step.seconds)
    counts = range(min(len(inputs.nodes), inputs.job.nodes.max), inputs.job.nodes.min - 1, -1)
    pinned = {pin.nodes for pin in inputs.job.layouts.pinned}
    return [choice for count in counts if count in pinned for choice in _possible(inputs, count)]


def _possible(inputs: PlanInputs, most: int) -> list[_Choice]:
    """The layouts that may run on at most so many nodes."""
    job, room, times = inputs.job, _room(inputs, most), _step_times(inputs)
    found = []
    for layout in candidates(job, nodes=most, slots=room.slots(), history=_history(inputs, most)):
        if room.holds(layout):
            whole = room.keeps_groups(layout)
            found.append(_Choice(layout, times.of_layout(layout, whole=whole), most, whole))
    return found


def _step_times(inputs: PlanInputs) -> StepTimes:
    device = next((node.device for node in inputs.nodes if node.device), "")
    return StepTimes.of(inputs.job, inputs.step_seconds, device)


def _room(inputs: PlanInputs, most: int) -> NodeChoice:
    return NodeChoice(preferred(inputs), inputs.job.nodes.min, most)


def _lies_whole(layout: ParallelLayout, members: tuple[Member, ...]) -> bool:
    groups = (members[at : at + layout.tp] for at in range(0, len(members), layout.tp))
    return all(len({member.node_id for member in group}) == 1 for group in groups)


def _history(inputs: PlanInputs, count: int) -> tuple[LayoutUse, ...]:
    """The history that decides which pinned layout is next. A world that keeps its nodes keeps its layout: otherwise a
    job with `prefer_change` would move for ever."""
    world = inputs.world
    if world is None or len(world.node_ids()) != count or not inputs.history:
        return inputs.history
    usable = {node.node_id for node in inputs.nodes}
    return inputs.history[:-1] if all(node_id in usable for node_id in world.node_ids()) else inputs.history


def _at_risk(inputs: PlanInputs, target: Placement) -> str:
    """The target's nodes that a cloud has warned of, for a reason."""
    named = {node.node_id for node in inputs.nodes if node.is_at_risk} & set(target.node_ids())
    return f" (the cloud may soon take {', '.join(sorted(named)[:8])})" if named else ""


def _why_nothing(inputs: PlanInputs) -> str:
    job, others = inputs.job, f" ({inputs.others})" if str(inputs.others) else ""
    if len(inputs.nodes) < job.nodes.min:
        ready = len(inputs.nodes) + inputs.others.taken
        return f"{ready} nodes are ready{others}, the job needs at least nodes.min {job.nodes.min}"
    if why := _too_few_ranks(inputs):
        return why + others
    rules = "pinned" if job.layouts.pinned else "allowed" if job.layouts.allowed else "possible"
    slots = sum(node.slots for node in inputs.nodes)
    return f"no {rules} layout fits {len(inputs.nodes)} nodes with {slots} slots{others}"


def _too_few_ranks(inputs: PlanInputs) -> str:
    """Why layouts that fit do not count: each has fewer ranks than the job must use nodes. Empty where none fits."""
    job, most = inputs.job, min(len(inputs.nodes), inputs.job.nodes.max)
    slots = _room(inputs, most).slots()
    found = candidates(job, nodes=most, slots=slots, history=_history(inputs, most))
    if not found:
        return ""
    layout = max(found, key=lambda item: item.world_size)
    return f"{layout} has {layout.world_size} ranks, too few to use nodes.min {job.nodes.min} nodes"


def _seconds(value: StepEstimate) -> str:
    if value.measured:
        return f"{value.seconds:.3g} s measured"
    return f"{value.seconds:.3g} s (+-{value.error:.0%}) predicted"
