"""What the journal keeps of one slot, beside what its participant must not forget, and of the handoffs led here."""

from dataclasses import dataclass, field
from typing import Any

from agent.journal import Journal, Table
from liver_core.handoff import ParticipantRecord, StoreAddress
from liver_core.layout.limits import STRICT, ShortText

MIRRORS_MAX = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotMemory:
    """One slot: the participant's record, and which birth its world had (origin and store), which the record lacks."""

    __pydantic_config__ = STRICT

    record: ParticipantRecord = field(default_factory=ParticipantRecord)
    origin: ShortText = ""
    store: StoreAddress | None = None


def keep_mirror(journal: Journal, job_id: str, handoff_id: str, data: dict[str, Any]) -> None:
    """Keep the mirror of a handoff, and of the job's others only the newest."""
    journal.put(Table.HANDOFF, handoff_id, data)
    mine = [key for key, kept in journal.items(Table.HANDOFF) if kept["job_id"] == job_id]
    for key in mine[:-MIRRORS_MAX]:
        journal.delete(Table.HANDOFF, key)
