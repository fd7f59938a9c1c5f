"""One-sided reads by NIXL, over UCX (one machine, RDMA) or libfabric (EFA), as its profile says.

Make the endpoint after fork and never before: UCX does not survive one. Only the progress thread here polls, and only
between `start_progress` and `stop_progress`; NIXL's own progress thread would spin on a whole core.
"""

from __future__ import annotations

import base64
import os
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch

from liver_core.device import DeviceWait, settle
from liver_core.device import read as on_host
from liver_core.device.landed import flush_landed
from liver_core.device.rank_device import own_device
from liver_core.device.region import AnyRegion
from liver_core.transport.landing_slots import BATCH_BYTES_MAX as STAGED_BYTES_MAX
from liver_core.transport.landing_slots import LandingSlots
from liver_core.transport.nixl_library import load_nixl
from liver_core.transport.places import device_of, memory_of, must_stage, piece_addresses, spans
from liver_core.transport.profile import CALM_PERIOD_S, PROGRESS_PERIOD_S, Profile
from liver_core.transport.protocol import Call, PeerReport, Read, ReadReport, TransportError, TransportTimeout, WayLost
from liver_core.transport.regions import Address, Regions, Table, addresses, batches, check_reads
from liver_core.transport.ucx import TOKEN_BYTES, Descriptors, NixlAgent, Where, machine

BATCH_BYTES_MAX = 16 << 20
"""Over shared memory a post copies before it returns, so this bounds how late a deadline is noticed: about 4 ms."""

BATCH_RUNS_MAX = 8192
IN_FLIGHT_PER_PEER_MAX = 2
KEPT_READS_MAX, KEPT_ELEMENTS_MAX = 64, 1024
"""Looks at counters: small, tens a second, and few different ones. NIXL prepares each once; the newest are kept."""

SPIN_S = 0.0002
SLEEP_LEAST_S, SLEEP_MOST_S = 0.00005, 0.0002


@dataclass(frozen=True, slots=True)
class _NixlPeer:
    """A connected peer: where its regions are in its memory."""

    address: Address
    agent_name: str
    bases: Mapping[str, tuple[tuple[int, ...], int]]
    """Kind to (address of each piece, device)."""
    memory: Mapping[str, str]
    """Kind to "DRAM" or "VRAM": counters lie in host memory beside tensors on a device."""


@dataclass(slots=True, eq=False)
class _Post:
    """One request to NIXL: a table of runs for each kind. Equal to none but itself. `kept`: its handle is asked again
    and again, and is None only before the first time. `staged`: it lands in a `slot` of the stage, and goes on to its
    target from there."""

    kind: str
    parts: tuple[tuple[str, Table], ...]
    kept: bool = False
    handle: Any = None
    staged: bool = False
    slot: int | None = None


@dataclass(slots=True)
class _Progress:
    """One peer's part of one read: what is still to post and what is in flight."""

    peer: int
    pending: deque[_Post]
    flying: list[_Post] = field(default_factory=list)
    bytes: int = 0
    seconds: float = 0.0

    @property
    def done(self) -> bool:
        return not self.pending and not self.flying


