"""What a node of a pool costs at a time: prices that hold from a moment on until the next one. Pure.

A file is CSV with the columns pool, usd_per_hour and from_s, or effective_from with times of ISO 8601. It may have
egress_usd_per_gb too: of 10^9 bytes that leave the pool, one price for each pool.
"""

import csv
from bisect import bisect_right
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from math import isfinite

ROWS_MAX = 2_000_000
EGRESS = "egress_usd_per_gb"
DATED_S_LEAST = 1e9
"""In seconds since 1970; no trace is that long."""


class PriceError(ValueError):
    """A price that cannot be read, with its row and what is wrong."""


@dataclass(frozen=True, slots=True)
class PriceSteps:
    """Of one pool: `usd_per_hour[i]` counts from `from_s[i]` on; the first also before."""

    from_s: tuple[float, ...]
    usd_per_hour: tuple[float, ...]

    def at(self, at_s: float) -> float:
        return self.usd_per_hour[max(0, bisect_right(self.from_s, at_s) - 1)]

    def usd(self, begin_s: float, end_s: float) -> float:
        """Of one node over a time."""
        total, at = 0.0, begin_s
        first = bisect_right(self.from_s, begin_s)
        for edge in (*self.from_s[first : bisect_right(self.from_s, end_s)], end_s):
            total += self.at(at) * max(0.0, edge - at) / 3_600.0
            at = max(at, edge)
        return total


@dataclass(frozen=True, slots=True)
class PriceBook:
    """Prices of every pool. `egress_usd_per_gb`: of 10^9 bytes that leave it, where that is known."""

    pools: Mapping[str, PriceSteps]
    egress_usd_per_gb: Mapping[str, float] = field(default_factory=dict)

    def of(self, pool: str) -> PriceSteps:
        if pool not in self.pools:
            raise PriceError(
                f"pool {pool!r} has no price; there are prices of {', '.join(sorted(self.pools)) or 'none'}"
            )
        return self.pools[pool]

    def at(self, pool: str, at_s: float) -> float:
        return self.of(pool).at(at_s)

    def from_its_begin(self) -> "PriceBook":
        """With times counted from the first price where they are dates: a replay begins at 0."""
        first_s = min((steps.from_s[0] for steps in self.pools.values()), default=0.0)
        if first_s < DATED_S_LEAST:
            return self
        moved = {
            pool: PriceSteps(tuple(at_s - first_s for at_s in steps.from_s), steps.usd_per_hour)
            for pool, steps in self.pools.items()
        }
        return PriceBook(moved, self.egress_usd_per_gb)


def constant(prices: Mapping[str, float]) -> PriceBook:
    return PriceBook({pool: PriceSteps((0.0,), (usd,)) for pool, usd in prices.items()})


def steps(pairs: Iterable[tuple[float, float]]) -> PriceSteps:
    """Of (from when, price), in any order; a price that does not change is one step."""
    kept: list[tuple[float, float]] = []
    for from_s, usd in sorted(pairs):
        if not kept or usd != kept[-1][1]:
            kept.append((from_s, usd))
    if not kept:
        raise PriceError("there is no price")
    return PriceSteps(tuple(at for at, _ in kept), tuple(usd for _, usd in kept))


def read_prices(text: str) -> PriceBook:
    """The prices of a file. Raises PriceError naming row and column."""
    found: dict[str, list[tuple[float, float]]] = {}
    egress: dict[str, float] = {}
    rows = csv.DictReader(text.splitlines())
    names = set(rows.fieldnames or ())
    if not {"pool", "usd_per_hour"} <= names or not names & {"from_s", "effective_from"}:
        raise PriceError("the first line must name the columns pool, usd_per_hour and from_s or effective_from")
    for number, row in enumerate(rows, start=2):
        if number > ROWS_MAX:
            raise PriceError(f"at most {ROWS_MAX} rows")
        pool = row["pool"] or ""
        found.setdefault(pool, []).append((_time(row, number), _amount(row, "usd_per_hour", number)))
        if row.get(EGRESS):
            usd = _amount(row, EGRESS, number)
            if egress.setdefault(pool, usd) != usd:
                raise PriceError(
                    f"row {number}: {EGRESS} of pool {pool} must be {egress[pool]:g} as before, is {usd:g}"
                )
    return PriceBook({pool: steps(pairs) for pool, pairs in found.items()}, egress)


def _time(row: Mapping[str, str | None], number: int) -> float:
    text = row.get("from_s") or row.get("effective_from") or ""
    try:
        return float(text) if row.get("from_s") else datetime.fromisoformat(text).timestamp()
    except ValueError:
        raise PriceError(f"row {number}: {text!r} is neither seconds nor a time of ISO 8601") from None


def _amount(row: Mapping[str, str | None], column: str, number: int) -> float:
    try:
        usd = float(row[column] or "")
    except ValueError:
        usd = -1.0
    if not isfinite(usd) or usd < 0:
        raise PriceError(f"row {number}: {column} must be a number of at least 0, is {row[column]!r}")
    return usd
