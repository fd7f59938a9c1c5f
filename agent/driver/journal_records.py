"""What the journal keeps of one slot, beside what its participant must not forget, and of the handoffs led here."""

from dataclasses import dataclass, field
from typing import Any

from agent.journal import Journal, Table
from agent.protocol.sync import HandoffMirror
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


def keep_mirror(journal: Journal, mirror: HandoffMirror) -> None:
    """Keep the mirror of a handoff, and of the job's others only the newest."""
    journal.put(Table.HANDOFF, str(mirror.handoff_id), mirror.model_dump(mode="json", by_alias=True))
    mine = [key for key, kept in journal.items(Table.HANDOFF) if kept["job_id"] == mirror.job_id]
    for key in mine[:-MIRRORS_MAX]:
        journal.delete(Table.HANDOFF, key)


def keep_proposal(journal: Journal, job_id: str, record: dict[str, Any], opened: HandoffMirror | None) -> None:
    """Keep a proposer's record. The mirror of a handoff that it has just `opened` goes first: an agent that is killed
    in between must still be able to tell of it."""
    if opened is not None:
        keep_mirror(journal, opened)
    journal.put(Table.PROPOSER, job_id, record)
