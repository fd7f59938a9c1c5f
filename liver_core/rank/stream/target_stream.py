"""One target rank's stream in a live handoff. It runs from the end of preparation to the boundary.

Connects `liver_core.streaming` with this rank's plan, endpoint and regions. Keeps what the certificate needs: the hash
at the announced version, and the sums of all gradients replayed since.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from liver_core.certificate import MASK, CertificatePlan, chained_sums
from liver_core.device import is_host
from liver_core.device.threads import background
from liver_core.handoff.messages import Order, PreparePhase
from liver_core.layout import Manifest
from liver_core.memory.memory_budget import (
    TILE_ELEMENTS_IN_HOST_MEMORY,
    TILE_ELEMENTS_MOST,
    BudgetRefused,
    derive,
    replay_bytes,
)
from liver_core.memory.memory_placement import MemoryPlacement
from liver_core.rank.active_world import ActiveWorld
from liver_core.rank.memory_account import MemoryAccount
from liver_core.rank.store_exchange import Exchange
from liver_core.rank.stream.source_stream import SourceStream
from liver_core.reshard import RankPlan
from liver_core.state.live_state import LiveState, state_kinds
from liver_core.state.megatron_optimizer import GRAD
from liver_core.state.replay_check import check_replay, replayer
from liver_core.state.step_counts import UnsupportedState
from liver_core.streaming.follow import Follower
from liver_core.streaming.header import HeaderError, StepHeader
from liver_core.streaming.reader import Following, StreamEnd, StreamResult, TargetStream
from liver_core.streaming.tiles import LOCAL, Span, cut_tiles
from liver_core.streaming.window_step import Replayer
from liver_core.transport.protocol import Transport
from liver_core.worlds.released_storage import discard

SHARE_LEAST = 0.1
SLOWED, UNDISTURBED = 1.10, 1.03
"""Ratios of a step to its usual length. Above the first, streaming slows training too much and slows down. Below the
second, it may speed up again."""


RELAYED_TILE_ELEMENTS = 1 << 18
"""Of a tile that comes over a relay, at most. One of them is torn in each step of the source: with Adam's three kinds
it has 3 MB, 4 % of what 1 Gb/s brings in 0.6 s. They are asked for many at a time."""
PATIENCE = 0.25
"""The share of the time to the deadline in which streaming slows down for training."""


@dataclass(frozen=True, slots=True)
class StreamSettings:
    """`tile_elements`: the longest tile, if the budget allows; None: 2^24 on a GPU, 2^20 in host memory.
    `ring_depth`: slots of a source's ring, if the budget allows; None: two on a GPU, where a slot is dear, four in host
    memory. `share`: the largest share of time that a target's thread may work, above 0 and at most 1."""

    tile_elements: int | None = None
    ring_depth: int | None = None
    share: float = 1.0

    def longest_tile(self, device: torch.device) -> int:
        """Elements of the longest tile where steps are replayed on `device`."""
        if self.tile_elements is not None:
            return self.tile_elements
        return TILE_ELEMENTS_IN_HOST_MEMORY if is_host(device) else TILE_ELEMENTS_MOST


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetInputs:
    """The parts of a `NextWorld` that a target's stream needs.

    `active`: the world in which this rank trains, None for a newcomer. `beside`: the source stream of the same process.
    """

    request: Order
    exchange: Exchange
    transport: Transport | None
    manifest: Manifest
    live: LiveState
    plan: RankPlan
    certificate: CertificatePlan
    placement: MemoryPlacement
    account: MemoryAccount
    active: ActiveWorld | None
    beside: SourceStream | None


class StreamFailed(RuntimeError):
    """The stream cannot reach the requested version. The text says why."""


class StreamRefused(RuntimeError):
    """The state of this rank cannot stream. The text says why and what to change. `phase`: STREAM or REPLAY."""

    def __init__(self, text: str, phase: PreparePhase = PreparePhase.STREAM) -> None:
        super().__init__(text)
        self.phase = phase


class _Summing:
    """Replays. Sums the gradients before each replay of the whole share. Calls `on_header` with every header."""

    def __init__(
        self,
        inner: Replayer,
        live: LiveState,
        plan: CertificatePlan,
        whole: Callable[[], bool],
        on_header: Callable[[StepHeader], None],
        *,
        probe: Callable[[str], None],
    ) -> None:
        self._inner = inner
        self._live = live
        self._plan = plan
        self._whole = whole
        self._on_header = on_header
        self._probe = probe
        self.sums: dict[int, int] = {}

    def replay(self, spans: Sequence[Span], header: StepHeader) -> None:
        self._probe("replay")
        if self._whole():
            parts = self._plan.sums(self._live.regions[GRAD], GRAD)
            self.sums[header.version] = sum(int(part) for part in parts) & MASK
        self._inner.replay(spans, header)
        self._on_header(header)


