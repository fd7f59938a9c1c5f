"""The worlds that a simulated job has had: where each comes from, and which is active. Pure.

Numbers follow `liver_core.handoff.generations`, and whether a handoff may become active `service.handoffs.rules`.
"""

from dataclasses import dataclass
from datetime import datetime

from liver_core.handoff import Order
from liver_core.layout import Roster
from service.handoffs.rules import accepts_active, went_through
from service.handoffs.start_times import STARTS_LOOKED_AT, Starts, starts_of
from service.jobs.causes import FirstCause
from service.jobs.tables import SourceKind

KEPT_MAX = 1_000
"""So many of the newest are remembered."""


@dataclass(slots=True)
class GenerationRow:
    """One world. `order`: of a start. `layout`: means something to the host."""

    roster: Roster
    parent: int | None
    source: SourceKind
    created_at: datetime
    reason: str
    checkpoint_step: int = 0
    store_node: str | None = None
    steps_from_at: datetime | None = None
    first_step_at: datetime | None = None
    ended_by: FirstCause | None = None
    handoff_id: str = ""
    order: Order | None = None
    layout: object = None

    @property
    def generation(self) -> int:
        """Its number."""
        return self.roster.generation

    @property
    def is_start(self) -> bool:
        """Whether the service made it."""
        return self.source is not SourceKind.HANDOFF


class GenerationRows:
    """Of one job. `next_number`: above all that are known as used."""

    def __init__(self) -> None:
        self.active: int | None = None
        self.next_number = 1
        self.newest_start: GenerationRow | None = None
        self._rows: dict[int, GenerationRow] = {}

    def __contains__(self, generation: int) -> bool:
        return generation in self._rows

    def get(self, generation: int | None) -> GenerationRow | None:
        """The row of this generation, if it is known."""
        return None if generation is None else self._rows.get(generation)

    @property
    def active_row(self) -> GenerationRow | None:
        """Of the active generation."""
        return self.get(self.active)

    def burn(self, generation: int) -> None:
        """Its number is never given again."""
        self.next_number = max(self.next_number, generation + 1)

    def add(self, row: GenerationRow) -> None:
        """A world, not yet active."""
        self.burn(row.generation)
        self._rows[row.generation] = row
        if row.is_start and (self.newest_start is None or row.generation > self.newest_start.generation):
            self.newest_start = row
        while len(self._rows) > KEPT_MAX:
            del self._rows[min(self._rows)]

    def refusal(self, parent: int, generation: int) -> str | None:
        """Why a handoff that its agents report as active must not become the job's generation; None if it may."""
        return accepts_active(
            active=self.active, parent=parent, generation=generation, started_here=self._started_here()
        )

    def went_through(self, parent: int, generation: int) -> bool:
        """Whether the job has gone on from this generation, which its agents report only now."""
        recorded = {number: row.parent for number, row in self._rows.items()}
        return went_through(parent=parent, generation=generation, recorded=recorded, started_here=self._started_here())

    def created_after(self, generation: int) -> datetime | None:
        """When the first world behind this one was made."""
        return min((row.created_at for number, row in self._rows.items() if number > generation), default=None)

    def starts(self) -> Starts:
        """How the newest starts went."""
        newest = sorted((row for row in self._rows.values() if row.is_start), key=lambda row: -row.generation)
        return starts_of((row.source, row.created_at, row.first_step_at) for row in newest[:STARTS_LOOKED_AT])

    def has_later_start(self, generation: int) -> bool:
        """Whether the service has started a world since this one."""
        return any(number > generation and row.is_start for number, row in self._rows.items())

    def _started_here(self) -> frozenset[int]:
        return frozenset(number for number, row in self._rows.items() if row.is_start)
