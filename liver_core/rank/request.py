"""What a rank needs to know of a handoff. Pure: the agent makes one from an order without importing torch."""

from __future__ import annotations

from dataclasses import dataclass, field

from liver_core.handoff.messages import CutoverDeadlines, Rung, StoreAddress
from liver_core.layout import Member, Roster


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What a rank needs to know of a handoff order. `source` None: a first start, or a start from a checkpoint.

    `rung`: how the state is to move from a living source. Where a rank finds that it cannot stream, all of them copy it
    in the pause, with a reason; on DROP_STEP the step under way is dropped all the same; on RESCUE only what leavers
    alone hold is to be moved by `deadline_utc`, and `cutover.build_s` is for the rest. `target_revision`: the plan
    revision in which target and rung became what they are; ranks that build for the same one meet, and what they name
    in the store carries it.
    """

    job_id: str
    handoff_id: str
    generation: int
    plan_revision: int
    source: Roster | None
    target: Roster
    store: StoreAddress
    deadline_utc: float
    cutover: CutoverDeadlines = field(default_factory=CutoverDeadlines)
    checkpoint: str | None = None
    rung: Rung = Rung.STOP_AND_COPY
    target_revision: int = 1

    @property
    def streams(self) -> bool:
        """Whether state is to stream while the source world trains."""
        return self.source is not None and self.rung.streams

    @property
    def rescues(self) -> bool:
        """Whether leavers are released before the target world is built."""
        return self.source is not None and self.rung is Rung.RESCUE

    def boundary_by(self, member: Member) -> float:
        """When `member` must be past the boundary, seconds since 1970 (see `liver_core.handoff.Order`)."""
        newcomer = self.source is not None and member not in self.source.members
        return self.deadline_utc + (self.cutover.newcomer_s(self.rung) if newcomer else 0.0)

    def names(self, member: Member) -> bool:
        """Whether `member` has a part in it."""
        return member in self.target.members or (self.source is not None and member in self.source.members)

    def rank_of(self, member: Member) -> int:
        """The rank that reasons name: of the target world where `member` has one there, else of the source, else 0."""
        if member in self.target.members:
            return self.target.members.index(member)
        if self.source is not None and member in self.source.members:
            return self.source.members.index(member)
        return 0
