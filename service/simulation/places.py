"""What could be had in several places, tick by tick, and at what price: for jobs with a deadline. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass

from service.simulation.moving import MoveCosts, free_moves

TICKS_MAX = 1_000_000


@dataclass(frozen=True, slots=True)
class PlaceSeries:
    """`offered[place][tick]`: nodes that could be had; `usd_per_hour[place][tick]`: of the whole gang on spot."""

    tick_s: float
    places: tuple[str, ...]
    offered: tuple[tuple[int, ...], ...]
    usd_per_hour: tuple[tuple[float, ...], ...]
    on_demand_usd_per_hour: float

    def __post_init__(self) -> None:
        lengths = {len(row) for row in (*self.offered, *self.usd_per_hour)}
        if len(lengths) != 1 or not self.places or len(self.offered) != len(self.places):
            raise ValueError(f"every place needs as many ticks as the others, has {sorted(lengths)}")
        if self.ticks > TICKS_MAX:
            raise ValueError(f"at most {TICKS_MAX} ticks, are {self.ticks}")

    @property
    def ticks(self) -> int:
        return len(self.offered[0])

    def cut(self, begin: int, end: int) -> "PlaceSeries":
        """Only these ticks."""
        return PlaceSeries(
            self.tick_s,
            self.places,
            tuple(row[begin:end] for row in self.offered),
            tuple(row[begin:end] for row in self.usd_per_hour),
            self.on_demand_usd_per_hour,
        )

    def priced(self, usd_per_hour: Sequence[float], on_demand_usd_per_hour: float) -> "PlaceSeries":
        """The same capacity at other prices, one of each place."""
        rows = tuple((usd,) * self.ticks for usd in usd_per_hour)
        return PlaceSeries(self.tick_s, self.places, self.offered, rows, on_demand_usd_per_hour)


@dataclass(frozen=True, slots=True)
class DeadlineJob:
    """Work in seconds of the gang, and the time in which it must be done. `start_s`: from nothing to the first step;
    `moves`: of bringing the state to another place, which costs nothing if None; `gang`: nodes without which it cannot
    run."""

    work_s: float
    deadline_s: float
    start_s: float
    gang: int = 1
    moves: MoveCosts | None = None

    def moves_of(self, series: PlaceSeries) -> MoveCosts:
        """Between the places of the series and, as the last one, on demand. Raises ValueError for another number."""
        size = len(series.places) + 1
        if self.moves is None:
            return free_moves(size)
        if len(self.moves.usd) != size:
            raise ValueError(f"moves: between {size} places with on demand, not {len(self.moves.usd)}")
        return self.moves
