"""What somebody who knew the future could have had, on the same ticks and with the same pauses as a replay. Pure.

The free ideal changes for nothing. The count oracle knows how many nodes there will be, and loses its world to a loss
that more likely than not touches it. The victim oracle also knows which nodes go, and never uses those where it can.
"""

from collections.abc import Sequence
from math import inf

from service.policy.types import Candidate
from service.policy.utility import curve_of
from service.simulation.replay_setup import GridStep, likely_hit

_State = tuple[int, float]
NOTHING = -1


def ideal_tokens(grid: Sequence[GridStep], candidates: Sequence[Candidate]) -> float:
    """The best layout for the nodes of every moment, without any cost of a change."""
    curve = curve_of(tuple(candidates))
    return sum(curve.tokens_per_s(step.nodes) * step.seconds for step in grid)


def oracle_tokens(grid: Sequence[GridStep], candidates: Sequence[Candidate], *, knows_victims: bool) -> float:
    """The most tokens that any sequence of layouts gives. A change to x stops training for x's `change_s`, also across
    ticks; a world that is hit must change, if only to itself."""
    layouts = curve_of(tuple(candidates)).best
    values: dict[_State, float] = {(NOTHING, 0.0): 0.0}
    for step in grid:
        after: dict[_State, float] = {(NOTHING, 0.0): max(values.values())}
        best = after[(NOTHING, 0.0)]
        for (index, pause), value in values.items():
            if index != NOTHING and _goes_on(layouts[index], step, knows_victims):
                _keep_better(after, (index, pause), value)
        for index, layout in enumerate(layouts):
            if layout.nodes <= step.nodes:
                _keep_better(after, (index, layout.change_s), best)
        values = {}
        for (index, pause), value in after.items():
            rate = layouts[index].tokens_per_s if index != NOTHING else 0.0
            state = (index, max(0.0, pause - step.seconds))
            _keep_better(values, state, value + rate * max(0.0, step.seconds - pause))
    return max(values.values())


def _goes_on(layout: Candidate, step: GridStep, knows_victims: bool) -> bool:
    if layout.nodes > step.nodes:
        return False
    return knows_victims or not likely_hit(layout.nodes, step.nodes_before, step.lost)


def _keep_better(values: dict[_State, float], state: _State, value: float) -> None:
    if value > values.get(state, -inf):
        values[state] = value
