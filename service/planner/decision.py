"""The planner: a target layout and its members, or why not. Pure."""

from dataclasses import replace
from math import hypot

from agent.protocol.jobfile import PolicyRules
from agent.protocol.values import Placement
from liver_core.layout import Member
from liver_core.layout.limits import listed
from service.planner.choices import (
    Candidates,
    Choice,
    best_choice,
    choice_of_nodes,
    choices,
    fitting_layouts,
    lies_near,
    most_nodes,
    step_times,
)  # fmt: skip
from service.planner.inputs import Alternative, PlanInputs, PlannerDecision, PlannerVerdict
from service.planner.placement import place
from service.planner.step_time import StepEstimate
from service.planner.weighing.worth import Weighed, weighed

ALTERNATIVES_MAX = 16


def decide(inputs: PlanInputs, known: Candidates | None = None) -> PlannerDecision:
    """What the job should run on, given the nodes it may use. `inputs.nodes` must not contain nodes that will go.
    `known`: the candidates of inputs with these nodes or more, where there are some already."""
    known = known or Candidates.of(inputs)
    found = weighed(inputs, known)
    decision = _decided(inputs, known, found)
    if found is None:
        return decision
    reason = "; ".join((decision.reason, *(text for _, text in found.alerts)))
    alerts = tuple(alert for alert, _ in found.alerts)
    return replace(decision, reason=reason, alerts=alerts, options=found.options, wanted=found.wanted)


def _decided(inputs: PlanInputs, known: Candidates, found: Weighed | None) -> PlannerDecision:
    available = len(inputs.nodes)
    inputs = inputs if found is None else found.inputs
    wants = f"; {found.reason}" if found is not None and found.reason else ""
    chosen = known.only(found.layout) if found is not None and found.layout else None
    best = _placed(inputs, chosen) if chosen is not None else None
    by_policy = best is not None
    best = best or _placed(inputs, known)
    if best is None:
        return PlannerDecision(PlannerVerdict.SUSPEND, _why_nothing(inputs) + wants)
    choice, members = best
    layout, expected = choice.layout, choice.step
    target = Placement(layout=layout, members=members)
    named = f"{layout} on {len(target.node_ids())} of {available} nodes, {seconds_of(expected)} per step"
    named += _at_risk(inputs, target) + choice.spread
    named += wants
    world = inputs.world
    if world is None:
        return PlannerDecision(PlannerVerdict.START, f"start {named}", target)
    usable = {node.node_id for node in inputs.nodes}
    lost = [node_id for node_id in world.node_ids() if node_id not in usable]
    if lost:
        return PlannerDecision(PlannerVerdict.MOVE, f"without {listed(lost)}: {named}", target)
    if str(layout) == str(world.layout):
        return PlannerDecision(PlannerVerdict.STAY, f"{world.layout} on its nodes is still the best choice{wants}")
    now = step_times(inputs).of_layout(world.layout, near=lies_near(world.layout, world.members))
    # What the policy chose gains enough in money; only what may be chance is no reason to move.
    gain_min = 0.0 if by_policy else (inputs.job.policy or PolicyRules()).gain_min
    gains = expected.seconds <= now.seconds * (1 - max(gain_min, _chance(expected, now)))
    same_nodes = len(target.node_ids()) == len(world.node_ids())
    if same_nodes and (inputs.job.layouts.pinned or not gains):
        return PlannerDecision(PlannerVerdict.STAY, f"{layout} on as many nodes gains too little over {world.layout}")
    if not inputs.job.layouts.pinned and not gains:
        return PlannerDecision(PlannerVerdict.STAY, f"{named} is no gain over {seconds_of(now)} in {world.layout}")
    pinned = "" if gains else "; no faster, but pinned for so many nodes"
    return PlannerDecision(
        PlannerVerdict.MOVE, f"{named} instead of {world.layout} at {seconds_of(now)}{pinned}", target
    )


def alternatives(inputs: PlanInputs) -> tuple[Alternative, ...]:
    """What the decision was made among, the best first."""
    found, times = [], step_times(inputs)
    for choice in choices(inputs, Candidates.of(inputs))[:ALTERNATIVES_MAX]:
        members = place(
            choice.layout, choice_of_nodes(inputs, choice.most), inputs.world.members if inputs.world else ()
        )
        nodes = len({member.node_id for member in members or ()})
        step, predicted = choice.step, times.predicted(choice.layout, near=choice.near)
        found.append(Alternative(str(choice.layout), nodes, step.seconds, step.measured, step.error, predicted.seconds))
    return tuple(found)


def _placed(inputs: PlanInputs, known: Candidates) -> tuple[Choice, tuple[Member, ...]] | None:
    """The best choice, and its members."""
    best = best_choice(inputs, known)
    if best is None:
        return None
    members = place(best.layout, choice_of_nodes(inputs, best.most), inputs.world.members if inputs.world else ())
    assert members is not None, f"{best.layout} was found to fit and cannot be placed"
    return best, members


def _chance(expected: StepEstimate, now: StepEstimate) -> float:
    """The share by which two measured steps may differ by chance, at two standard errors. A layout that has not run is
    worth a trial at its prediction."""
    return 2 * hypot(expected.error, now.error) if expected.measured and now.measured else 0.0


def _at_risk(inputs: PlanInputs, target: Placement) -> str:
    """The target's nodes that a cloud has warned of, for a reason."""
    used = [node for node in inputs.nodes if node.node_id in set(target.node_ids())]
    risky = sorted(node.node_id for node in used if node.is_at_risk)
    overdue = sorted(node.node_id for node in used if node.is_overdue)
    warned = f" (the cloud may soon take {listed(risky)})" if risky else ""
    return warned + (f" (the announced end of {listed(overdue)} is past)" if overdue else "")


def _why_nothing(inputs: PlanInputs) -> str:
    job, others = inputs.job, f" ({inputs.others})" if str(inputs.others) else ""
    if len(inputs.nodes) < job.nodes.min:
        ready = len(inputs.nodes) + inputs.others.taken
        return f"{ready} nodes are ready{others}, the job needs at least nodes.min {job.nodes.min}"
    if why := too_few_ranks(inputs):
        return why + others
    rules = "pinned" if job.layouts.pinned else "allowed" if job.layouts.allowed else "possible"
    slots = sum(node.slots for node in inputs.nodes)
    return f"no {rules} layout fits {len(inputs.nodes)} nodes with {slots} slots{others}"


def too_few_ranks(inputs: PlanInputs) -> str:
    """Why layouts that fit do not count: each has fewer ranks than the job must use nodes. Empty where none fits."""
    job, found = inputs.job, fitting_layouts(inputs, most_nodes(inputs))
    if not found:
        return ""
    layout = max(found, key=lambda item: item.world_size)
    return f"{layout} has {layout.world_size} ranks, too few to use nodes.min {job.nodes.min} nodes"


def seconds_of(value: StepEstimate) -> str:
    """For a reason."""
    if value.measured:
        return f"{value.seconds:.3g} s measured"
    return f"{value.seconds:.3g} s (+-{value.error:.0%}) predicted"
