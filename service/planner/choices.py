"""The layouts a job could run in with the nodes it may use, each with the seconds of a step, the best first. Pure."""

from collections.abc import Iterator
from dataclasses import dataclass

from liver_core.layout import Member, ParallelLayout
from liver_core.reshard.seating import near_units
from service.planner.feasibility import CANDIDATES_MAX, candidates
from service.planner.inputs import LayoutUse, PlanInputs
from service.planner.placement import NodeChoice, preferred
from service.planner.step_time import StepEstimate, StepTimes


@dataclass(frozen=True, slots=True)
class Choice:
    """A layout that the job could run in. `most`: on at most so many nodes. `near`: so many ranks one after the other
    lie on one node."""

    layout: ParallelLayout
    step: StepEstimate
    most: int
    near: int

    @property
    def spread(self) -> str:
        """Which groups that talk in each layer do not lie on one node each; empty if all do."""
        if self.near % self.layout.tp:
            return "; no nodes can hold each TP group whole"
        return "" if self.near == near_units(self.layout)[0] else "; no nodes can hold each EP x ETP group whole"


@dataclass(frozen=True, slots=True)
class Candidates:
    """The layouts of a job with their steps where each group lies on one node, the fastest first. What is possible
    with fewer nodes is among what is possible with more, so that all losses are planned from one such list."""

    by_step: tuple[tuple[StepEstimate, ParallelLayout], ...]

    @classmethod
    def of(cls, inputs: PlanInputs) -> "Candidates":
        """With all nodes of the inputs. Empty for pinned layouts, which depend on the number of nodes."""
        if inputs.job.layouts.pinned:
            return cls(())
        most, times = most_nodes(inputs), step_times(inputs)
        slots = choice_of_nodes(inputs, most).slots()
        found = candidates(inputs.job, nodes=most, slots=slots, history=(), in_use=_in_use(inputs))
        steps = ((times.of_layout(layout), layout) for layout in found if _is_kept(inputs, layout))
        return cls(tuple(sorted(steps, key=lambda item: item[0].seconds)))

    def only(self, layout: str) -> "Candidates":
        """That layout alone, where it is among these."""
        return Candidates(tuple(each for each in self.by_step if str(each[1]) == layout))


def best_choice(inputs: PlanInputs, known: Candidates) -> Choice | None:
    """The first of `choices`, without looking at those that cannot be better."""
    best = _first(inputs, known)
    if best is None and len(known.by_step) >= CANDIDATES_MAX:
        # The list of a larger fleet may have been cut before the layouts of small ones.
        best = _first(inputs, Candidates.of(inputs))
    return best


def _first(inputs: PlanInputs, known: Candidates) -> Choice | None:
    best: Choice | None = None
    for found in _possible(inputs, known):
        if best is None or (not inputs.job.layouts.pinned and found.step.seconds < best.step.seconds):
            best = found
        # Whatever follows takes longer even where its groups are whole.
        if not best.spread or inputs.job.layouts.pinned:
            break
    return best


def choices(inputs: PlanInputs, known: Candidates) -> list[Choice]:
    """The layouts that can run, the best first: pinned ones by the number of nodes, others by the seconds of a step."""
    found = list(_possible(inputs, known))
    return found if inputs.job.layouts.pinned else sorted(found, key=lambda choice: choice.step.seconds)


def _possible(inputs: PlanInputs, known: Candidates) -> Iterator[Choice]:
    job, times = inputs.job, step_times(inputs)
    if not job.layouts.pinned:
        most = most_nodes(inputs)
        room = choice_of_nodes(inputs, most)
        for step, layout in known.by_step:
            if room.holds(layout):
                near = room.near(layout)
                is_whole = near == near_units(layout)[0]
                yield Choice(layout, step if is_whole else times.of_layout(layout, near=near), most, near)
        return
    pinned = {pin.nodes for pin in job.layouts.pinned}
    for count in range(most_nodes(inputs), job.nodes.min - 1, -1):
        if count not in pinned:
            continue
        room = choice_of_nodes(inputs, count)
        for layout in fitting_layouts(inputs, count):
            if room.holds(layout):
                near = room.near(layout)
                yield Choice(layout, times.of_layout(layout, near=near), count, near)


def fitting_layouts(inputs: PlanInputs, most: int) -> tuple[ParallelLayout, ...]:
    """The layouts with a slot for every rank on at most so many nodes, whether or not they use enough nodes."""
    slots = choice_of_nodes(inputs, most).slots()
    history = _history(inputs, most)
    found = candidates(inputs.job, nodes=most, slots=slots, history=history, in_use=_in_use(inputs))
    return tuple(layout for layout in found if _is_kept(inputs, layout))


def _is_kept(inputs: PlanInputs, layout: ParallelLayout) -> bool:
    """Whether the job may change to this layout: with `policy.keep_tp` only to one of the TP it has had."""
    policy = inputs.job.policy
    if policy is None or not policy.keep_tp:
        return True
    before = _in_use(inputs)
    return before is None or layout.tp == before.tp


def _in_use(inputs: PlanInputs) -> ParallelLayout | None:
    """The layout that the job has, or else had last."""
    if inputs.world is not None:
        return inputs.world.layout
    return ParallelLayout.parse(inputs.history[-1].layout) if inputs.history else None


def most_nodes(inputs: PlanInputs) -> int:
    """The most nodes that the job may use of those there are."""
    return min(len(inputs.nodes), inputs.job.nodes.max)


def choice_of_nodes(inputs: PlanInputs, most: int) -> NodeChoice:
    """Its nodes, the preferred first."""
    return NodeChoice(preferred(inputs), inputs.job.nodes.min, most)


def step_times(inputs: PlanInputs) -> StepTimes:
    """Of the job, on devices as the first node has."""
    device = next((node.device for node in inputs.nodes if node.device), "")
    return StepTimes.of(inputs.job, inputs.step_seconds, device, inputs.step_errors)


def lies_near(layout: ParallelLayout, members: tuple[Member, ...]) -> int:
    """How many ranks one after the other lie on one node everywhere, as `NodeChoice.near` counts them."""

    def is_whole(size: int) -> bool:
        groups = (members[at : at + size] for at in range(0, len(members), size))
        return all(len({member.node_id for member in group}) == 1 for group in groups)

    return next(filter(is_whole, near_units(layout)))


def _history(inputs: PlanInputs, count: int) -> tuple[LayoutUse, ...]:
    """The history that decides which pinned layout is next. A world that keeps its nodes keeps its layout: otherwise a
    job with `prefer_change` would move for ever."""
    world = inputs.world
    if world is None or len(world.node_ids()) != count or not inputs.history:
        return inputs.history
    usable = {node.node_id for node in inputs.nodes}
    return inputs.history[:-1] if all(node_id in usable for node_id in world.node_ids()) else inputs.history
