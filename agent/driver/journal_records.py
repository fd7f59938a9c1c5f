"""What the journal keeps of one slot, beside what its participant must not forget. Pure."""

from dataclasses import dataclass, field

from liver_core.handoff import ParticipantRecord, StoreAddress
from liver_core.layout.limits import STRICT, ShortText


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotMemory:
    """One slot: the participant's record, and which birth its world had (origin and store), which the record lacks."""

    __pydantic_config__ = STRICT

    record: ParticipantRecord = field(default_factory=ParticipantRecord)
    origin: ShortText = ""
    store: StoreAddress | None = None
