"""The target's side of streaming: carries out what the follower decides, in one thread beside training.

Tiles and gradients land in the next world's own regions, so that nothing is staged: gradients in its "grad" region.
Not here: what is read when (`follow`), registering and connecting the transport (the caller).
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

import torch

from liver_core.device import DeviceWait, host_zeros, settle
from liver_core.device.region import AnyRegion, as_region
from liver_core.memory.memory_placement import GRAD
from liver_core.reshard.copy_runs import join_runs
from liver_core.reshard.plan import CopyRuns
from liver_core.streaming.follow import (
    Begin,
    Converged,
    Done,
    FollowCounts,
    FollowEffect,
    Follower,
    FollowEvent,
    GiveUp,
    GradientsRead,
    Hash,
    Hashed,
    HashMissed,
    Look,
    Looked,
    ReadGradients,
    ReadTiles,
    Replay,
    Replayed,
    Sleep,
    TileRead,
    TilesRead,
)
from liver_core.streaming.header import HEADER_BYTES, HeaderError, StepHeader, merged
from liver_core.streaming.ring import COUNTER, HEADERS, SLOTS, ring_kind, slot_of
from liver_core.streaming.tiles import LOCAL, Span, Tile
from liver_core.transport.protocol import Guard, GuardedRead, Read, Transport, TransportError
from liver_core.transport.regions import copy_runs

_log = logging.getLogger(__name__)
_THROTTLE_MOST_S = 1.0
PATIENCE = 4.0
"""A read may take so often what its elements took last time."""
_TIMED_ELEMENTS = 1 << 16
"""What fewer take is latency."""


class StreamEnd(StrEnum):
    """done: everything is here at the version to finish at. gave_up: the follower said that it cannot. stopped: it was
    told to. lost: a source could not be read. timed_out: the deadline passed. failed: replay or a callback raised."""

    DONE = "done"
    GAVE_UP = "gave_up"
    STOPPED = "stopped"
    LOST = "lost"
    TIMED_OUT = "timed_out"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class StreamResult:
    """How a stream ended. `version` is what everything resident stands at; `whole` says that nothing is missing there.

    `peer` is the source that could not be read, None where it is not known. `reason` is for people.
    """

    end: StreamEnd
    version: int
    whole: bool
    reason: str
    peer: int | None
    counts: FollowCounts


@dataclass(frozen=True, slots=True)
class StreamStatus:
    """Where a stream is, for a driver that decides when to cut over; `estimate_s` as `Follower.estimate`."""

    version: int
    lag: int | None
    converged: bool
    todo_elements: int
    estimate_s: float | None
    counts: FollowCounts


@dataclass(frozen=True, slots=True)
class Landing:
    """Where small things land, in host memory as at the source: of each peer its counter and that of a slot, int64, and
    a header of HEADER_BYTES uint8."""

    counters: torch.Tensor
    slots: torch.Tensor
    headers: torch.Tensor

    @staticmethod
    def of(peers: int) -> Landing:
        """Landing places for so many peers."""
        counters, slots = (host_zeros(peers, torch.int64) for _ in range(2))
        return Landing(counters, slots, host_zeros(peers * HEADER_BYTES, torch.uint8))


class Following:
    """What there is to follow: tiles, the depth of each peer's ring, and this process's own source regions.

    `local` has the live and the ring's regions of the source in this process (kinds as registered); needed where tiles
    take from LOCAL. `kinds` are what a tile is copied of: masters and moments. `regions` are the next world's, some of
    them perhaps in host memory; `device` is where its steps are replayed, where not said that of the gradients.
    """

    def __init__(
        self,
        tiles: Sequence[Tile],
        depths: Mapping[int, int],
        regions: Mapping[str, AnyRegion],
        kinds: Sequence[str],
        *,
        local: Mapping[str, AnyRegion] | None = None,
        device: torch.device | None = None,
    ) -> None:
        self.tiles = tuple(tiles)
        self.depths = dict(depths)
        self.regions = regions
        self.kinds = tuple(kinds)
        self.local = {kind: as_region(memory) for kind, memory in (local or {}).items()}
        used = sorted({peer for tile in self.tiles for peer in tile.peers})
        if missing := [peer for peer in used if peer not in self.depths]:
            raise ValueError(f"peers {missing} have tiles and no ring")
        if LOCAL in used and not self.local:
            raise ValueError("tiles take from this process, and it has no source regions")
        self.device = device or regions[GRAD].device
        self.index = {peer: at for at, peer in enumerate(used)}
        self.landing = Landing.of(len(used))

    @property
    def depth(self) -> int:
        """Of the shallowest ring."""
        return min((self.depths[peer] for peer in self.index), default=0)

    def targets(self) -> dict[str, AnyRegion]:
        """What the transport must know as targets besides `regions`, before `TargetStream.run`."""
        deepest = max((self.depths[peer] for peer in self.index), default=0)
        rings = {ring_kind(slot): self.regions[GRAD] for slot in range(deepest)}
        return {COUNTER: self.landing.counters, SLOTS: self.landing.slots, HEADERS: self.landing.headers, **rings}


class TargetStream:
    """One target rank's stream. `run` in a thread of its own; the other methods from any thread.

    on_tile(number), on_converged(version), on_hash(version) and on_hash_missed(version, reason) are called in that
    thread, and replay(spans, header) when the gradients of a step have landed, not yet clipped. on_tile: the bytes have
    landed and are not believed yet. on_hash hashes what stands at exactly `version`;
    meanwhile the ring fills. `read_s` bounds one read, or what PATIENCE says where that is longer.
    """

    def __init__(
        self,
        transport: Transport | None,
        following: Following,
        follower: Follower,
        replay: Callable[[Sequence[Span], StepHeader], None],
        *,
        on_tile: Callable[[int], None] = lambda number: None,
        on_converged: Callable[[int], None] = lambda version: None,
        on_hash: Callable[[int], None] = lambda version: None,
        on_hash_missed: Callable[[int, str], None] = lambda version, reason: None,
        share: float = 1.0,
        read_s: float = 10.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._transport = transport
        self._following = following
        self._follower = follower
        self._replay = replay
        self._on_tile = on_tile
        self._on_converged = on_converged
        self._on_hash = on_hash
        self._on_hash_missed = on_hash_missed
        self._read_s = read_s
        self._element_s = 0.0
        self._clock = clock
        self._changed = threading.Condition()
        self._stopping = False
        self._urgent = False
        self._deadline = 0.0
        landings = {**following.regions, **following.targets()}
        self._landings = {kind: as_region(memory) for kind, memory in landings.items()}
        self._held: list[Span] = []
        self._runs: dict[int, tuple[CopyRuns, ...]] = {}
        self._held_tiles: tuple[int, ...] = ()
        self._first_read_at = 0.0
        self.copied_s = 0.0
        """From the first byte to the last of the first time that all tiles were here, waits included; 0 until then."""
        self.set_share(share)

    def set_share(self, share: float) -> None:
        """The part of the time that may be spent on work, 0 < share <= 1; the rest is slept away after each piece."""
        if not 0 < share <= 1:
            raise ValueError(f"share is {share}, must be above 0 and at most 1")
        with self._changed:
            self._follower.share = share
            self._changed.notify_all()

    def announce(self, version: int) -> None:
        """Hash at exactly `version`."""
        with self._changed:
            self._follower.announce(version)
            self._changed.notify_all()

    def finish(self, version: int) -> None:
        """Reach exactly `version` and end; from now on without a throttle, since training waits."""
        with self._changed:
            self._follower.finish(version)
            self._urgent = True
            self._changed.notify_all()

    def set_deadline(self, deadline: float) -> None:
        """Another deadline (of `clock`), earlier or later; infinite for none."""
        with self._changed:
            self._deadline = deadline
            self._changed.notify_all()

    def stop(self) -> None:
        """End after the read or replay that is under way."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()

    def status(self) -> StreamStatus:
        """A snapshot."""
        with self._changed:
            machine = self._follower
            return StreamStatus(
                machine.version,
                machine.lag,
                machine.converged,
                machine.todo_elements,
                machine.estimate(),
                replace(machine.counts),
            )

    def run(self, deadline: float) -> StreamResult:
        """Stream until done, told to stop, or the deadline (of `clock`), which is looked at between reads.

        Ends with a result whatever happens; a read that fails leaves what is resident as it was.
        """
        self._deadline = deadline
        event: FollowEvent = Begin()
        try:
            while True:
                if self._stopping:
                    return self._result(StreamEnd.STOPPED, "told to stop")
                if self._clock() >= self._deadline:
                    return self._result(StreamEnd.TIMED_OUT, "the deadline of streaming has passed")
                with self._changed:
                    effects = self._follower.handle(event)
                if not self.copied_s and self._first_read_at and not self._follower.todo:
                    self.copied_s = self._clock() - self._first_read_at
                for effect in effects:
                    if isinstance(effect, Done):
                        return self._result(StreamEnd.DONE, "")
                    if isinstance(effect, GiveUp):
                        return self._result(StreamEnd.GAVE_UP, effect.reason)
                    answer = self._carry_out(effect)
                    event = event if answer is None else answer
        except TransportError as error:
            return self._result(StreamEnd.LOST, str(error), error.peer)
        except Exception as error:
            # Whatever it is, the thread must not end without a word: half a step may have been replayed.
            _log.exception("streaming failed at version %d", self._follower.version)
            return self._result(StreamEnd.FAILED, f"{type(error).__name__}: {error}")

    def _result(self, end: StreamEnd, reason: str, peer: int | None = None) -> StreamResult:
        machine = self._follower
        whole = not machine.todo and end is not StreamEnd.FAILED
        return StreamResult(end, machine.version, whole, reason, peer, replace(machine.counts))

    def _carry_out(self, effect: FollowEffect) -> FollowEvent | None:
        started = self._clock()
        match effect:
            case Converged(version=version):
                self._on_converged(version)
                return None
            case HashMissed(version=version, reason=reason):
                self._on_hash_missed(version, reason)
                return None
            case Sleep(seconds=seconds):
                self._sleep(seconds)
                return Begin()
            case Look(version=version, peers=peers):
                return self._look(version, peers)
            case ReadTiles(tiles=tiles, version=version):
                self._first_read_at = self._first_read_at or started
                answer: FollowEvent = TilesRead(self._read_tiles(tiles, version), self._clock() - started)
                for tile in tiles:
                    self._on_tile(tile)
            case ReadGradients(version=version, tiles=tiles, peers=peers):
                answer = self._read_gradients(version, tiles, peers)
            case Replay(header=header, tiles=tiles):
                self._hold(tiles)
                self._replay(self._held, header)
                settle(DeviceWait.REPLAYED, self._following.device)
                answer = Replayed(self._clock() - started)
            case Hash(version=version):
                self._on_hash(version)
                answer = Hashed()
            case _:
                raise AssertionError(f"{effect} ends the stream and is not carried out here")
        self._throttle(self._clock() - started)
        return answer

    # Reads. Everything of one call is complete when it returns.

    def _look(self, version: int, peers: tuple[int, ...]) -> Looked:
        index, depths = self._following.index, self._following.depths
        wanted = []
        for peer in peers:
            slot = slot_of(version, depths[peer])
            wanted.append(Read(peer, COUNTER, (CopyRuns(0, index[peer], 1),)))
            wanted.append(Read(peer, SLOTS, (CopyRuns(slot, index[peer], 1),)))
        self._read(wanted)
        landing = self._following.landing
        counters, slots = landing.counters.numpy(), landing.slots.numpy()
        return Looked(
            tuple(int(counters[index[peer]]) for peer in peers), tuple(int(slots[index[peer]]) for peer in peers)
        )

    def _read_tiles(self, tiles: tuple[int, ...], version: int) -> tuple[TileRead, ...]:
        following, guard = self._following, Guard(COUNTER, 0, 2 * version)
        reads, owners = [], []
        for at, tile in enumerate(tiles):
            for part in following.tiles[tile].reads:
                reads.extend(Read(part.peer, kind, part.runs, guard) for kind in following.kinds)
                owners.extend(at for _ in following.kinds)
        moved, guarded = self._read(reads)
        bytes_of, held = [0] * len(tiles), [True] * len(tiles)
        unknown = {owner for place, owner in enumerate(owners) if place not in guarded}
        for place, outcome in guarded.items():
            bytes_of[owners[place]] += outcome.bytes
            held[owners[place]] &= outcome.held
        if unknown:
            bytes_of[max(unknown)] += moved - sum(bytes_of)
        return tuple(
            TileRead(size, None if is_held and at in unknown else is_held)
            for at, (size, is_held) in enumerate(zip(bytes_of, held, strict=True))
        )

    def _read_gradients(self, version: int, tiles: tuple[int, ...], peers: tuple[int, ...]) -> GradientsRead:
        started, index = self._clock(), self._following.index
        self._hold(tiles)
        wanted: list[Read] = []
        for peer in peers:
            slot = slot_of(version, self._following.depths[peer])
            wanted.append(Read(peer, ring_kind(slot), self._runs[peer]))
            header = CopyRuns(slot * HEADER_BYTES, index[peer] * HEADER_BYTES, HEADER_BYTES)
            wanted.append(Read(peer, HEADERS, (header,)))
        moved, _ = self._read(wanted)
        data = self._following.landing.headers.numpy()
        headers = [data[at : at + HEADER_BYTES].tobytes() for at in (index[peer] * HEADER_BYTES for peer in peers)]
        return GradientsRead(*_together(headers), moved, self._clock() - started)

    def _read(self, reads: Sequence[Read]) -> tuple[int, dict[int, GuardedRead]]:
        """Read remote parts over the transport and local ones in memory: bytes that came over the transport, and the
        outcome of each guard that was looked at, by place."""
        remote = [place for place, read in enumerate(reads) if read.peer != LOCAL]
        moved, guarded = 0, {}
        if remote:
            assert self._transport is not None, "there are remote peers and no transport"
            # Not cut short by the stream's deadline: a read that times out can cost the endpoint.
            asked = [reads[place] for place in remote]
            elements = sum(run.elements for read in asked for run in read.runs)
            longest_s = max(self._read_s, PATIENCE * self._element_s * elements)
            report = self._transport.read(asked, self._clock() + longest_s)
            if elements >= _TIMED_ELEMENTS and all(outcome.held for outcome in report.guarded.values()):
                self._element_s = report.seconds / elements
            moved, guarded = report.bytes, {remote[at]: outcome for at, outcome in report.guarded.items()}
        if len(remote) < len(reads):
            local = [(place, read) for place, read in enumerate(reads) if read.peer == LOCAL]
            guards = {read.guard for _, read in local if read.guard is not None}
            before = {guard for guard in guards if self._holds(guard)}
            for _, read in local:
                copy_runs(read, self._following.local[read.kind], self._landings[read.kind])
            settle(DeviceWait.LOCAL_COPIED, self._following.device)
            held = {guard for guard in before if self._holds(guard)}
            guarded |= {place: GuardedRead(read.guard in held, 0) for place, read in local if read.guard is not None}
        return moved, guarded

    def _holds(self, guard: Guard) -> bool:
        """In this process."""
        return int(self._following.local[guard.kind].tensors[0][guard.index]) == guard.value

    def _hold(self, tiles: tuple[int, ...]) -> None:
        """Keep spans and gradient runs of the resident tiles; only what has come since the last time is added."""
        known = len(self._held_tiles)
        if tiles[:known] != self._held_tiles:
            self._held, self._runs, known = [], {}, 0
        if len(tiles) == known:
            return
        fresh: dict[int, list[CopyRuns]] = {}
        for tile in tiles[known:]:
            self._held.extend(self._following.tiles[tile].spans)
            for read in self._following.tiles[tile].reads:
                fresh.setdefault(read.peer, []).extend(read.runs)
        for peer, runs in fresh.items():
            self._runs[peer] = (*self._runs.get(peer, ()), *runs)
        self._held_tiles = tiles
        if len(tiles) == len(self._following.tiles):
            # What the cuts into tiles took apart is put together again, once: from here on nothing changes.
            self._runs = {peer: join_runs(runs) for peer, runs in self._runs.items()}

    # Time.

    def _sleep(self, seconds: float) -> None:
        with self._changed:
            if not self._stopping:
                self._changed.wait(max(0.0, min(seconds, self._deadline - self._clock())))

    def _throttle(self, worked_s: float) -> None:
        """Sleep so that work is at most `share` of the time; a finish, a stop or a new share ends it early."""
        with self._changed:
            if self._urgent or self._stopping or self._follower.share >= 1:
                return
            rest = min(worked_s * (1 / self._follower.share - 1), _THROTTLE_MOST_S)
            self._changed.wait(max(0.0, min(rest, self._deadline - self._clock())))


def _together(read: Sequence[bytes]) -> tuple[StepHeader | None, str]:
    """What the peers say together, and how they differ, if they do. None where the bytes of one are no header."""
    try:
        headers = [StepHeader.decode(each) for each in read]
    except HeaderError:
        return None, ""
    try:
        return merged(headers), ""
    except HeaderError as error:
        return headers[0], str(error)
