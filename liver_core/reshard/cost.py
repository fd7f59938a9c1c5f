"""What plans cost: bytes by kind of link, and a lower estimate of seconds from measured link speeds. Pure.

No queueing and no latency: every process and every node is as busy as its own bytes make it, and the busiest one is
the answer. The ladder of fallbacks compares it with the seconds left; a measured handoff overrides it.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from liver_core.layout import Manifest, Roster
from liver_core.reshard.errors import PlanError
from liver_core.reshard.plan import RankPlan


@dataclass(frozen=True, slots=True)
class LinkSpeeds:
    """Bytes a second: memory copy of one process, shared memory or NVLink of one process, network of one node.

    The network speed is for each direction on its own.
    """

    own_process_bytes_per_s: float
    same_node_bytes_per_s: float
    node_network_bytes_per_s: float

    def __post_init__(self) -> None:
        if min(self.own_process_bytes_per_s, self.same_node_bytes_per_s, self.node_network_bytes_per_s) <= 0:
            raise PlanError(f"{self}: speeds must be positive")


@dataclass(frozen=True, slots=True)
class TransferCost:
    """Bytes over all state kinds, and the busiest link. `reason` names it."""

    own_process_bytes: int
    same_node_bytes: int
    network_bytes: int
    seconds: float
    reason: str


def estimate_cost(
    manifest: Manifest, source: Roster, target: Roster, plans: Iterable[RankPlan], speeds: LinkSpeeds
) -> TransferCost:
    """The cost of executing all `plans` at once; a subset of the ranks gives the cost of that subset."""
    busy: defaultdict[str, float] = defaultdict(float)
    totals: Counter[str] = Counter()
    for plan in plans:
        to = target.members[plan.target_rank]
        for transfer in plan.transfers:
            nbytes = transfer.elements * manifest.bytes_per_element
            of = source.members[transfer.source_rank]
            if of == to:
                totals["own"] += nbytes
                busy[f"copies inside {to}"] += nbytes / speeds.own_process_bytes_per_s
            elif of.node_id == to.node_id:
                totals["node"] += nbytes
                for process in (f"shared memory out of {of}", f"shared memory into {to}"):
                    busy[process] += nbytes / speeds.same_node_bytes_per_s
            else:
                totals["network"] += nbytes
                for node in (f"network out of {of.node_id}", f"network into {to.node_id}"):
                    busy[node] += nbytes / speeds.node_network_bytes_per_s
    busiest, seconds = max(sorted(busy.items()), key=lambda entry: entry[1], default=("no link", 0.0))
    return TransferCost(
        own_process_bytes=totals["own"],
        same_node_bytes=totals["node"],
        network_bytes=totals["network"],
        seconds=seconds,
        reason=f"{busiest} is busy for {seconds:.3g} s",
    )
