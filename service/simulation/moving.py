"""What it costs to bring a job's state to another place: money for its bytes, and time on the link. Pure."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf, isfinite

BYTES_PER_GB = 1e9


@dataclass(frozen=True, slots=True)
class Link:
    """From one place to another. `usd_per_gb`: of 10^9 bytes that leave; `bytes_per_s`: how fast they go."""

    usd_per_gb: float = 0.0
    bytes_per_s: float = inf

    def __post_init__(self) -> None:
        if not (isfinite(self.usd_per_gb) and self.usd_per_gb >= 0):
            raise ValueError(f"usd_per_gb must be a number of at least 0, is {self.usd_per_gb}")
        if not self.bytes_per_s > 0:
            raise ValueError(f"bytes_per_s must be above 0, is {self.bytes_per_s}")


@dataclass(frozen=True, slots=True)
class MoveCosts:
    """`usd[source][target]`, `seconds[source][target]`: of moving the state between places, by their number; nothing
    for staying. The last place is on demand."""

    usd: tuple[tuple[float, ...], ...]
    seconds: tuple[tuple[float, ...], ...]

    def __post_init__(self) -> None:
        size = len(self.usd)
        if len(self.seconds) != size or any(len(row) != size for row in (*self.usd, *self.seconds)):
            raise ValueError(f"moves are costed between each two of {size} places, rows have other lengths")
        if any(value < 0 or not isfinite(value) for row in (*self.usd, *self.seconds) for value in row):
            raise ValueError("a move costs a finite number of dollars and seconds, at least 0")
        if any(self.usd[at][at] or self.seconds[at][at] for at in range(size)):
            raise ValueError("a state that stays where it is costs nothing to move")

    def seconds_to(self, target: int) -> float:
        """The longest time from anywhere."""
        return max(row[target] for row in self.seconds)


def free_moves(places: int) -> MoveCosts:
    """Between so many places, on demand among them."""
    row = (0.0,) * places
    return MoveCosts((row,) * places, (row,) * places)


def moves_between(places: Sequence[str], link: Callable[[str, str], Link], *, state_bytes: float) -> MoveCosts:
    """Of a state of so many bytes between these places, the last of which is where on-demand nodes are."""

    def table(cost: Callable[[Link], float]) -> tuple[tuple[float, ...], ...]:
        return tuple(
            tuple(0.0 if source == target else cost(link(one, other)) for target, other in enumerate(places))
            for source, one in enumerate(places)
        )

    return MoveCosts(
        usd=table(lambda found: found.usd_per_gb * state_bytes / BYTES_PER_GB),
        seconds=table(lambda found: state_bytes / found.bytes_per_s),
    )
