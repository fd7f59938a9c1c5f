"""How long a pool goes on without a loss, from the leases that we had there. Pure.

A spell begins with a pool's first node or with a loss, and ends with the next loss: losses within three minutes are
one. While we have no node there, nothing is seen; what we gave back ourselves is censored.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from service.policy.hazard import (
    GROUP_WITHIN_S,
    HOUR_S,
    ChangeEvents,
    LifeTable,
    volatility,
)


@dataclass(frozen=True, slots=True)
class LeaseSeen:
    """One lease of a pool, in seconds before and after any one moment. `ended_s`: None while it lasts. `was_lost`: it
    ended, and not by our will."""

    began_s: float
    ended_s: float | None = None
    was_lost: bool = False


@dataclass(frozen=True, slots=True)
class PoolLife:
    """`life_s`: expected time to the next loss. `losses`: events in `watched_h` hours; see `PoolMarket`."""

    life_s: float
    losses: int
    watched_h: float
    volatility: float
    group_sizes: tuple[tuple[int, float], ...]


def life_of(leases: Sequence[LeaseSeen], *, since_s: float, now_s: float) -> PoolLife:
    """Of one pool, as seen from `since_s` on: a spell that ran already then is at risk from the age that it had."""
    table, sizes, losses = LifeTable(), ChangeEvents(), _losses(leases, since_s)
    for at_s, nodes in losses:
        sizes.count(at_s, nodes)
    watched_s, age_s = 0.0, 0.0
    edges = [at_s for at_s, _ in losses]
    for begin_s, end_s in _held(leases, now_s):
        spell_s = begin_s
        for edge in (*(at_s for at_s in edges if begin_s < at_s <= end_s), None):
            until_s = end_s if edge is None else edge
            if until_s > since_s:
                table.watch(max(spell_s, since_s) - spell_s, until_s - spell_s, lost=edge is not None)
                watched_s += until_s - max(spell_s, since_s)
            if edge is not None:
                spell_s = edge
        age_s = now_s - spell_s if end_s >= now_s else 0.0
    rates = table.rates_per_hour()
    expected = len(losses) / (watched_s / HOUR_S) if watched_s >= HOUR_S else rates[0]
    recent = volatility([(now_s - at_s) / HOUR_S for at_s, _ in losses], expected_per_hour=expected)
    life_s = table.life_s(max(0.0, age_s), volatility=recent)
    return PoolLife(life_s, len(losses), watched_s / HOUR_S, recent, sizes.group_sizes())


def _losses(leases: Sequence[LeaseSeen], since_s: float) -> list[tuple[float, int]]:
    """(when, how many nodes) of each event since then: it begins with its first loss."""
    found: list[tuple[float, int]] = []
    last_s = float("-inf")
    for at_s in sorted(each.ended_s for each in leases if each.was_lost and each.ended_s is not None):
        if at_s < since_s:
            continue
        if found and at_s - last_s <= GROUP_WITHIN_S:
            found[-1] = (found[-1][0], found[-1][1] + 1)
        else:
            found.append((at_s, 1))
        last_s = at_s
    return found


def _held(leases: Sequence[LeaseSeen], now_s: float) -> list[tuple[float, float]]:
    """The times in which the pool had a node of ours, merged."""
    found: list[tuple[float, float]] = []
    for begin_s, end_s in sorted((each.began_s, now_s if each.ended_s is None else each.ended_s) for each in leases):
        if found and begin_s <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], end_s))
        else:
            found.append((begin_s, end_s))
    return found
