"""How long capacity lasts: hazards by age, from spells that were cut short or seen late, with a prior. Pure.

A spell is capacity of one pool from when it came to when it went. The table is the Nelson-Aalen estimate grouped by
age: losses over time at risk in each class of age. What we ended ourselves is censored; a spell that already ran when
it was first seen is at risk only from then on. Nothing is forecast.
"""

from bisect import bisect_right
from collections import deque
from collections.abc import Sequence
from itertools import pairwise
from math import exp, inf

HOUR_S = 3_600.0
AGES_H = (0.0, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0)
"""Where the classes of age begin. The last one has no end."""
PRIOR_PER_HOUR = (1.5, 0.68, 0.37, 0.175, 0.12, 0.08, 0.07, 0.02)
"""By class of age: the mean of the hazards of capacity spells of V100 in nine zones of AWS (45 days of 2023) and of
H100 in thirteen zones of GCP (14 days of 2025)."""
PRIOR_WEIGHT_H = 3.0
"""The prior counts as much as so many hours at risk in each class."""
GROUP_WITHIN_S = 180.0
"""Losses of one pool within so long are one event: of interruptions of one type and zone that come together, 92 % come
within three minutes."""
GROUPS_KEPT = 256
VOLATILITY_WINDOWS_H = (6.0, 24.0)
VOLATILITY_MAX = 4.0


class LifeTable:
    """Losses and hours at risk of one pool, by age. `factor` scales the prior."""

    def __init__(self, *, factor: float = 1.0, prior_weight_h: float = PRIOR_WEIGHT_H) -> None:
        self._prior = tuple(rate * factor for rate in PRIOR_PER_HOUR)
        self._weight_h = prior_weight_h
        self._lost = [0] * len(AGES_H)
        self._at_risk_h = [0.0] * len(AGES_H)

    def watch(self, from_age_s: float, to_age_s: float, *, lost: bool) -> None:
        """Capacity was seen from one age to another; `lost`: it went then, and not by our will."""
        if to_age_s < from_age_s:
            raise ValueError(f"a spell is watched from age {from_age_s:g} s to {to_age_s:g} s, which is before")
        low, high = from_age_s / HOUR_S, to_age_s / HOUR_S
        for index, begin in enumerate(AGES_H):
            end = AGES_H[index + 1] if index + 1 < len(AGES_H) else inf
            self._at_risk_h[index] += max(0.0, min(high, end) - max(low, begin))
        if lost:
            self._lost[class_of(to_age_s)] += 1

    def rates_per_hour(self) -> tuple[float, ...]:
        """The hazard of each class of age."""
        return tuple(
            (lost + prior * self._weight_h) / (at_risk + self._weight_h)
            for lost, at_risk, prior in zip(self._lost, self._at_risk_h, self._prior, strict=True)
        )

    def life_s(self, age_s: float, *, volatility: float = 1.0, most_s: float = 24 * HOUR_S) -> float:
        """Expected time left to capacity of this age, counted up to `most_s`."""
        return expected_life_s(self.rates_per_hour(), age_s, volatility=volatility, most_s=most_s)


def class_of(age_s: float) -> int:
    return bisect_right(AGES_H, age_s / HOUR_S) - 1


def expected_life_s(rates: Sequence[float], age_s: float, *, volatility: float = 1.0, most_s: float) -> float:
    """The integral of the survival from this age on, over at most `most_s`."""
    age, end = age_s / HOUR_S, (age_s + most_s) / HOUR_S
    survives, total_h = 1.0, 0.0
    edges = (*AGES_H[1:], inf)
    for rate, edge in zip(rates, edges, strict=True):
        if edge <= age:
            continue
        span, hazard = min(edge, end) - age, rate * volatility
        left = exp(-hazard * span)
        total_h += survives * ((1.0 - left) / hazard if hazard > 0 else span)
        survives, age = survives * left, min(edge, end)
        if age >= end:
            break
    return total_h * HOUR_S


def volatility(losses_h_ago: Sequence[float], *, expected_per_hour: float) -> float:
    """The worst ratio of losses seen to losses expected over the recent windows, at least 1 and bounded."""
    ratios = (
        (sum(ago <= window for ago in losses_h_ago) + 1.0) / (expected_per_hour * window + 1.0)
        for window in VOLATILITY_WINDOWS_H
    )
    return min(max(1.0, *ratios), VOLATILITY_MAX)


class ChangeEvents:
    """Losses of nodes of one pool, or gains: how often they come and of how many nodes at once. A node that goes within
    three minutes of the one before belongs to the same event."""

    def __init__(self, *, prior_events: float = 1.0, prior_hours: float = 1.0) -> None:
        self._sizes: deque[int] = deque(maxlen=GROUPS_KEPT)
        self._events, self._hours = prior_events, prior_hours
        self._watched_to_s, self._last_loss_s = 0.0, -inf

    def watch(self, until_s: float) -> None:
        """The pool had nodes of ours until then."""
        self._hours += max(0.0, until_s - self._watched_to_s) / HOUR_S
        self._watched_to_s = max(self._watched_to_s, until_s)

    def skip(self, until_s: float) -> None:
        """It had none until then: nothing was at risk."""
        self._watched_to_s = max(self._watched_to_s, until_s)

    def count(self, at_s: float, nodes: int) -> None:
        if self._sizes and at_s - self._last_loss_s <= GROUP_WITHIN_S:
            self._sizes[-1] += nodes
        else:
            self._sizes.append(nodes)
            self._events += 1.0
        self._last_loss_s = at_s

    def life_s(self) -> float:
        """Expected time to the next event."""
        return self._hours * HOUR_S / self._events

    def group_sizes(self) -> tuple[tuple[int, float], ...]:
        """(nodes, share of the events) of what was seen; single nodes as long as nothing was."""
        counts: dict[int, int] = {}
        for size in self._sizes:
            counts[size] = counts.get(size, 0) + 1
        return tuple((size, count / len(self._sizes)) for size, count in sorted(counts.items())) or ((1, 1.0),)


def spells_of(available: Sequence[bool], *, tick_s: float) -> list[tuple[float, float, bool]]:
    """(from age, to age, lost) of each spell in which capacity was to be had. The first one, where it ran already, is
    seen from an unknown age on, which counts as 0; the last one, where it still runs, is censored."""
    edges = [0, *(at for at in range(1, len(available)) if available[at] != available[at - 1]), len(available)]
    return [
        (0.0, (end - begin) * tick_s, end < len(available))
        for begin, end in pairwise(edges)
        if end > begin and available[begin]
    ]
