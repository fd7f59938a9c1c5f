"""The next world, which a handoff prepares while the rank trains in another: its parts, and how to drop it."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from liver_core.certificate import CertificatePlan
from liver_core.device import DeviceWait, settle_all
from liver_core.device.moments import Moment, moment
from liver_core.device.rank_device import own_device
from liver_core.handoff.messages import Order, Reason, Rung
from liver_core.layout import Manifest
from liver_core.memory.memory_placement import MemoryPlacement
from liver_core.rank.active_world import Verdict
from liver_core.rank.memory_account import MemoryAccount
from liver_core.rank.rescue.saved_state import Rescue
from liver_core.rank.store_exchange import Exchange
from liver_core.rank.stream.source_stream import SourceStream
from liver_core.rank.stream.target_stream import LiveTarget
from liver_core.reshard import RankPlan
from liver_core.state.live_state import LiveState, free
from liver_core.state.step_tensors import BothVersions
from liver_core.steady_clock import PROCESS_CLOCK
from liver_core.training.job import TrainState
from liver_core.transport.protocol import Read, Transport
from liver_core.worlds.megatron import MegatronWorld, connect, retire
from liver_core.worlds.nccl_groups import CONNECT_S
from liver_core.worlds.released_storage import collect

COLLECT_AFTER_S = 1.0
CONNECT = "connect"
"""In the store: the ranks of the source world make the communicators of the next one now, and newcomers must too."""


@dataclass(slots=True)
class NextWorld:
    """What preparation made: for a target its world, state, plan and endpoint; for a leaver only the endpoint.

    `loaded`: the path of the checkpoint that a start began from; `small`: its small state. `boundary`: what the source
    world published at its boundary; `step_tensors`: to a target, what steps change beside parameters. `verdict`: how
    the state moves, once all ranks have agreed. If there is a `rescue`, it comes before world, state and plan.
    `measures`: seconds per phase, and bytes. `placement`: which parts of a target's world wait in host memory.
    `account`: the memory that the handoff may take and has taken. `lacks_communicators`: the ranks of the target world
    must make those of their GPUs before the cutover, within `connect_s`; known to leavers too. `first_forward`: when
    its device begins the first forward pass, which ends the pause.
    """

    request: Order
    exchange: Exchange
    transport: Transport | None
    source_rank: int | None
    target_rank: int | None
    manifest: Manifest | None = None
    world: MegatronWorld | None = None
    state: TrainState | None = None
    live: LiveState | None = None
    plan: RankPlan | None = None
    certificate: CertificatePlan | None = None
    source_certificate: CertificatePlan | None = None
    source_stream: SourceStream | None = None
    target_stream: LiveTarget | None = None
    verdict: Verdict | None = None
    rescue: Rescue | None = None
    loaded: str = ""
    small: dict[str, Any] | None = None
    step_tensors: BothVersions | None = None
    boundary: dict[str, Any] = field(default_factory=dict)
    measures: dict[str, float] = field(default_factory=dict)
    placement: MemoryPlacement = field(default_factory=lambda: MemoryPlacement((), ()))
    lacks_communicators: bool = False
    connect_s: float = CONNECT_S
    first_forward: Moment | None = None
    account: MemoryAccount = field(init=False)

    def __post_init__(self) -> None:
        self.account = MemoryAccount(self.measures)

    def reads(self, kinds: Sequence[str]) -> list[Read]:
        """The remote reads of these kinds, from all peers."""
        assert self.plan is not None
        return [Read(part.source_rank, kind, part.runs) for part in self.plan.remote for kind in kinds]

    @property
    def streams(self) -> bool:
        """Whether the state streams. If so, only the last gradients move in the pause."""
        return self.verdict is not None and self.verdict.rung is Rung.LIVE

    @property
    def why_it_fell(self) -> Reason | None:
        """Why the state is copied in the pause although the order asked to stream it."""
        verdict = self.verdict
        return None if verdict is None or self.streams else Reason(verdict.reason, verdict.phase)

    def connect(self) -> None:
        """Make the communicators of the next world after the boundary that all ranks have agreed on for it. Newcomers
        learn here that it is over, with all that came with it. Raises RuntimeError if a rank is gone, or if they are
        not there `connect_s` seconds from now."""
        started = time.monotonic()
        if self.source_rank == 0:
            self.exchange.post(CONNECT, True)
        if self.world is not None:
            settle_all(DeviceWait.QUIET, own_device())
            connect(self.world, self.connect_s, since=started)
        self.lacks_communicators = False
        self.measures["connect_communicators_s"] = time.monotonic() - started

    def install_step_tensors(self, *, before: bool) -> None:
        """GO, on a target: as they were `before` the step that is handed over, to do it again, or after it."""
        if self.step_tensors is not None:
            assert self.live is not None
            self.live.step_tensors.install(self.step_tensors.before if before else self.step_tensors.after)

    def end_streams(self) -> None:
        """End the streaming threads. After this nothing reads or fills a ring."""
        if self.target_stream is not None:
            self.target_stream.close()
        if self.source_stream is not None:
            self.source_stream.close()

    def free_streams(self) -> int:
        """After `end_streams`: free the streams' memory. Returns bytes on the device."""
        source, target = self.source_stream, self.target_stream
        return (0 if source is None else source.free()) + (0 if target is None else target.free())

    def begins_forward(self) -> None:
        """The first forward pass comes next. Called again where that step is dropped."""
        self.first_forward = self.first_forward or moment(own_device())

    def has_stepped(self, first_step_s: float | None) -> None:
        """The first step is made, in so many seconds. Waits for all that this thread has queued."""
        if self.first_forward is not None:
            self.measures["first_forward_at_utc"] = PROCESS_CLOCK.utc_at(self.first_forward.host_s())
        if first_step_s is not None:
            self.measures["first_step_s"] = first_step_s
        self.end_rescue()

    def end_rescue(self) -> None:
        """Every target has its state: free what was stored for leavers, and close the endpoints used to read it."""
        if self.rescue is not None:
            self.rescue.close()
            if self.transport is not None:
                self.transport.close()

    def drop(self) -> None:
        """Free everything. The running world is as if nothing had happened."""
        self.end_streams()
        self.end_rescue()
        if self.transport is not None:
            self.transport.close()
        if self.world is not None:
            retire(self.world)
        if self.live is not None:
            free(self.live)
        self.world = self.state = self.live = self.target_stream = self.source_stream = None
        # Modules and optimizer form reference cycles, which keep the sockets and threads of the groups. Collect later:
        # the caller may still refer to this world, for example in an exception.
        later = threading.Timer(COLLECT_AFTER_S, collect)
        later.daemon = True
        later.start()
