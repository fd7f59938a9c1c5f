"""The target's algorithm while the source world trains: copy tiles at one version, replay every step on what is here.

Pure, sans-IO: `handle(event)` says what to do next, one thing at a time. All resident tiles always stand at one version
V. What is read is believed when a look after it (complete before the next read is posted) shows what the look before
it showed, or when who reads at the source has made these two looks. Replay goes before copying, since a tile can wait
and a slot of a ring cannot.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import islice, takewhile
from math import inf

from liver_core.streaming.header import StepHeader
from liver_core.streaming.pace import Pace
from liver_core.streaming.tiles import LOCAL, Tile

# Events.


@dataclass(frozen=True, slots=True)
class Begin:
    """Start, or go on after a sleep."""


@dataclass(frozen=True, slots=True)
class Looked:
    """Answers Look: of each of its peers, in order, the counter and the counter of the slot of its version."""

    counters: tuple[int, ...]
    slots: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class TileRead:
    """Of one tile: bytes that other processes gave. `held`: whether all of them are of the version asked for, which was
    looked at where they were read; None where the look that follows has to tell."""

    bytes: int
    held: bool | None = None


@dataclass(frozen=True, slots=True)
class TilesRead:
    """Answers ReadTiles: each of them in turn, and seconds for the estimate."""

    tiles: tuple[TileRead, ...]
    seconds: float


@dataclass(frozen=True, slots=True)
class GradientsRead:
    """Answers ReadGradients: what its peers say together of the step, None where the bytes of one were no header; and
    how two of them differ, empty where they do not."""

    header: StepHeader | None
    differs: str
    bytes: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Replayed:
    """Answers Replay."""

    seconds: float


@dataclass(frozen=True, slots=True)
class Hashed:
    """Answers Hash."""


FollowEvent = Begin | Looked | TilesRead | GradientsRead | Replayed | Hashed


# Effects.


@dataclass(frozen=True, slots=True)
class Look:
    """Read the counter, and the counter of the slot of `version`, of all peers; answer with Looked."""

    version: int
    peers: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ReadTiles:
    """Read all state kinds of these tiles in place, in this order; answer with TilesRead."""

    tiles: tuple[int, ...]
    version: int


@dataclass(frozen=True, slots=True)
class ReadGradients:
    """Read gradients of `tiles` and the headers of all peers out of the slot of `version`; answer GradientsRead."""

    version: int
    tiles: tuple[int, ...]
    peers: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Replay:
    """Apply the step of `header` to `tiles`, whose gradients have landed; answer with Replayed."""

    header: StepHeader
    tiles: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Hash:
    """The whole share stands at `version`, which was announced: hash it; answer with Hashed."""

    version: int


@dataclass(frozen=True, slots=True)
class HashMissed:
    """The announced version was not there to be hashed, because of `reason`. Needs no answer."""

    version: int
    reason: str


@dataclass(frozen=True, slots=True)
class Converged:
    """Everything is here at `version` and at most one step behind; following goes on. Needs no answer."""

    version: int


@dataclass(frozen=True, slots=True)
class Sleep:
    """Nothing to do for so long; answer with Begin."""

    seconds: float


@dataclass(frozen=True, slots=True)
class Done:
    """Everything is here at exactly the version that `finish` named. The last effect."""

    version: int


@dataclass(frozen=True, slots=True)
class GiveUp:
    """It cannot be done. The last effect; what has arrived is worth nothing without its version."""

    reason: str


FollowEffect = Look | ReadTiles | ReadGradients | Replay | Hash | HashMissed | Converged | Sleep | Done | GiveUp


class _Doing(StrEnum):
    """What the last look is the second look of."""

    NOTHING = "nothing"
    TILES = "tiles"
    GRADIENTS = "gradients"


class _NextSlot(StrEnum):
    """Whether the next step can be read from all peers that resident tiles depend on."""

    READY = "ready"
    WAITING = "waiting"
    LOST = "lost"


@dataclass(frozen=True, slots=True)
class FollowLimits:
    """losses_max: times that everything may have to be copied again because a slot was overwritten unread.
    torn_max: times in a row that reads may be torn. poll_s: least seconds between two looks at sources that stand.
    batch_s: seconds for which tiles are asked for at once, where who reads at the source looks at its counter."""

    losses_max: int = 3
    torn_max: int = 64
    poll_s: float = 0.001
    batch_s: float = 0.25


@dataclass(slots=True)
class FollowCounts:
    """Bytes are those that other processes gave. `read_bytes`: tiles, each counted once. `reread_bytes`: torn tiles,
    and those copied again after a loss. `replayed_bytes`: gradients with their headers. `torn`: reads of tiles that
    gave bytes and were not believed. `losses`: slots lost."""

    read_bytes: int = 0
    reread_bytes: int = 0
    replayed_bytes: int = 0
    replays: int = 0
    torn: int = 0
    losses: int = 0


class Follower:
    """One target rank. `tiles` are copied in the order given; `depth` is that of the shallowest ring, for the text.
    `guarded`: peers whose reader at the source looks at the counter; LOCAL is one always.

    `announce` and `finish` may be called at any time between two events, by whoever holds the machine's lock.
    """

    def __init__(
        self,
        tiles: Sequence[Tile],
        *,
        depth: int,
        guarded: frozenset[int] = frozenset(),
        limits: FollowLimits | None = None,
    ) -> None:
        self.tiles = tuple(tiles)
        self.depth = depth
        self.limits = limits or FollowLimits()
        self.version = 0
        self.resident: tuple[int, ...] = ()
        self.todo = list(range(len(self.tiles)))[::-1]
        self.converged = False
        self.ended: Done | GiveUp | None = None
        self.counts = FollowCounts()
        self.pace = Pace()
        self.share = 1.0
        """The part of the time that the driver works; the rest it rests."""
        self._elements = [tile.elements for tile in self.tiles]
        self._peers_of = [frozenset(tile.peers) for tile in self.tiles]
        self._resident_elements = 0
        self._wanted: tuple[int, ...] = ()
        self._peers: frozenset[int] = frozenset()
        self._seen: dict[int, int] = {}
        self._look = Look(0, ())
        self._batch: tuple[int, ...] = ()
        self._read: tuple[TileRead, ...] = ()
        self._guarded = guarded | {LOCAL}
        self._doing = _Doing.NOTHING
        self._gradients: GradientsRead | None = None
        self._hash_at: int | None = None
        self._finish_at: int | None = None
        self._copied: set[int] = set()
        self._torn_in_a_row = 0
        self._attempts_s = 0.0

    # What the driver asks and tells.

    @property
    def lag(self) -> int | None:
        """Steps that the furthest source seen is ahead, None before the first look or with nothing resident."""
        return max(self._seen.values()) // 2 - self.version if self._seen and self.resident else None

    @property
    def todo_elements(self) -> int:
        """Elements of one kind that are not resident."""
        return sum(self._elements) - self._resident_elements

    def announce(self, version: int) -> None:
        """Hash the whole share at exactly `version`; a later announcement takes the place of one not met yet."""
        self._hash_at = version

    def finish(self, version: int) -> None:
        """Reach exactly `version`, copy what is left at it, and end."""
        self._finish_at = version

    def estimate(self) -> float | None:
        """Seconds until everything is here, inf when replay leaves no time to copy; None before there is a measure."""
        return self.pace.estimate(self.todo_elements, sum(self._elements))

    # The machine.

    def handle(self, event: FollowEvent) -> tuple[FollowEffect, ...]:
        """Any number of effects that need no answer, then one that does; after Done or GiveUp nothing."""
        assert self.ended is None, f"{event} after {self.ended}"
        match event:
            case Begin() | Hashed():
                return self._glance()
            case Looked():
                return self._looked(event)
            case TilesRead():
                self._count_tiles(event)
                return self._glance()
            case GradientsRead():
                return self._gradients_read(event)
            case Replayed():
                self.pace.replayed(event.seconds, self._resident_elements)
                self.version += 1
                self.counts.replays += 1
                return self._glance()

    def _glance(self) -> tuple[FollowEffect, ...]:
        """Look at all that the next thing to do depends on."""
        if not self.tiles:
            return self._without_tiles()
        # After a read, at those of the tiles that were read.
        peers = self._peers.union(*map(self._tiles_peers, self._batch or self._next_tiles()))
        if peers != set(self._wanted):
            self._wanted = tuple(sorted(peers))
        self._look = Look(self.version + 1, self._wanted)
        return (self._look,)

    def _looked(self, event: Looked) -> tuple[FollowEffect, ...]:
        before, self._seen = self._seen, dict(zip(self._look.peers, event.counters, strict=True))
        slots = dict(zip(self._look.peers, event.slots, strict=True))
        doing, self._doing = self._doing, _Doing.NOTHING
        if doing is _Doing.GRADIENTS and not self._held_back and self._slot(slots, before) is _NextSlot.READY:
            return self._replay()
        if doing is _Doing.TILES:
            self._settle()
            if self.todo and not self._tiles_peers(self.todo[-1]) <= slots.keys():
                return self._glance()
        return self._decide(slots, before)

    @property
    def _held_back(self) -> bool:
        """Whether V must not move: it was told meanwhile to finish or to hash here."""
        return self._finish_at == self.version or (self._hash_at == self.version and not self.todo)

    def _decide(self, slots: dict[int, int], before: dict[int, int]) -> tuple[FollowEffect, ...]:
        if self._torn_in_a_row > self.limits.torn_max:
            return self._give_up(f"reads were torn {self._torn_in_a_row} times in a row: {self.pace}")
        if not self.resident:
            # Nothing is here, so that V may be whatever the sources are at, or will be in a moment.
            self.version = (max(self._seen.values()) + 1) // 2
        missed = self._missed_hash()
        ending = self._ending()
        if ending is not None:
            return (*missed, *ending)
        if self._hash_at == self.version and not self.todo:
            self._hash_at = None
            return (Hash(self.version),)
        if self._finish_at == self.version and not self.todo:
            self.ended = Done(self.version)
            return (*missed, self.ended)
        if self.resident and self.version != self._finish_at:
            match self._slot(slots, before):
                case _NextSlot.READY:
                    peers = tuple(sorted(self._peers))
                    return (*missed, *self._converge(), ReadGradients(self.version + 1, self.resident, peers))
                case _NextSlot.LOST:
                    return (*missed, *self._lose(f"slots {slots}, counters {self._seen}"))
                case _NextSlot.WAITING:
                    pass
        self._batch = tuple(takewhile(self._stand, self._next_tiles()))
        if self._batch:
            self._doing = _Doing.TILES
            return (*missed, ReadTiles(self._batch, self.version))
        return (*missed, *self._converge(), self._sleep())

    def _ending(self) -> tuple[FollowEffect, ...] | None:
        """Why the version to finish at cannot be reached any more, or None."""
        at = self._finish_at
        if at is None:
            return None
        if self.version > at:
            return self._give_up(f"stands at version {self.version}, beyond {at}")
        if self.version == at and self.todo and max(self._seen.values()) > 2 * at:
            return self._give_up(f"sources went beyond version {at}, {self.todo_elements} elements were not copied")
        return None

    def _missed_hash(self) -> tuple[FollowEffect, ...]:
        at = self._hash_at
        if at is None or self.version <= at:
            return ()
        self._hash_at = None
        return (HashMissed(at, f"stands at {self.version}, {self.todo_elements} elements are not here"),)

    def _slot(self, slots: dict[int, int], before: dict[int, int]) -> _NextSlot:
        """State of the slot of version V + 1, at the peers of what is resident.

        A slot that holds less, although its owner had been seen to step beyond V *before* this look, was never written
        with V + 1: a source publishes a gradient before it steps.
        """
        wanted = 2 * (self.version + 1)
        mine = [(slots[peer], before.get(peer, 0)) for peer in self._peers]
        if any(slot > wanted or (slot < wanted - 1 and seen >= wanted - 1) for slot, seen in mine):
            return _NextSlot.LOST
        return _NextSlot.READY if all(slot == wanted for slot, _ in mine) else _NextSlot.WAITING

    def _stand(self, tile: int) -> bool:
        """Whether all sources of a tile stand at V, as of this look."""
        return all(self._seen.get(peer) == 2 * self.version for peer in self._tiles_peers(tile))

    def _gradients_read(self, event: GradientsRead) -> tuple[FollowEffect, ...]:
        """Nothing of it is looked at before the look that follows: it may have been overwritten meanwhile."""
        self.counts.replayed_bytes += event.bytes
        self.pace.fetched(event.seconds, self._resident_elements)
        self._gradients = event
        self._doing = _Doing.GRADIENTS
        return self._glance()

    def _replay(self) -> tuple[FollowEffect, ...]:
        """The gradients and headers that have landed are those of version V + 1, whole."""
        assert self._gradients is not None
        header, version = self._gradients.header, self.version + 1
        if header is None or header.version != version:
            return self._give_up(f"the slot of version {version} says it is whole and is not")
        if self._gradients.differs:
            return self._give_up(f"{self._gradients.differs}, of the step to version {version}")
        self.pace.step_s = header.step_s
        return (Replay(header, self.resident),)

    def _lose(self, what: str) -> tuple[FollowEffect, ...]:
        """The next step cannot be replayed any more: everything is copied again, at a version still to be seen."""
        self.counts.losses += 1
        if self.counts.losses > self.limits.losses_max:
            return self._give_up(
                f"does not converge, the ring of depth {self.depth} was overtaken at version {self.version} for the "
                f"{self.counts.losses}th time ({what}): {self.pace}"
            )
        self.todo = sorted({*self.todo, *self.resident}, reverse=True)
        self.resident, self._resident_elements, self._peers, self.converged = (), 0, frozenset(), False
        return self._glance()

    def _next_tiles(self) -> tuple[int, ...]:
        """The tiles to copy next: as many as take `batch_s`, where those that are torn meanwhile cost no bytes. Who
        rests after each piece of work gets pieces so short that it does not rest through a step."""
        seconds = min(self.limits.batch_s, self.pace.step_s / 2 or inf) * self.share
        found, most = self.todo[-1:], seconds / (self.pace.copy_s or inf)
        elements = sum(self._elements[tile] for tile in found)
        for tile in islice(reversed(self.todo), 1, None):
            elements += self._elements[tile]
            if elements > most or not self._peers_of[tile] | self._peers_of[found[0]] <= self._guarded:
                break
            found.append(tile)
        return tuple(found)

    def _settle(self) -> None:
        """Which of the tiles that were read are here at V; the others are torn."""
        batch, self._batch = self._batch, ()
        here, torn = [], []
        for tile, read in zip(batch, self._read, strict=True):
            if read.held or (read.held is None and self._stand(tile)):
                here.append(tile)
            else:
                torn.append(tile)
                self.counts.torn += read.held is None or read.bytes > 0
        self.todo[-len(batch) :] = reversed(torn)
        if not here:
            self._torn_in_a_row += 1
            return
        elements = sum(self._elements[tile] for tile in here)
        self.resident = (*self.resident, *here)
        self._resident_elements += elements
        self._peers = self._peers.union(*map(self._tiles_peers, here))
        self.pace.copied(self._attempts_s, elements)
        self._torn_in_a_row, self._attempts_s = 0, 0.0

    def _count_tiles(self, event: TilesRead) -> None:
        self._read = event.tiles
        self._attempts_s += event.seconds
        for tile, read in zip(self._batch, event.tiles, strict=True):
            if read.held is False or tile in self._copied:
                self.counts.reread_bytes += read.bytes
            else:
                self._copied.add(tile)
                self.counts.read_bytes += read.bytes

    def _tiles_peers(self, tile: int) -> frozenset[int]:
        return self._peers_of[tile]

    def _converge(self) -> tuple[FollowEffect, ...]:
        lag = self.lag
        if self.converged or self.todo or lag is None or lag > 1:
            return ()
        self.converged = True
        return (Converged(self.version),)

    def _without_tiles(self) -> tuple[FollowEffect, ...]:
        """This rank's share is empty: it is at any version at once."""
        if self._hash_at is not None:
            at, self._hash_at = self._hash_at, None
            return (Hash(at),)
        if self._finish_at is not None:
            self.ended = Done(self._finish_at)
            return (self.ended,)
        first = () if self.converged else (Converged(0),)
        self.converged = True
        return (*first, self._sleep())

    def _give_up(self, reason: str) -> tuple[FollowEffect, ...]:
        self.ended = GiveUp(reason)
        return (self.ended,)

    def _sleep(self) -> Sleep:
        """Until the next look; with a version to finish at training stands still, and waits for it."""
        if self._finish_at is not None:
            return Sleep(self.limits.poll_s)
        return Sleep(self.pace.sleep(self.limits.poll_s, idle=not self.todo))