class NixlTransport:
    """One endpoint with two NIXL agents: one serves the sources, the other reads.

    Two, because with one agent two processes that read from each other keep making each other's UCX acknowledge, and
    then a source that does not poll is a source that cannot be read.

    Emulated reads are off. Between nodes without RDMA, UCX would emulate reads over TCP, and then a reader that dies or
    gives up before the source has answered makes UCX abort the *source process* ("Fatal: unexpected error: Endpoint
    timeout" in `ucp_request_try_send`, UCX 1.23). Without emulation UCX refuses to connect, and the source lives.
    With devices, a peer on another machine is tried: what proves it is a read of a token in each kind of memory.

    A timeout with bytes still in flight destroys the reading agent, since UCX cannot take a read back and the target
    must not change afterwards: the endpoint then goes on serving, but reads no more.
    """

    one_sided = True
    two_sided_because = ""

    def __init__(self, name: str, profile: Profile, *, token: bytes | None = None) -> None:
        self.name = name
        self._profile = profile
        self._regions = Regions()
        self._token = torch.frombuffer(bytearray(token or os.urandom(TOKEN_BYTES)), dtype=torch.uint8)
        self._tokens: dict[str, torch.Tensor] = {}
        """By kind of memory. Reads of host memory prove nothing of the wires to a device."""
        self._landings = {"DRAM": torch.zeros(TOKEN_BYTES, dtype=torch.uint8)}
        """By kind of memory, since UCX reads one-sidedly only into the kind that it reads."""
        self._slots: LandingSlots | None = None
        self._peers: dict[int, _NixlPeer] = {}
        self._kept: dict[tuple[Read, ...], tuple[_Progress, ...]] = {}
        self._server: NixlAgent | None = None
        self._reader: NixlAgent | None = None
        self._open = True
        self._why_no_reads = ""
        self._stop = threading.Event()
        self._period_s = PROGRESS_PERIOD_S
        self._thread: threading.Thread | None = None

    def guards(self, peer: int) -> bool:
        return False

    def register(
        self,
        *,
        sources: Mapping[str, AnyRegion] | None = None,
        targets: Mapping[str, AnyRegion] | None = None,
    ) -> None:
        self._check_open(Call.REGISTER)
        given, taken = self._regions.added(sources, targets)
        for kind, each in given.items():
            if each.region.numel:
                for span in spans(each.region):
                    self._serving().register(span, kind)
                self._place_token(each.region.device)
        for kind, each in taken.items():
            if each.region.numel:
                for span in spans(each.region):
                    self._reading().register(span, kind)
        self._regions.add(given, taken)

    def address(self) -> bytes:
        self._check_open(Call.REGISTER)
        sources = self._regions.sources
        self._regions.published = True
        extra = {
            "metadata": base64.b64encode(self._serving().metadata()).decode(),
            "token": base64.b64encode(self._token.numpy().tobytes()).decode(),
            "token_at": self._token.data_ptr(),
            "tokens": {memory: (each.data_ptr(), device_of(each)) for memory, each in self._tokens.items()},
            "bases": {kind: (piece_addresses(each.region), device_of(each.region)) for kind, each in sources.items()},
            "memory": {kind: memory_of(each.region) for kind, each in sources.items()},
            "machine": machine(),
            "pid": os.getpid(),
            **self._profile.extra(),
        }
        return Address(self._profile.kind, self.name, self._regions.source_specs(), extra).encode()

    def start_progress(self) -> None:
        self._check_open(Call.SERVE)
        if self._thread is None:
            self._stop.clear()
            self._period_s = PROGRESS_PERIOD_S
            self._thread = threading.Thread(
                target=self._poll, args=(self._serving(),), name="nixl-progress", daemon=True
            )
            self._thread.start()

    def calm(self) -> None:
        # Wired up, a read needs nothing of its source; a peer that only now finds a lane unsettled waits a little.
        self._period_s = CALM_PERIOD_S

    def stop_progress(self) -> None:
        if self._thread is not None:
            self._stop.set()
            self._thread.join()
            self._thread = None

    def connect(self, peer: int, address: bytes, deadline: float) -> None:
        self._check_open(Call.CONNECT)
        decoded = Address.decode(address, self._profile.kind, peer)
        known = self._peers.get(peer)
        if known is not None and known.address != decoded:
            raise TransportError(Call.CONNECT, f"the number is taken by {known.address.name!r}", peer=peer)
        if known is None:
            known = self._introduce(peer, decoded)
        try:
            self._prove(peer, known, deadline)
        except WayLost as error:
            # A call into the agent has not returned. It ends by itself; closing the agent would wait for it.
            self._why_no_reads, self._reader, self._slots = error.text, None, None
            raise
        self._peers[peer] = known

    def read(self, reads: Sequence[Read], deadline: float) -> ReadReport:
        self._check_open(Call.READ)
        start = time.monotonic()
        asked = tuple(reads) if _is_small(reads) and not any(self._is_staged(each) for each in reads) else ()
        work = self._known(asked) if asked else self._planned(reads)
        try:
            self._run(work, start, deadline)
        except TransportError:
            self._kept.pop(asked, None)
            raise
        for device in {self._regions.targets[read.kind].region.device for read in reads}:
            flush_landed(device)
        peers = tuple(PeerReport(each.peer, each.bytes, each.seconds) for each in work)
        return ReadReport(sum(each.bytes for each in peers), time.monotonic() - start, peers)

    def close(self) -> None:
        self.stop_progress()
        self._open = False
        self._end_reads("the endpoint is closed")
        if self._server is not None:
            self._server.close()
            self._server = None
        self._regions = Regions()
        self._peers.clear()

    def _planned(self, reads: Sequence[Read]) -> list[_Progress]:
        """Batches by ascending peer; a peer without runs is not there."""
        known = {peer: each.address.regions for peer, each in self._peers.items()}
        work: dict[int, _Progress] = {}
        for read, table in zip(reads, check_reads(reads, known, self._regions.targets), strict=True):
            if len(table):
                item = work.setdefault(read.peer, _Progress(read.peer, deque()))
                item.bytes += int(table[:, 2].sum())
                staged = self._is_staged(read)
                parts = batches(table, STAGED_BYTES_MAX if staged else BATCH_BYTES_MAX, BATCH_RUNS_MAX)
                item.pending.extend(_Post(read.kind, ((read.kind, part),), staged=staged) for part in parts)
        return [work[peer] for peer in sorted(work)]

    def _is_staged(self, read: Read) -> bool:
        """Whether its bytes are on a peer's device and go to this host, which UCX does not do at once."""
        known, target = self._peers.get(read.peer), self._regions.targets.get(read.kind)
        return known is not None and target is not None and must_stage(known.memory.get(read.kind, ""), target.region)

    def _known(self, asked: tuple[Read, ...]) -> list[_Progress]:
        """The same for a small read that comes again and again: one post for all that a peer has in one kind of memory,
        whose handle stays."""
        if asked not in self._kept:
            self._kept[asked] = tuple(
                _Progress(item.peer, deque(self._joined(item)), bytes=item.bytes) for item in self._planned(asked)
            )
            if len(self._kept) > KEPT_READS_MAX:
                del self._kept[next(iter(self._kept))]
        return [_Progress(item.peer, deque(item.pending), bytes=item.bytes) for item in self._kept[asked]]

    def _joined(self, item: _Progress) -> list[_Post]:
        found: dict[tuple[str, str], list[tuple[str, Table]]] = {}
        for post in item.pending:
            memories = memory_of(self._regions.targets[post.kind].region), self._peers[item.peer].memory[post.kind]
            found.setdefault(memories, []).extend(post.parts)
        return [_Post(", ".join(kind for kind, _ in parts), tuple(parts), kept=True) for parts in found.values()]

    def _serving(self) -> NixlAgent:
        if self._server is None:
            self._server = self._agent("sources")
            self._server.register(self._token)
        return self._server

    def _agent(self, name: str) -> NixlAgent:
        self._profile.check_here()
        return NixlAgent(load_nixl(self._profile.environment()), f"{self.name}/{name}", self._profile.backend)

    def _place_token(self, device: torch.device) -> None:
        """Where a peer can prove that it reads the memory of this device."""
        memory = "VRAM" if device.type == "cuda" else "DRAM"
        if memory == "DRAM" or memory in self._tokens:
            return
        token = self._tokens[memory] = self._token.to(device)
        settle(DeviceWait.LANDED, device)
        self._serving().register(token)

    def _reading(self) -> NixlAgent:
        if self._why_no_reads:
            raise TransportError(Call.READ, f"{self.name!r} reads no more: {self._why_no_reads}")
        if self._reader is None:
            self._reader = self._agent("targets")
            self._reader.register(self._landings["DRAM"])
        return self._reader

    def _landing_in(self, memory: str) -> torch.Tensor:
        """Where a token of this kind of memory lands: in the same kind, if this process has any."""
        if memory not in self._landings:
            if (device := own_device()).type == "cpu":
                return self._landings["DRAM"]
            self._landings[memory] = torch.zeros(TOKEN_BYTES, dtype=torch.uint8, device=device)
            self._reading().register(self._landings[memory])
        return self._landings[memory]

    def _introduce(self, peer: int, decoded: Address) -> _NixlPeer:
        self._profile.check_peer(peer, decoded)
        try:
            metadata = base64.b64decode(decoded.extra["metadata"])
            bases = {
                str(kind): (tuple(int(at) for at in places), int(device))
                for kind, (places, device) in decoded.extra["bases"].items()
            }
            memory = {kind: str(decoded.extra["memory"][kind]) for kind in bases}
            if any(len(bases[kind][0]) != len(spec.pieces) for kind, spec in decoded.regions.items()):
                raise ValueError("not every piece of a region has an address")
        except (KeyError, TypeError, ValueError) as error:
            raise TransportError(Call.CONNECT, f"not an address: {error!r}", peer=peer) from None
        return _NixlPeer(decoded, self._reading().add_peer(peer, metadata), bases, memory)

    def _prove(self, peer: int, known: _NixlPeer, deadline: float) -> None:
        """Read the peer's token, in each kind of memory that it has: wires up ahead of the first real read, finds an
        endpoint that was replaced, and what cannot be read one-sidedly."""
        reader, where = self._reading(), Where(Call.CONNECT, peer)
        extra = known.address.extra
        tokens = {"DRAM": (int(extra["token_at"]), 0), **extra.get("tokens", {})}
        for memory, (at, device) in tokens.items():
            landing = self._landing_in(memory)
            place = [[landing.data_ptr(), TOKEN_BYTES, device_of(landing)]]
            local = Descriptors(memory_of(landing), np.array(place, dtype=np.uint64))
            remote = Descriptors(memory, np.array([[int(at), TOKEN_BYTES, int(device)]], dtype=np.uint64))
            read = partial(self._read_token, reader, known, (local, remote), landing, deadline, where)
            self._profile.prove(peer, read, deadline)
            try:
                flush_landed(landing.device)
            except RuntimeError as error:
                raise TransportError(Call.CONNECT, str(error), peer=peer) from error
            if base64.b64encode(bytes(on_host(landing))).decode() != extra["token"]:
                raise TransportError(Call.CONNECT, f"{known.address.name!r} is not who the address says", peer=peer)

    def _read_token(
        self,
        reader: NixlAgent,
        known: _NixlPeer,
        ends: tuple[Descriptors, Descriptors],
        landing: torch.Tensor,
        deadline: float,
        where: Where,
    ) -> None:
        landing.zero_()
        settle(DeviceWait.ALLOCATED, landing.device)
        handle, start = reader.post(where, known.agent_name, *ends), time.monotonic()
        while not reader.landed(where, handle):
            now = time.monotonic()
            if now >= deadline:
                del handle
                self._end_reads(f"{known.address.name!r} did not answer in time and may still do so")
                text = f"{known.address.name!r} did not answer a read of its {ends[1].memory}"
                raise TransportTimeout(Call.CONNECT, text, peer=where.peer)
            if now - start >= SPIN_S:
                time.sleep(SLEEP_MOST_S)

    def _run(self, work: Sequence[_Progress], start: float, deadline: float) -> None:
        """Post and poll until all landed. After a failure nothing new is posted, but what flies is waited for."""
        failure: TransportError | None = None
        pause = SLEEP_LEAST_S
        last_landing = start
        while not all(item.done for item in work):
            now = time.monotonic()
            if now >= deadline:
                self._give_up(work, failure)
            moved = False
            for item in work:
                try:
                    moved |= self._advance(item)
                except TransportError as error:
                    failure = failure or error
                if item.done and not item.seconds:
                    item.seconds = time.monotonic() - start
            if failure:
                for item in work:
                    item.pending.clear()
            if moved:
                last_landing, pause = time.monotonic(), SLEEP_LEAST_S
            elif now - last_landing > SPIN_S:
                time.sleep(pause)
                pause = min(2 * pause, SLEEP_MOST_S)
        if failure:
            raise failure

    def _advance(self, item: _Progress) -> bool:
        """One round for one peer: look at what flies, then post. True when anything moved. If a batch has failed, all
        others that fly are still there when this raises."""
        reader = self._reading()
        before, failures = len(item.flying), []
        for post in tuple(item.flying):
            try:
                landed = reader.landed(Where(Call.READ, item.peer, post.kind), post.handle, keep=post.kept)
                if landed and post.staged:
                    self._unload(post)
            except TransportError as error:
                failures.append(error)
                landed = True
            if landed:
                item.flying.remove(post)
                self._give_back(post)
        if failures:
            raise failures[0]
        moved = len(item.flying) < before
        if item.pending and len(item.flying) < IN_FLIGHT_PER_PEER_MAX and self._has_room(item.pending[0]):
            post = item.pending.popleft()
            known, where = self._peers[item.peer], Where(Call.READ, item.peer, post.kind)
            try:
                if post.handle is None:
                    post.handle = reader.prepare(where, known.agent_name, *self._ends(known, post))
                reader.start(where, post.handle)
            except TransportError:
                self._give_back(post)
                raise
            item.flying.append(post)
            moved = True
        return moved

    def _has_room(self, post: _Post) -> bool:
        """Whether it may be posted now. One that is staged has its slot then."""
        if post.staged and post.slot is None:
            if self._slots is None:
                self._slots = LandingSlots(own_device())
                self._reading().register(self._slots.memory)
            post.slot = self._slots.take()
        return not post.staged or post.slot is not None

    def _unload(self, post: _Post) -> None:
        assert self._slots is not None and post.slot is not None, "it has landed there"
        ((kind, table),) = post.parts
        self._slots.unload(post.slot, table, self._regions.targets[kind].memory)

    def _give_back(self, post: _Post) -> None:
        if self._slots is not None and post.slot is not None:
            self._slots.give_back(post.slot)
            post.slot = None

    def _ends(self, known: _NixlPeer, post: _Post) -> tuple[Descriptors, Descriptors]:
        """Of all parts, which lie in one kind of memory at each end."""
        here, there = zip(*(self._ends_of(known, kind, table) for kind, table in post.parts), strict=True)
        if self._slots is not None and post.slot is not None:
            ((_, table),) = post.parts
            here = (Descriptors(memory_of(self._slots.memory), self._slots.packed(post.slot, table)),)
        return _one(here), _one(there)

    def _ends_of(self, known: _NixlPeer, kind: str, table: Table) -> tuple[Descriptors, Descriptors]:
        target, (bases, device) = self._regions.targets[kind], known.bases[kind]
        local, remote = np.empty((2, len(table), 3), dtype=np.uint64)
        local[:, 0] = addresses(target.spec.byte_starts, piece_addresses(target.region), table[:, 1])
        remote[:, 0] = addresses(known.address.regions[kind].byte_starts, bases, table[:, 0])
        local[:, 1], local[:, 2] = table[:, 2], device_of(target.region)
        remote[:, 1], remote[:, 2] = table[:, 2], device
        return Descriptors(memory_of(target.region), local), Descriptors(known.memory[kind], remote)

    def _give_up(self, work: Sequence[_Progress], failure: TransportError | None) -> None:
        late = next(item for item in work if not item.done)
        kind = (late.flying or late.pending)[0].kind
        names = ", ".join(self._peers[item.peer].address.name for item in work if not item.done)
        if any(item.flying for item in work):
            for item in work:
                item.pending.clear()
                item.flying.clear()  # A handle keeps the agent alive, and the agent goes on writing into the target.
            self._end_reads(f"a read from {names} was still in flight at its deadline")
        if failure:
            raise failure
        raise TransportTimeout(Call.READ, f"deadline passed, still waiting for {names}", peer=late.peer, kind=kind)

    def _end_reads(self, why: str) -> None:
        self._why_no_reads = self._why_no_reads or why
        self._kept.clear()
        if self._reader is not None:
            self._reader.close()
            self._reader = self._slots = None

    def _poll(self, server: NixlAgent) -> None:
        while not self._stop.wait(self._period_s):
            server.progress()

    def _check_open(self, phase: Call) -> None:
        if not self._open:
            raise TransportError(phase, f"{self.name!r} is closed")


def _is_small(reads: Sequence[Read]) -> bool:
    """Whether it is a look at counters, not at state."""
    return sum(run.elements for read in reads for run in read.runs) <= KEPT_ELEMENTS_MAX


def _one(ends: Sequence[Descriptors]) -> Descriptors:
    return ends[0] if len(ends) == 1 else Descriptors(ends[0].memory, np.concatenate([each.table for each in ends]))
