"""The least that a job with a deadline could have cost, had everything been known: a lower bound on the optimum. Pure.

Lagrange: work is sold at a price, for which the best path through the ticks follows by dynamic programming; the price
at which least is left over gives the bound. It is at most the cost of any schedule that does the work in time on the
same ticks, also of those that end within a tick.
"""

from math import ceil

from service.simulation.places import DeadlineJob, PlaceSeries

PRICE_ROUNDS = 48
PRICE_FACTOR_MAX = 20.0


def least_cost_usd(series: PlaceSeries, job: DeadlineJob) -> float:
    """USD; of the part of `series` that ends at the deadline."""
    work_by_stage = _work_by_stage(series.tick_s, job.start_s)
    paths = _Paths(series, job, work_by_stage)

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
    """Work done in the first, second ... tick after a start; from the last on, whole ticks."""
    stages = ceil(start_s / tick_s) if start_s else 0
    return (*(max(0.0, (at + 1) * tick_s - max(start_s, at * tick_s)) for at in range(stages)), tick_s)


class _Paths:
    """The best path for a price of work, by going back from the last tick."""

    def __init__(self, series: PlaceSeries, job: DeadlineJob, work_by_stage: tuple[float, ...]) -> None:
        self._work = work_by_stage
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
        self._places = len(series.places) + 1

    def best(self, price: float) -> float:
        """The most that work at this price can earn, less what nodes cost. Moves between places cost no egress here,
        which keeps it a bound."""
        stages = len(self._work)
        worth = [price * work for work in self._work]
        idle = 0.0
        after = [[0.0] * stages for _ in range(self._places)]
        for offers in reversed(self._ticks):
            now: list[list[float] | None] = [None] * self._places
            start = idle
            for place, usd in offers:
                follow = after[place]
                row = [worth[stage] - usd + follow[min(stage + 1, stages - 1)] for stage in range(stages)]
                now[place] = row
                if row[0] > start:
                    start = row[0]
            idle = start
            after = [
                [start] * stages if row is None else [value if value > start else start for value in row] for row in now
            ]
        return idle