class LiveTarget:
    """See the module. `converged`: all state is here, at most one step behind."""

    def __init__(
        self,
        inputs: TargetInputs,
        settings: StreamSettings,
        *,
        deadline: float,
        probe: Callable[[str], None] = lambda point: None,
    ) -> None:
        """Raises StreamRefused. `deadline` is the handoff's, in time.monotonic() seconds."""
        live, certificate, transport = inputs.live, inputs.certificate, inputs.transport
        self._settings = settings
        self._deadline = deadline
        self._certified = False
        self._probe = probe
        self._hashes: dict[int, list[int] | int] = {}
        self._result: StreamResult | None = None
        self._plan = certificate
        self._live = live
        self._kinds = state_kinds(inputs.manifest)
        self.tile_elements = tile_elements = self._refuse_or_size(inputs)
        guarded = _guarded(inputs)
        following = self._following(inputs, min(tile_elements, RELAYED_TILE_ELEMENTS) if guarded else tile_elements)
        if transport is not None:
            transport.register(targets=following.targets())
        self._follower = Follower(following.tiles, depth=following.depth, guarded=guarded)
        self._replayer = replayer(live, window_elements=tile_elements)
        self._replay_bytes = replay_bytes(tile_elements, inputs.placement.staged_kinds)
        inputs.account.take(self._replay_bytes)
        self._summing = _Summing(
            self._replayer,
            live,
            certificate,
            lambda: not self._follower.todo,
            self._throttle,
            probe=probe,
        )
        self._share = settings.share
        self._stream = TargetStream(
            transport,
            following,
            self._follower,
            self._summing.replay,
            share=settings.share,
            on_tile=self._note_tile,
            on_converged=self._note_converged,
            on_hash=self._hash,
            on_hash_missed=self._note_missed,
        )
        self._started = time.monotonic()
        self.converge_s = 0.0
        self._thread = background(self._run, name="target-stream")
        self._thread.start()

    @property
    def converged(self) -> bool:
        return self.converge_s > 0

    @property
    def version(self) -> int:
        """The version of all state that is here."""
        return self._follower.version

    @property
    def lag(self) -> int:
        """Steps that the furthest source seen is ahead of `version`."""
        return max(0, self._follower.lag or 0)

    @property
    def step_s(self) -> float:
        """Seconds per step as the source world reports them; 0 before the first report."""
        return self._follower.pace.step_s

    @property
    def failure(self) -> str:
        """Why the stream ended early; empty if it did not."""
        result = self._result
        return "" if result is None or result.end is StreamEnd.DONE else f"{result.end}: {result.reason}"

    def announce(self, version: int) -> None:
        """Hash at exactly `version`."""
        self._stream.announce(version)

    def hashed(self, version: int) -> list[int] | int | None:
        """The sums at `version`, kinds by parameters, or by how many steps it was missed. None if not known yet."""
        return self._hashes.get(version)

    def finish(self, version: int, until: float) -> None:
        """Reach exactly `version` by `until` (time.monotonic seconds), then end. Raises StreamFailed."""
        self._stream.set_deadline(until)
        self._stream.finish(version)
        self._thread.join(max(0.0, until - time.monotonic()))
        result = self._result
        if result is None:
            # Training waits, so do not wait for a read or a replay in progress: whoever drops this world does.
            self._stream.stop()
            raise StreamFailed(f"version {version} was not reached in time: {self.describe()}")
        # If all state is here at that version, the loss of a source does not matter any more.
        ended = result.end is StreamEnd.DONE or (result.end is StreamEnd.LOST and result.whole)
        if not ended or result.version != version:
            raise StreamFailed(f"{result.end} at version {result.version}, not {version}: {result.reason}")

    def unsummed(self, after: int, upto: int) -> str:
        """Why `chain` cannot be told: a lost slot had everything read again at a later version, and the steps up to
        there were never replayed. Empty if it can be."""
        missing = [version for version in range(after + 1, upto + 1) if version not in self._summing.sums]
        if not missing:
            return ""
        return (
            f"a slot was overwritten after the state was certified at version {after}, and the state was read again: "
            f"steps {missing[0]} to {missing[-1]} are in no sum of this rank"
        )

    def chain(self, after: int, upto: int) -> int:
        """`certificate.chained_sums` of the gradients replayed after version `after` up to `upto`. Where one of them
        is `unsummed` it counts as 0, which makes the comparison fail."""
        return chained_sums({version: self._summing.sums.get(version, 0) for version in range(after + 1, upto + 1)})

    def describe(self) -> str:
        """Where the stream is, for people."""
        status = self._stream.status()
        estimate = "unknown" if status.estimate_s is None else f"{status.estimate_s:.1f} s"
        return (
            f"at version {status.version}, lag {status.lag}, {status.todo_elements} elements missing, "
            f"estimate {estimate}, {status.counts.torn} torn reads, {status.counts.losses} lost slots"
        )

    def measures(self) -> dict[str, float]:
        """Seconds and bytes so far, for the report."""
        counts = self._follower.counts
        return {
            "converge_s": self.converge_s,
            "copied_s": self._stream.copied_s,
            "bytes_streamed": float(counts.read_bytes),
            "bytes_reread": float(counts.reread_bytes),
            "bytes_replayed": float(counts.replayed_bytes),
            "replays": float(counts.replays),
            "torn_reads": float(counts.torn),
        }

    def close(self) -> None:
        """End the thread, whatever it is doing. Another thread may use its endpoint afterwards. Takes as long as a read
        that is in progress, up to 15 s, so do not call it where training waits."""
        self._stream.stop()
        if self._thread is not threading.current_thread():
            self._thread.join(15.0)

    def free(self) -> int:
        """After `close`: free the memory of replay. Returns bytes on the device."""
        discard(self._replayer.stages.values())
        freed, self._replay_bytes = self._replay_bytes, 0
        return freed

    def _run(self) -> None:
        self._result = self._stream.run(self._deadline)

    def certified(self) -> None:
        """The verdict is here. Stop slowing down: a missed step could not be certified again. From now on the boundary
        decides, not the clock of this rank: the stream has no deadline until `finish`, and an abort drops it."""
        self._certified = True
        self._stream.set_share(1.0)
        self._stream.set_deadline(math.inf)

    def set_deadline(self, deadline: float) -> None:
        """Set the handoff's new, earlier deadline, in time.monotonic() seconds."""
        self._deadline = deadline
        if not self._certified:
            self._stream.set_deadline(deadline)

    def _throttle(self, header: StepHeader) -> None:
        """Slow down while steps take longer than usual: cut the share by a third. Raise it again in smaller steps."""
        if not header.usual_step_s or self._certified:
            return
        if time.monotonic() - self._started > PATIENCE * (self._deadline - self._started):
            # If it slowed down for too long, it would not finish before the deadline.
            self._stream.set_share(1.0)
            return
        slower = header.step_s / header.usual_step_s
        if slower > SLOWED:
            self._share = max(min(SHARE_LEAST, self._settings.share), self._share / 1.5)
        elif slower < UNDISTURBED:
            self._share = min(self._settings.share, self._share * 1.2)
        self._stream.set_share(self._share)

    def _note_converged(self, version: int) -> None:
        self.converge_s = self.converge_s or time.monotonic() - self._started

    def _note_tile(self, number: int) -> None:
        last = len(self._follower.tiles) - 1
        names = {last // 2: "middle tile", last: "last tile", 0: "first tile"}
        self._probe(names.get(number, "tile"))

    def _hash(self, version: int) -> None:
        self._probe("hash target")
        self._hashes[version] = [
            int(part) for kind in self._kinds for part in self._plan.sums(self._live.regions[kind], kind)
        ]

    def _note_missed(self, version: int, reason: str) -> None:
        self._hashes[version] = self.version - version

    def _refuse_or_size(self, inputs: TargetInputs) -> int:
        """Elements of a tile. Raises StreamRefused if this rank cannot stream."""
        if inputs.plan.remote and (inputs.transport is None or not inputs.transport.one_sided):
            why = "" if inputs.transport is None else f": {inputs.transport.two_sided_because}"
            raise StreamRefused(f"streaming needs one-sided reads{why}")
        try:
            check_replay(self._live)
            sizes = derive(
                inputs.account.device_bytes_max,
                taken_bytes=inputs.account.device_bytes,
                gradient_bytes=0,
                target_numel=self._live.shards.region_numel,
                staged_kinds=inputs.placement.staged_kinds,
            )
        except (UnsupportedState, HeaderError) as error:
            raise StreamRefused(str(error), PreparePhase.REPLAY) from error
        except BudgetRefused as error:
            raise StreamRefused(str(error)) from error
        return min(sizes.tile_elements, self._settings.longest_tile(self._live.device))

    def _following(self, inputs: TargetInputs, tile_elements: int) -> Following:
        plan, request, active, beside = inputs.plan, inputs.request, inputs.active, inputs.beside
        assert request.source is not None
        leaving = {
            rank: request.deadline_utc
            for rank, member in enumerate(request.source.members)
            if member not in request.target.members
        }
        places = [
            (part.region_offset, part.region_offset + part.numel) for part in self._live.shards.parameters if part.numel
        ]
        depths: dict[int, Any] = {
            part.source_rank: inputs.exchange.wait(f"ring/{part.source_rank}", self._deadline) for part in plan.remote
        }
        if without := [rank for rank, depth in depths.items() if not depth]:
            raise StreamRefused(f"source ranks {without} have no room for a ring")
        if active is not None and beside is None:
            raise StreamRefused("there is no room for this rank's own ring")
        local = None
        if active is not None and beside is not None:
            local = {**active.live.regions, **beside.ring.regions}
            depths[LOCAL] = beside.ring.depth
        tiles = cut_tiles(plan, places, tile_elements, leaving=leaving)
        return Following(tiles, depths, self._live.regions, self._kinds, local=local, device=self._live.device)


def _guarded(inputs: TargetInputs) -> frozenset[int]:
    """The source ranks whose counters are looked at where they are read."""
    transport, remote = inputs.transport, (part.source_rank for part in inputs.plan.remote)
    return frozenset(rank for rank in remote if transport is not None and transport.guards(rank))
