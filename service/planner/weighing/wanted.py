"""What a job should have, by its policy: nodes to hold in each pool, spares among them, and what it has no use for.

Nothing here orders or ends a machine. Pure.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from liver_core.layout.limits import listed
from service.policy.types import Market, ScoredOption

ON_DEMAND_APART = "nodes on demand count as such in a pool of their own, with the on-demand price as its price"


@dataclass(frozen=True, slots=True)
class PoolWant:
    """Nodes of one pool that the job should have. `held`: those that are up and that it may use; `hold`: as many as it
    should have. `place`: the zone or the pool where its world must lie; empty where it may lie anywhere."""

    pool: str
    place: str
    market: Market
    usd_per_hour: float
    held: int
    hold: int

    @property
    def missing(self) -> int:
        """Nodes to buy."""
        return max(0, self.hold - self.held)

    def __str__(self) -> str:
        kind = " on demand" if self.market is Market.ON_DEMAND else ""
        where = f" in {self.place}" if self.place and self.place != self.pool else ""
        return f"{self.missing} of pool {self.pool}{kind}{where}"


@dataclass(frozen=True, slots=True)
class WantedCapacity:
    """The option that the policy wants to have: its layout, on how many nodes, with how many spares beside them, for
    what price, and what it is worth beyond that, both in USD per hour. `gives_back`: free nodes that buy nothing, by
    name. `weighed`: the options that were weighed, the best first; their pools have the policy's names."""

    layout: str
    place: str
    nodes: int
    spares: int
    usd_per_hour: float
    usd_per_hour_worth: float
    pools: tuple[PoolWant, ...]
    gives_back: tuple[str, ...]
    weighed: tuple[ScoredOption, ...]
    reason: str

    def what(self) -> list:
        """By which one want differs from another: prices and scores, which always change a little, do not count."""
        held = [[each.pool, each.place, each.market, each.hold, each.missing] for each in self.pools]
        return [self.layout, self.place, self.nodes, held, list(self.gives_back)]


def said(pools: Sequence[PoolWant], gives_back: Sequence[str], spares: int, acquire_s: float) -> str:
    """What is wanted, for a reason; empty where everything is as it should be."""
    parts = []
    if spares:
        what = "1 spare is held" if spares == 1 else f"{spares} spares are held"
        parts.append(f"{what}, for losses that take {acquire_s:g} s to replace")
    if missing := [str(each) for each in pools if each.missing]:
        parts.append(f"wanted: {', '.join(missing)}")
    if any(each.missing and each.market is Market.ON_DEMAND and not each.held for each in pools):
        parts.append(ON_DEMAND_APART)
    if gives_back:
        parts.append(f"no use for {listed(gives_back)}, which may be given back")
    return "; ".join(parts)
