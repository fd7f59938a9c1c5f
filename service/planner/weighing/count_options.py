"""The best layout for each number of nodes: those that are up, and more where the job could use more. Pure."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from liver_core.layout.parallel import ParallelLayout
from service.planner.change_cost import expected_change
from service.planner.choices import Candidates, best_choice, lies_near, step_times
from service.planner.goals import CountOption
from service.planner.inputs import PlanInputs, PlanNode
from service.policy.types import Candidate

COUNTS_MAX = 32
"""So many numbers of nodes are weighed, evenly spread where there are more."""


def candidates_of(inputs: PlanInputs, groups: Sequence[Sequence[PlanNode]], known: Candidates) -> tuple[Candidate, ...]:
    """The best layout for each number of nodes of a group, and the present one. A group can be in one world. What the
    first one has counts also for the others; they add the numbers that it does not reach."""
    tokens = inputs.job.global_batch * inputs.job.model.seq_length
    change_s = expected_change(inputs.job, inputs.changes, inputs.copy_s).lost_s if inputs.markets else 0.0
    found: dict[int, Candidate] = {}
    for group in groups:
        nodes = (*group, *_bought(inputs, group))
        room = replace(inputs, nodes=tuple(nodes))
        among = known if len(nodes) <= len(inputs.nodes) else Candidates.of(room)
        for count in _counts(inputs, len(nodes)):
            best = None if count in found else best_choice(replace(room, nodes=nodes[:count]), among)
            if best is not None:
                step = best.step
                found[count] = Candidate(
                    str(best.layout), count, step.seconds, tokens, step.error, step.measured, change_s
                )
    world = inputs.world
    if world is not None and str(world.layout) not in {each.layout for each in found.values()}:
        step = step_times(inputs).of_layout(world.layout, near=lies_near(world.layout, world.members))
        nodes = len(world.node_ids())
        found[-nodes] = Candidate(str(world.layout), nodes, step.seconds, tokens, step.error, step.measured, change_s)
    return tuple(found[count] for count in sorted(found))


def count_options(candidates: Sequence[Candidate], nodes: Sequence[PlanNode]) -> tuple[CountOption, ...]:
    """The fastest for each number of nodes, which are the first of `nodes`."""
    found: dict[int, CountOption] = {}
    for each in candidates:
        prices = [node.usd_per_hour for node in nodes[: each.nodes]]
        usd = None if None in prices else sum(price for price in prices if price is not None)
        if each.nodes not in found or each.step_time_s < found[each.nodes].step_s:
            found[each.nodes] = CountOption(each.nodes, each.layout, each.step_time_s, usd)
    return tuple(found[count] for count in sorted(found))


def _counts(inputs: PlanInputs, nodes: int) -> list[int]:
    least, most = inputs.job.nodes.min, min(nodes, inputs.job.nodes.max)
    return sorted({*range(least, most + 1, max(1, -(-(most - least + 1) // COUNTS_MAX))), most} - set(range(least)))


def _bought(inputs: PlanInputs, group: Sequence[PlanNode]) -> tuple[PlanNode, ...]:
    """Nodes like most of the group, or like those that the job had last, as many as it could use. How many could be had
    is for the policy: the fastest layout is its yardstick also where nodes for that are not to be had."""
    missing = inputs.job.nodes.max - len(group) if inputs.markets else 0
    slots = _usual_slots(inputs, group)
    if missing <= 0 or not slots:
        return ()
    device = next((node.device for node in (*group, *inputs.nodes) if node.device), "")
    return tuple(PlanNode(f"bought-{index}", slots, device=device) for index in range(missing))


def _usual_slots(inputs: PlanInputs, group: Sequence[PlanNode]) -> int:
    sizes = Counter(node.slots for node in (group or inputs.nodes))
    if sizes:
        return max(sizes, key=lambda size: (sizes[size], size))
    if not inputs.history:
        return 0
    last = inputs.history[-1]
    return -(-ParallelLayout.parse(last.layout).world_size // max(1, last.nodes))
