"""Who holds which rank: a member is one slot of one node, a roster puts members on the ranks of a layout. Pure."""

from dataclasses import dataclass
from typing import Any

from liver_core.layout.canonical import JsonReader, digest_of
from liver_core.layout.errors import LayoutError
from liver_core.layout.parallel import ParallelLayout


@dataclass(frozen=True, slots=True, order=True)
class Member:
    """One rank process, by place: equal members of two rosters of one job are the same live process."""

    node_id: str
    slot: int

    def __post_init__(self) -> None:
        if not self.node_id:
            raise LayoutError("node_id", "must not be empty")
        if self.slot < 0:
            raise LayoutError("slot", f"must not be negative, is {self.slot}")

    def __str__(self) -> str:
        return f"{self.node_id}/{self.slot}"

    def to_json(self) -> dict[str, Any]:
        """Node id and slot."""
        return {"node_id": self.node_id, "slot": self.slot}

    @classmethod
    def from_json(cls, data: object, path: str = "member") -> "Member":
        """The inverse of `to_json`."""
        reader = JsonReader(data, path)
        member = cls(node_id=reader.text("node_id"), slot=reader.integer("slot"))
        reader.finish()
        return member


@dataclass(frozen=True, slots=True)
class Roster:
    """The members of one world: `members[rank]` holds `rank` of `layout`. Raises LayoutError when they do not fit."""

    job_id: str
    generation: int
    layout: ParallelLayout
    members: tuple[Member, ...]

    def __post_init__(self) -> None:
        if not self.job_id:
            raise LayoutError("job_id", "must not be empty")
        if self.generation < 0:
            raise LayoutError("generation", f"must not be negative, is {self.generation}")
        if len(self.members) != self.layout.world_size:
            raise LayoutError(
                "members", f"{self.layout} needs {self.layout.world_size} members, {len(self.members)} given"
            )
        if len(set(self.members)) != len(self.members):
            twice = next(member for member in self.members if self.members.count(member) > 1)
            raise LayoutError("members", f"{twice} holds more than one rank")

    def rank_of(self, member: Member) -> int | None:
        """The rank that a member holds, None when it is not in this world."""
        return self.members.index(member) if member in self.members else None

    def node_ids(self) -> tuple[str, ...]:
        """The nodes used, each once, in rank order."""
        return tuple(dict.fromkeys(member.node_id for member in self.members))

    def digest(self) -> str:
        """sha256 over everything, the generation included."""
        return digest_of(self.to_json())

    def to_json(self) -> dict[str, Any]:
        """Job, generation, layout and members in rank order."""
        return {
            "job_id": self.job_id,
            "generation": self.generation,
            "layout": self.layout.to_json(),
            "members": [member.to_json() for member in self.members],
        }

    @classmethod
    def from_json(cls, data: object, path: str = "roster") -> "Roster":
        """The inverse of `to_json`."""
        reader = JsonReader(data, path)
        roster = cls(
            job_id=reader.text("job_id"),
            generation=reader.integer("generation"),
            layout=ParallelLayout.from_json(reader.value("layout"), f"{path}.layout"),
            members=tuple(Member.from_json(item, where) for item, where in reader.items("members")),
        )
        reader.finish()
        return roster
