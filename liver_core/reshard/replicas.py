"""Which replica of an element a target reads: own process, own node, then balanced by elements given. Pure.

Every target decides alone, from the rosters. Targets that want the same box divide its replicas among themselves by
position; what is left to choose goes to the replica that this target has loaded least.
"""

from collections import Counter
from functools import cached_property

from liver_core.layout import Roster


class ReplicaChoice:
    """The choices of one target rank, with what they have cost so far."""

    def __init__(self, *, source: Roster, target: Roster, target_rank: int) -> None:
        self._source = source
        self._target = target
        self._rank = target_rank
        self._given: Counter[int] = Counter()
        self._elements: Counter[str] = Counter()
        self._windows: dict[tuple[tuple[int, ...], tuple[int, ...]], tuple[int, ...]] = {}

    @cached_property
    def own_rank(self) -> int | None:
        """The source rank that lives in this target's process, if any."""
        return self._source.rank_of(self._target.members[self._rank])

    def choose(self, holders: tuple[tuple[int, int], ...], copies: tuple[int, ...], elements: int) -> tuple[int, int]:
        """One of `holders`, (rank, offset), to read `elements` from. `copies`: target ranks that want the same box."""
        if len(holders) == 1:
            chosen = holders[0]
        else:
            ranks = tuple(rank for rank, _ in holders)
            window = self._windows.get((ranks, copies))
            if window is None:
                window = self._windows[ranks, copies] = self._window(ranks, copies)
            turn = self._rank % len(window)
            least = min(window[turn:] + window[:turn], key=lambda rank: self._given[rank])
            chosen = next(holder for holder in holders if holder[0] == least)
        self._given[chosen[0]] += elements
        self._elements[self._where(chosen[0])] += elements
        return chosen

    def reason(self) -> str:
        """How many elements come from where, for people."""
        sources = len(self._given)
        parts = [f"{self._elements[where]} from {where}" for where in _WHERE if self._elements[where]]
        return f"elements: {', '.join(parts) or 'none'}; {sources} source ranks"

    def _where(self, rank: int) -> str:
        if rank == self.own_rank:
            return _WHERE[0]
        return _WHERE[1] if self._node(rank) == self._target.members[self._rank].node_id else _WHERE[2]

    def _node(self, rank: int) -> str:
        return self._source.members[rank].node_id

    def _pool(self, ranks: tuple[int, ...], target_rank: int) -> tuple[int, ...]:
        """The replicas that a target rank may read: its own, else those of its node, else all."""
        member = self._target.members[target_rank]
        own = self._source.rank_of(member)
        if own in ranks:
            return (own,)
        return tuple(rank for rank in ranks if self._node(rank) == member.node_id) or ranks

    def _window(self, ranks: tuple[int, ...], copies: tuple[int, ...]) -> tuple[int, ...]:
        """The replicas left to this target when all targets with the same pool share it out evenly, by position."""
        pool = self._pool(ranks, self._rank)
        rivals = [rank for rank in copies if self._pool(ranks, rank) == pool]
        position = rivals.index(self._rank)
        low = position * len(pool) // len(rivals)
        high = (position + 1) * len(pool) // len(rivals)
        return pool[low : max(high, low + 1)]


_WHERE = ("the own process", "the own node", "other nodes")
