"""The least that a job with a deadline could have cost, had everything been known: a lower bound on the optimum. Pure.

Lagrange: work is sold at a price, for which the best path through the ticks follows by dynamic programming; the price
at which least is left over gives the bound. It is at most the cost of any schedule that does the work in time on the
same ticks, also of those that end within a tick. Moves of the state cost it the same dollars and time as a replay.
"""

from itertools import pairwise
from math import ceil

from service.simulation.places import DeadlineJob, PlaceSeries

PRICE_ROUNDS = 48
PRICE_FACTOR_MAX = 20.0


def least_cost_usd(series: PlaceSeries, job: DeadlineJob) -> float:
    """USD; of the part of `series` that ends at the deadline."""
    paths = _Paths(series, job)

    def bound(price: float) -> float:
        return price * job.work_s - paths.best(price)

    low, high = 0.0, PRICE_FACTOR_MAX * series.on_demand_usd_per_hour / 3_600.0
    ratio = (5**0.5 - 1) / 2
    left, right = high - ratio * (high - low), low + ratio * (high - low)
    at_left, at_right = bound(left), bound(right)
    best = max(at_left, at_right)
    for _ in range(PRICE_ROUNDS):
        if at_left >= at_right:
            high, right, at_right = right, left, at_left
            left = high - ratio * (high - low)
            at_left = bound(left)
        else:
            low, left, at_left = left, right, at_right
            right = low + ratio * (high - low)
            at_right = bound(right)
        best = max(best, at_left, at_right)
    return best


def _work_by_stage(tick_s: float, start_s: float) -> tuple[float, ...]:
    """Work done in the first, second ... tick of a start, as long as it lasts; whole ticks follow."""
    stages = ceil(start_s / tick_s) if start_s else 0
    return tuple(max(0.0, (at + 1) * tick_s - max(start_s, at * tick_s)) for at in range(stages))


class _Stages:
    """What is worked in each tick since a start, for starts of several lengths one after the other. Stage 0: whole
    ticks, for ever."""

    def __init__(self, tick_s: float, starts_s: set[float]) -> None:
        self.work, self.after = [tick_s], [0]
        self.first: dict[float, int] = {}
        for start_s in sorted(starts_s):
            row = _work_by_stage(tick_s, start_s)
            begin = len(self.work)
            self.first[start_s] = begin if row else 0
            self.work += row
            self.after += [*(later for _, later in pairwise(range(begin, begin + len(row)))), *((0,) if row else ())]


class _Paths:
    """The best path for a price of work, by going back from the last tick."""

    def __init__(self, series: PlaceSeries, job: DeadlineJob) -> None:
        hours = series.tick_s / 3_600.0
        self._ticks = [
            [
                (index, row[tick] * hours)
                for index, row in enumerate(series.usd_per_hour)
                if series.offered[index][tick] >= job.gang
            ]
            + [(len(series.places), series.on_demand_usd_per_hour * hours)]
            for tick in range(min(series.ticks, ceil(job.deadline_s / series.tick_s)))
        ]
        moves = job.moves_of(series)
        starts = [[job.start_s + seconds for seconds in row] for row in moves.seconds]
        self._stages = _Stages(series.tick_s, {job.start_s, *(start for row in starts for start in row)})
        self._places = len(series.places) + 1
        first = [[self._stages.first[start] for start in row] for row in starts]
        # Where the state may be when the job stands still; places that are as far from all others are one. The last
        # one: nowhere, before the first start.
        kinds: dict[tuple[tuple[int, float], ...], int] = {}
        self._kind = [kinds.setdefault(tuple(zip(first[at], moves.usd[at], strict=True)), len(kinds))
                      for at in range(self._places)]  # fmt: skip
        self._nowhere = kinds.setdefault(((self._stages.first[job.start_s], 0.0),) * self._places, len(kinds))
        self._ways = list(kinds)

    def best(self, price: float) -> float:
        """The most that work at this price can earn, less what nodes and moves cost."""
        work, follows = self._stages.work, self._stages.after
        worth, count = [price * each for each in work], range(len(work))
        idle = [0.0] * len(self._ways)
        after = [[0.0] * len(work) for _ in range(self._places)]
        for offers in reversed(self._ticks):
            now: dict[int, list[float]] = {}
            for place, usd in offers:
                follow = after[place]
                now[place] = [worth[stage] - usd + follow[follows[stage]] for stage in count]
            for kind, way in enumerate(self._ways):
                start = idle[kind]
                for place, _ in offers:
                    stage, moved_usd = way[place]
                    value = now[place][stage] - moved_usd
                    if value > start:
                        start = value
                idle[kind] = start
            after = [
                [value if value > idle[kind] else idle[kind] for value in now[place]]
                if place in now
                else [idle[kind]] * len(work)
                for place, kind in enumerate(self._kind)
            ]
        return idle[self._nowhere]
