"""Waits for a device: the host's, before others may see bytes, and those of one queue for another.

Every wait of the product is made here and names its reason, so that a test can take each one away and see it missed
(`tests/liver_core/device`). On a CPU nothing is ever queued, and all of this does nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from enum import StrEnum
from typing import Any, Protocol

import torch


class DeviceWait(StrEnum):
    """Why something waits for a device."""

    ALLOCATED = "memory is zeroed before a read may land in it"
    RING_MADE = "a ring is zeroed before a step fills a slot of it"
    SLOT_FILLED = "a slot holds its gradients before its counter says so"
    STEP_APPLIED = "a step is applied before the counter of the state is even"
    STANDS = "a hash of the state begins after the step that made it"
    BOUNDARY = "the last step is applied before its boundary is published"
    GRADIENTS = "gradients lie in their region before their norm is published"
    LOCAL_COPIED = "what was copied in this process is there before the counter is looked at again"
    REPLAYED = "a step is replayed before the gradients of the next one land"
    LANDED = "what came over sockets is on the device before the read is over"
    MOVED_IN = "what waited in host memory is on the device before that memory is freed"
    FREED = "nobody on the device uses memory any more before it is freed"
    STARTED = "a background thread begins after what its starter has queued"
    PREPARED = "what one thread has prepared is complete before another uses it"
    QUIET = "nothing is queued on the device when the communicators of a world are made"
    READ = "a number is computed before the host reads it"


class Event(Protocol):
    """A moment in the queue of a device."""

    def passed(self) -> bool:
        """Whether the device has got there. Does not wait."""
        ...


class Streams(Protocol):
    """What a kind of device can do. `own`: the queue of the calling thread, for its block."""

    def mark(self, device: torch.device) -> Event: ...
    def await_event(self, why: DeviceWait, event: Event) -> None: ...
    def follow(self, why: DeviceWait, event: Event) -> None: ...
    def settle(self, why: DeviceWait, device: torch.device) -> None: ...
    def settle_all(self, why: DeviceWait, device: torch.device) -> None: ...
    def own(self, device: torch.device) -> AbstractContextManager[Any]: ...
    def read(self, tensor: torch.Tensor) -> list[Any]: ...
    def host_zeros(self, elements: int, dtype: torch.dtype) -> torch.Tensor: ...


class _Past:
    """The moment of a device on which everything happens at once."""

    def passed(self) -> bool:
        return True


class _Host:
    def mark(self, device: torch.device) -> Event:
        return _PAST

    def await_event(self, why: DeviceWait, event: Event) -> None:
        return

    def follow(self, why: DeviceWait, event: Event) -> None:
        return

    def settle(self, why: DeviceWait, device: torch.device) -> None:
        return

    def settle_all(self, why: DeviceWait, device: torch.device) -> None:
        return

    def own(self, device: torch.device) -> AbstractContextManager[Any]:
        return nullcontext()

    def read(self, tensor: torch.Tensor) -> list[Any]:
        return tensor.tolist()

    def host_zeros(self, elements: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros(elements, dtype=dtype, device="cpu")


class _CudaEvent:
    def __init__(self, device: torch.device) -> None:
        # Blocking: a thread that waits for it sleeps, and leaves the core to the thread that launches.
        self.event = torch.cuda.Event(blocking=True)
        self.device = device
        self.event.record(torch.cuda.current_stream(device))

    def passed(self) -> bool:
        return self.event.query()


class _Cuda(_Host):
    def mark(self, device: torch.device) -> Event:
        return _CudaEvent(device)

    def await_event(self, why: DeviceWait, event: Event) -> None:
        if isinstance(event, _CudaEvent):
            event.event.synchronize()

    def follow(self, why: DeviceWait, event: Event) -> None:
        if isinstance(event, _CudaEvent):
            torch.cuda.current_stream(event.device).wait_event(event.event)

    def settle(self, why: DeviceWait, device: torch.device) -> None:
        self.await_event(why, self.mark(device))

    def settle_all(self, why: DeviceWait, device: torch.device) -> None:
        torch.cuda.synchronize(device)

    def own(self, device: torch.device) -> AbstractContextManager[Any]:
        # Torch's streams do not wait for the legacy default one, and 0 is the lowest priority it offers.
        return torch.cuda.stream(torch.cuda.Stream(device, priority=0))


_PAST = _Past()
_HOST, _CUDA = _Host(), _Cuda()
_pretended: Streams | None = None


@contextmanager
def pretending(streams: Streams) -> Iterator[None]:
    """Within this block every device of this process is `streams`. For tests."""
    global _pretended
    _pretended = streams
    try:
        yield
    finally:
        _pretended = None


def streams_of(device: torch.device) -> Streams:
    """What `device` can do."""
    return _pretended or (_CUDA if device.type == "cuda" else _HOST)


def is_host(device: torch.device) -> bool:
    """Whether all that was asked of `device` has happened once the call returns, and the host may touch its memory."""
    return _pretended is None and device.type == "cpu"


def mark(device: torch.device) -> Event:
    """The moment at which all that this thread has queued until now is done."""
    return streams_of(device).mark(device)


def await_event(why: DeviceWait, device: torch.device, event: Event) -> None:
    """Have the host wait."""
    streams_of(device).await_event(why, event)


def follow(why: DeviceWait, device: torch.device, event: Event) -> None:
    """Have what this thread queues from now on wait. The host does not."""
    streams_of(device).follow(why, event)


def settle(why: DeviceWait, device: torch.device) -> None:
    """Have the host wait for all that this thread has queued."""
    streams_of(device).settle(why, device)


def settle_all(why: DeviceWait, device: torch.device) -> None:
    """Have the host wait for all that any thread has queued until now. Not where training waits."""
    streams_of(device).settle_all(why, device)


def read(tensor: torch.Tensor) -> list[Any]:
    """The numbers of a small tensor, on the host. Waits for what this thread has queued."""
    return streams_of(tensor.device).read(tensor)


def host_zeros(elements: int, dtype: torch.dtype) -> torch.Tensor:
    """Memory of the host beside a device, which the CPU alone writes: counters and headers."""
    return streams_of(_CPU).host_zeros(elements, dtype)


_CPU = torch.device("cpu")
