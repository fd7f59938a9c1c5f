"""What a move of a job's state takes over the wires that were measured. Pure."""

from collections.abc import Collection
from statistics import median
from typing import NamedTuple

from agent.protocol.wires import WireKind


class MoveEstimate(NamedTuple):
    """Of all state, from all nodes at once, each to one other. `seconds` None: no wire was measured. `is_live`: the job
    trains meanwhile; None where no wire says."""

    state_bytes: float
    seconds: float | None
    is_live: bool | None

    @property
    def copy_s(self) -> float | None:
        """Seconds for which the job would stand while its state is copied, to one digit, since no two measurements are
        alike; None where it would not stand, as far as known."""
        return float(f"{self.seconds:.1g}") if self.is_live is False and self.seconds is not None else None


def move_estimate(state_bytes: float, nodes: int, measured: Collection[tuple[WireKind | None, float]]) -> MoveEstimate:
    """`measured`: kind and bytes per second of each wire, None for one over which nothing could be read. They are taken
    to be alike: the median counts for all. But one that is not live makes the whole move wait for the pause."""
    speeds = [bytes_per_s for _, bytes_per_s in measured if bytes_per_s > 0]
    seconds = state_bytes / (max(1, nodes) * median(speeds)) if speeds else None
    is_live = all(kind is not None and kind.is_live for kind, _ in measured) if measured else None
    return MoveEstimate(state_bytes, seconds, is_live)
