"""What every transport does: read runs of elements out of a peer's registered regions into one's own.

A transport moves bytes and nothing else: which bytes is decided by the planner, whether they are right by the
certificate, what happens when they do not come by the handoff. Imports no torch at run time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Protocol

from liver_core.reshard.plan import CopyRuns

if TYPE_CHECKING:
    from liver_core.device.region import AnyRegion


@dataclass(frozen=True, slots=True)
class Guard:
    """What must hold before and after bytes are read: element `index` (int64) of source region `kind` is `value`."""

    kind: str
    index: int
    value: int


@dataclass(frozen=True, slots=True)
class Read:
    """One batch of runs from one peer.

    `kind` names a *source* region at the peer and a *target* region here, for example "master". The two never
    clash in a process that is both source and target, because they are registered apart.
    `guard` is looked at where the bytes are read, by a transport that can: where it does not hold, none are sent.
    """

    peer: int
    kind: str
    runs: tuple[CopyRuns, ...]
    guard: Guard | None = None


@dataclass(frozen=True, slots=True)
class GuardedRead:
    """What came of a read whose guard was looked at: whether it held for all bytes, and how many were given."""

    held: bool
    bytes: int


@dataclass(frozen=True, slots=True)
class PeerReport:
    """What one peer gave: exactly the bytes of the runs asked for, and the seconds until the last one landed."""

    peer: int
    bytes: int
    seconds: float


@dataclass(frozen=True, slots=True)
class ReadReport:
    """What one `read` moved. `peers` is in ascending order of peer and has no entry for a peer without runs. `guarded`:
    by place among the reads, those whose guard was looked at."""

    bytes: int
    seconds: float
    peers: tuple[PeerReport, ...]
    guarded: Mapping[int, GuardedRead] = field(default_factory=dict[int, "GuardedRead"])


class Call(StrEnum):
    """Where a transport was when it failed."""

    REGISTER = "register"
    CONNECT = "connect"
    READ = "read"
    SERVE = "serve"


class TransportError(RuntimeError):
    """A transfer that cannot succeed: peer gone, region unknown, run out of bounds. Names what failed.

    `peer` and `kind` are None where the failure belongs to none. Runs of a failed read may have landed in part; the
    target region is then worthless until it is read again, the source is untouched.
    """

    def __init__(self, phase: Call, text: str, *, peer: int | None = None, kind: str | None = None) -> None:
        self.phase = phase
        self.peer = peer
        self.kind = kind
        self.text = text
        where = "".join((f" from peer {peer}" if peer is not None else "", f" of {kind!r}" if kind else ""))
        super().__init__(f"transport failed in {phase}{where}: {text}")


class TransportTimeout(TransportError):
    """The deadline passed first. Nothing is still being written into the target region when this is raised.

    A transport that had to leave the peer to make sure of that needs a new `connect` before the next read.
    """


class WayLost(TransportError):
    """This endpoint can read no peer any more, whichever it is; it goes on serving. Only `connect` raises it."""


class Transport(Protocol):
    """One process's endpoint, made for one handoff and closed after it. Every `deadline` is `time.monotonic()` seconds.

    The order of calls, the same for all implementations:

        register(sources=...)        what peers may read, as soon as it exists
        address()                    publish the bytes over an authenticated channel; freezes the sources
        start_progress()             before any peer connects
        register(targets=...)        where reads land; at any time before the read, also after connect
        connect(peer, address, ...)  once for every peer that will be read from, ahead of the pause
        calm()                       once every peer is connected
        read(...)                    as often as wanted
        stop_progress()              when no peer connects or reads any more
        close()

    One thread calls these; the progress thread is the transport's own. A process that is only target registers no
    source, but still runs progress while it connects. Peers are numbered by the caller (ranks of the source world).
    """

    @property
    def name(self) -> str:
        """Unique among all endpoints of the handoff, for example "job/generation/node/slot"."""
        ...

    @property
    def one_sided(self) -> bool:
        """Whether a read needs nothing from the source's training code, so that streaming can believe what lies between
        two looks at a counter.

        True does not promise that the source burns no CPU: over TCP, UCX emulates reads in the progress thread.
        """
        ...

    @property
    def two_sided_because(self) -> str:
        """Why it is not `one_sided`, for people; empty where it is."""
        ...

    def guards(self, peer: int) -> bool:
        """Whether the guards of reads from this peer, which is connected, are looked at where its bytes are read."""
        ...

    def register(
        self,
        *,
        sources: Mapping[str, AnyRegion] | None = None,
        targets: Mapping[str, AnyRegion] | None = None,
    ) -> None:
        """Add regions by name; the transport keeps a reference until `close`. A flat tensor is a region of one piece.

        May be called again with new names. Raises TransportError for a tensor that is not flat and contiguous, a name
        registered before, and a source that comes after `address`.
        """
        ...

    def address(self) -> bytes:
        """What a peer needs to connect: JSON, no pickle, no secret, valid until `close`."""
        ...

    def start_progress(self) -> None:
        """Serve peers from a thread of the transport's own. Calling it twice is the same as once."""
        ...

    def calm(self) -> None:
        """Every peer that will read has connected: serve them with as little CPU as reads need. May be called twice."""
        ...

    def stop_progress(self) -> None:
        """Stop serving; returns when the thread has ended. Reads by peers may fail from here on if not one-sided."""
        ...

    def connect(self, peer: int, address: bytes, deadline: float) -> None:
        """Make `peer` readable and prove it with a small read, so that the first real read is not slow.

        Raises TransportTimeout when the peer does not answer in time, TransportError when it cannot be reached or
        the peer number is taken by another address.
        """
        ...

    def read(self, reads: Sequence[Read], deadline: float) -> ReadReport:
        """Fetch all reads, from all peers at once; returns when every byte has landed, save of guards that do not hold.

        Everything is checked before anything is posted: peer known, kind registered at both ends with one dtype, all
        runs inside both regions. Raises TransportError or TransportTimeout naming peer and kind.
        """
        ...

    def close(self) -> None:
        """Stop progress, drop peers, deregister, release. Never raises; calling it again does nothing."""
        ...
