"""The best layout for each number of nodes, in one pass over the layouts. Pure.

With one node more, nothing that fitted ceases to fit. So each layout is asked once from how many nodes on there is
room for it, instead of each number of nodes being held against all layouts.
"""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from liver_core.layout import ParallelLayout
from liver_core.reshard.seating import near_units
from service.planner.choices import Candidates, Choice
from service.planner.step_time import StepEstimate, StepTimes

_Ranked = tuple[float, int, StepEstimate, ParallelLayout, int]


class GrowingFleet:
    """The first so many of a row of nodes, of which a job must use at least `least`; `slots[i]`: of the i-th."""

    def __init__(self, slots: Sequence[int], least: int) -> None:
        self._slots, self._least = tuple(slots), least
        self._sums: dict[int, tuple[list[int], list[int]]] = {}

    def holds_from(self, layout: ParallelLayout) -> int | None:
        """The fewest nodes with a slot for every rank; None if all of them have too few."""
        return self._from(1, layout.world_size, layout.world_size >= self._least, needs_each=False)

    def keeps_groups_from(self, layout: ParallelLayout, size: int) -> int | None:
        """The fewest nodes where also each group of so many ranks lies on one node; None if there is no such number."""
        groups = layout.world_size // size
        return self._from(size, groups, groups >= self._least, needs_each=True)

    def _from(self, size: int, groups: int, is_enough: bool, *, needs_each: bool) -> int | None:
        """Nodes that hold `groups` groups of this size; with `needs_each` on at least `least` nodes that hold one."""
        if size not in self._sums:
            counts = [slots // size for slots in self._slots]
            self._sums[size] = list(accumulate(counts)), list(accumulate(int(count > 0) for count in counts))
        held, with_any = self._sums[size]
        fewest = bisect_left(held, groups)
        if needs_each:
            fewest = max(fewest, bisect_left(with_any, self._least))
        return max(fewest + 1, self._least) if is_enough and fewest < len(held) else None


@dataclass(frozen=True, slots=True)
class BestByCount:
    """The best choice for each number of nodes; numbers for which nothing fits are left out."""

    choices: dict[int, Choice]

    @classmethod
    def of(cls, known: Candidates, slots: Sequence[int], least: int, times: StepTimes) -> "BestByCount":
        """For the first `least`, `least` + 1 ... of nodes with these slots. As `choices.best_choice` finds it for
        each: the shortest step, where a group that is spread counts with its slower links; of equal ones the first of
        `known`."""
        fleet, begins = GrowingFleet(slots, least), dict[int, list[_Ranked]]()
        for at, (step, layout) in enumerate(known.by_step):
            units, last = near_units(layout), None
            ways = [(size, fleet.keeps_groups_from(layout, size)) for size in units if size >= layout.tp]
            for size, fewest in (*ways, (1, fleet.holds_from(layout))):
                if fewest is not None and fewest != last:
                    near = step if size == units[0] else times.of_layout(layout, near=size)
                    begins.setdefault(fewest, []).append((near.seconds, at, near, layout, size))
                    last = fewest
        best: _Ranked | None = None
        found: dict[int, Choice] = {}
        for count in range(least, len(slots) + 1):
            # Links between nodes are no faster than those inside one. So a spread layout that later lies whole needs
            # no withdrawing: it never comes before itself.
            best = min((*begins.get(count, ()), *((best,) if best else ())), key=lambda each: each[:2], default=None)
            if best is not None:
                _, _, step, layout, near = best
                found[count] = Choice(layout, step, count, near)
        return cls(found)
