"""Who holds which rank: a member is one slot of one node, a roster puts members on the ranks of a layout. Pure."""

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain, groupby
from typing import Annotated, Any, overload

from liver_core.layout.canonical import digest_of
from liver_core.layout.codec import to_json
from liver_core.layout.layout_error import LayoutError
from liver_core.layout.limits import GENERATION_MAX, RANKS_MAX, SLOTS_MAX, STRICT, Bound, JobId, NodeId, Slot
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
class NodeSeats:
    """Ranks that follow each other on one node: the slot of each."""

    __pydantic_config__ = STRICT

    node_id: NodeId
    slots: Annotated[tuple[Slot, ...], Bound(min_length=1, max_length=SLOTS_MAX)]


class Seats(Sequence[Member]):
    """The members of a world in rank order, kept by node: thousands of ranks are read and compared as fast as their
    nodes. In JSON they are NodeSeats. Equal to a tuple of the same members."""

    __slots__ = ("_at", "_of_node", "_runs", "_starts")

    def __init__(self, runs: Iterable[NodeSeats]) -> None:
        joined: list[NodeSeats] = []
        for run in runs:
            if joined and joined[-1].node_id == run.node_id:
                joined[-1] = NodeSeats(run.node_id, joined[-1].slots + run.slots)
            else:
                joined.append(run)
        self._runs = tuple(joined)
        self._starts = [0, *accumulate(len(run.slots) for run in joined)]
        self._of_node: dict[str, list[int]] = {}
        for number, run in enumerate(joined):
            self._of_node.setdefault(run.node_id, []).append(number)

    @staticmethod
    def of(members: Sequence[Member]) -> "Seats":
        """The same members."""
        if isinstance(members, Seats):
            return members
        nodes = groupby(members, key=lambda member: member.node_id)
        return Seats(NodeSeats(node_id, tuple(member.slot for member in there)) for node_id, there in nodes)

    @property
    def runs(self) -> tuple[NodeSeats, ...]:
        """As long as possible, in rank order."""
        return self._runs

    @property
    def node_ids(self) -> tuple[str, ...]:
        """The nodes used, each once, in rank order."""
        return tuple(self._of_node)

    def rank_of(self, member: Member) -> int | None:
        """Its place; None if it has none."""
        for number in self._of_node.get(member.node_id, ()):
            if member.slot in self._runs[number].slots:
                return self._starts[number] + self._runs[number].slots.index(member.slot)
        return None

    def twice(self) -> Member | None:
        """A member that is here more than once."""
        for node_id, numbers in self._of_node.items():
            there = [self._runs[number].slots for number in numbers]
            slots = there[0] if len(there) == 1 else tuple(chain.from_iterable(there))
            if len(set(slots)) < len(slots):
                return Member(node_id, next(slot for slot in slots if slots.count(slot) > 1))
        return None

    def __len__(self) -> int:
        return self._starts[-1]

    def __iter__(self) -> Iterator[Member]:
        return (Member(run.node_id, slot) for run in self._runs for slot in run.slots)

    def __contains__(self, member: object) -> bool:
        return isinstance(member, Member) and self.rank_of(member) is not None

    @overload
    def __getitem__(self, at: int) -> Member: ...
    @overload
    def __getitem__(self, at: slice) -> tuple[Member, ...]: ...
    def __getitem__(self, at: int | slice) -> Member | tuple[Member, ...]:
        if isinstance(at, slice):
            return tuple(self)[at]
        place = at if at >= 0 else at + len(self)
        if not 0 <= place < len(self):
            raise IndexError(f"rank {at} of {len(self)}")
        number = bisect_right(self._starts, place) - 1
        run = self._runs[number]
        return Member(run.node_id, run.slots[place - self._starts[number]])

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Seats):
            return self._runs == other._runs
        return tuple(self) == other if isinstance(other, tuple) else NotImplemented

    def __hash__(self) -> int:
        return hash(tuple(self))

    def __repr__(self) -> str:
        return f"Seats({', '.join(map(str, self))})"


class _ByNode:
    """Members that are read and written as NodeSeats."""

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> Any:
        runs = handler.generate_schema(tuple[NodeSeats, ...]) | {"min_length": 1, "max_length": RANKS_MAX}
        written = {"type": "function-plain", "function": lambda seats: seats.runs, "return_schema": runs}
        read = {"type": "no-info", "function": Seats}
        return {"type": "function-after", "function": read, "schema": runs, "serialization": written}


@dataclass(frozen=True, slots=True)
class Roster:
    """The members of one world: `members[rank]` holds `rank` of `layout`. Raises LayoutError when they do not fit."""

    __pydantic_config__ = STRICT

    job_id: JobId
    generation: Annotated[int, Bound(ge=0, le=GENERATION_MAX)]
    layout: ParallelLayout
    members: Annotated[Sequence[Member], _ByNode()]

    def __post_init__(self) -> None:
        if not self.job_id:
            raise LayoutError("job_id", "must not be empty")
        if self.generation < 0:
            raise LayoutError("generation", f"must not be negative, is {self.generation}")
        object.__setattr__(self, "members", Seats.of(self.members))
        check_members(self.layout, self.members)

    def rank_of(self, member: Member) -> int | None:
        """The rank that a member holds, None when it is not in this world."""
        return Seats.of(self.members).rank_of(member)

    def node_ids(self) -> tuple[str, ...]:
        """The nodes used, each once, in rank order."""
        return Seats.of(self.members).node_ids

    def digest(self) -> str:
        """sha256 over everything, the generation included."""
        return digest_of(to_json(self))


def check_members(layout: ParallelLayout, members: Sequence[Member]) -> None:
    """Raises LayoutError unless there is one member for each rank, and no member holds two."""
    if len(members) != layout.world_size:
        raise LayoutError("members", f"{layout} needs {layout.world_size} members, {len(members)} given")
    if twice := Seats.of(members).twice():
        raise LayoutError("members", f"{twice} holds more than one rank")
