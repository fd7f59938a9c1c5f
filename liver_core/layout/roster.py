"""Who holds which rank: a member is one slot of one node, a roster puts members on the ranks of a layout. Pure."""

from dataclasses import dataclass
from typing import Annotated

from liver_core.layout.canonical import digest_of
from liver_core.layout.codec import to_json
from liver_core.layout.layout_error import LayoutError
from liver_core.layout.limits import GENERATION_MAX, RANKS_MAX, STRICT, Bound, JobId, NodeId, Slot
from liver_core.layout.parallel import ParallelLayout


@dataclass(frozen=True, slots=True, order=True)
class Member:
    """One rank process, by place: equal members of two rosters of one job are the same live process."""

    __pydantic_config__ = STRICT

    node_id: NodeId
    slot: Slot

    def __post_init__(self) -> None:
        if not self.node_id:
            raise LayoutError("node_id", "must not be empty")
        if self.slot < 0:
            raise LayoutError("slot", f"must not be negative, is {self.slot}")

    def __str__(self) -> str:
        return f"{self.node_id}/{self.slot}"


Members = Annotated[tuple[Member, ...], Bound(min_length=1, max_length=RANKS_MAX)]


@dataclass(frozen=True, slots=True)
class Roster:
    """The members of one world: `members[rank]` holds `rank` of `layout`. Raises LayoutError when they do not fit."""

    __pydantic_config__ = STRICT

    job_id: JobId
    generation: Annotated[int, Bound(ge=0, le=GENERATION_MAX)]
    layout: ParallelLayout
    members: Members

    def __post_init__(self) -> None:
        if not self.job_id:
            raise LayoutError("job_id", "must not be empty")
        if self.generation < 0:
            raise LayoutError("generation", f"must not be negative, is {self.generation}")
        check_members(self.layout, self.members)

    def rank_of(self, member: Member) -> int | None:
        """The rank that a member holds, None when it is not in this world."""
        return self.members.index(member) if member in self.members else None

    def node_ids(self) -> tuple[str, ...]:
        """The nodes used, each once, in rank order."""
        return tuple(dict.fromkeys(member.node_id for member in self.members))

    def digest(self) -> str:
        """sha256 over everything, the generation included."""
        return digest_of(to_json(self))


def check_members(layout: ParallelLayout, members: tuple[Member, ...]) -> None:
    """Raises LayoutError unless there is one member for each rank, and no member holds two."""
    if len(members) != layout.world_size:
        raise LayoutError("members", f"{layout} needs {layout.world_size} members, {len(members)} given")
    if len({(member.node_id, member.slot) for member in members}) != len(members):
        twice = next(member for member in members if members.count(member) > 1)
        raise LayoutError("members", f"{twice} holds more than one rank")
