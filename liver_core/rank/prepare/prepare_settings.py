"""What is the same for every preparation of a rank process."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from liver_core.handoff.messages import StoreAddress
from liver_core.rank.stream.target_stream import StreamSettings
from liver_core.transport.protocol import Transport
from liver_core.worlds.nccl_groups import CONNECT_S, TrainsOn, own_place


@dataclass(frozen=True, slots=True)
class PrepareSettings:
    """`host`: local address for groups and transport. `extra_bytes_max`: limit of what a handoff adds to this rank's
    device (None: no limit); `host_bytes_max`: how much of it may wait in host memory. `bring_up_s`, `collective_s`:
    limits of one group's start and of one collective; `connect_s`: of making all communicators on GPUs, counted from
    where this rank begins to. `transport`: makes the endpoint from its name and the store. `place`:
    where this rank trains."""

    host: str
    transport: Callable[[str, StoreAddress], Transport]
    extra_bytes_max: int | None = None
    host_bytes_max: int = 0
    bring_up_s: float = 20.0
    collective_s: float = 20.0
    connect_s: float = CONNECT_S
    stream: StreamSettings = field(default_factory=StreamSettings)
    place: Callable[[], TrainsOn] = own_place
