"""What a replay assumes beyond its trace, and the ticks on which policy and oracles are scored alike. Pure."""

from dataclasses import dataclass
from enum import StrEnum
from math import comb

from service.policy.price_book import PriceSteps
from service.simulation.traces import CapacityTrace, TraceError

GRID_MAX = 500_000


class Victims(StrEnum):
    """Which nodes a loss takes. Named: those of the trace. Drawn: at random of all that are offered, by the seed.
    Counted: it touches the job when it more likely does than not, as for somebody who knows counts only."""

    NAMED = "named"
    DRAWN = "drawn"
    COUNTED = "counted"


@dataclass(frozen=True, slots=True)
class ReplaySetup:
    """`prices`: of a node over time, where there are several. `notice_s`: how long before its end a node is announced
    to go; 0: at that moment, in time to change. `unannounced_share`: of the losses, those that nobody announces.
    `detect_s`: until such a one is noticed. `acquire_s`: from buying a node that was given back to having it.
    `counts_steps`: a change that a loss forces drops the step that it does not leave time to end. `step_parts`: where
    it is more than 1, a loss that was announced drops only a part of the step, as if what is done of it could be kept;
    not where machines carry the changes. `checkpoint_every_s`: where it is not 0, a loss that nobody announced goes
    back to the last checkpoint; any other change writes one first. `gang`: nodes without which the job does not start
    at all. `decides_every_s`: the policy is asked so often also while nothing changes."""

    pool: str = "spot"
    usd_per_hour: float = 1.0
    usd_per_hour_on_demand: float = 3.3333
    prices: PriceSteps | None = None
    notice_s: float = 0.0
    unannounced_share: float = 0.0
    detect_s: float = 5.0
    acquire_s: float = 0.0
    tick_s: float = 60.0
    victims: Victims = Victims.NAMED
    counts_steps: bool = False
    step_parts: int = 1
    checkpoint_every_s: float = 0.0
    gang: int = 0
    decides_every_s: float = 600.0
    seed: int = 1

    def usd_per_hour_at(self, at_s: float) -> float:
        return self.usd_per_hour if self.prices is None else self.prices.at(at_s)

    def usd_of_node(self, begin_s: float, end_s: float) -> float:
        """What one node costs over a time."""
        if self.prices is None:
            return self.usd_per_hour * (end_s - begin_s) / 3_600.0
        return self.prices.usd(begin_s, end_s)


@dataclass(frozen=True, slots=True)
class GridStep:
    """A time in which the capacity does not change. `event`: index of the event of the trace at its begin, or -1."""

    begin_s: float
    end_s: float
    nodes: int
    nodes_before: int
    lost: int
    event: int

    @property
    def seconds(self) -> float:
        return self.end_s - self.begin_s


def grid_of(trace: CapacityTrace, setup: ReplaySetup) -> tuple[GridStep, ...]:
    """Events of the trace, the moments at which they are announced, and whole ticks between them. Raises TraceError."""
    edges = {event.at_s for event in trace.events if event.at_s < trace.end_s}
    edges |= {max(0.0, event.at_s - setup.notice_s) for event in trace.events if event.lost and setup.notice_s}
    ticks = int(trace.end_s // setup.tick_s) + 1
    if ticks + len(edges) > GRID_MAX:
        raise TraceError(f"{trace.name}: {trace.end_s:g} s are more than {GRID_MAX} ticks of {setup.tick_s:g} s")
    edges |= {tick * setup.tick_s for tick in range(ticks)}
    begins = sorted(edge for edge in edges if edge < trace.end_s)
    by_time = {event.at_s: index for index, event in enumerate(trace.events)}
    steps, nodes = [], 0
    for begin, end in zip(begins, [*begins[1:], trace.end_s], strict=True):
        index = by_time.get(begin, -1)
        before, lost = nodes, 0
        if index >= 0:
            lost = len(trace.events[index].lost)
            nodes += len(trace.events[index].added) - lost
        steps.append(GridStep(begin, end, nodes, before, lost, index))
    return tuple(steps)


def likely_hit(used: int, of: int, lost: int) -> bool:
    """Whether a loss of `lost` of `of` nodes more likely than not takes one of the `used` ones."""
    return lost > 0 and used > 0 and comb(max(0, of - used), lost) * 2 <= comb(of, lost)
