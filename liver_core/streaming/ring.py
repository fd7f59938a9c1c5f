"""The source's side of streaming: its counter, and a ring of the last steps' gradients with headers and own counters.

The source's main thread writes at each step, never waits for a reader and reads nothing back. It waits for a device
only if that has not yet done the step before.
Not here: who reads (`reader`), and what a header holds (`header`).
"""

from __future__ import annotations

import threading
from collections import deque
from dataclasses import dataclass

import numpy as np
import torch

from liver_core.certificate import MASK, CertificatePlan
from liver_core.device import DeviceWait, Event, await_event, host_zeros, is_host, mark, settle
from liver_core.device.region import AnyRegion, Region, as_region
from liver_core.streaming.counters import HostCounters
from liver_core.streaming.header import HEADER_BYTES, StepHeader

COUNTER = "counter"
SLOTS = "slots"
HEADERS = "headers"
NEVER = -1
"""A slot's counter before its first use."""

BEFORE_ANY = -1
"""The version of a source that has not said yet where it stands: its counter may not go back from there."""


def ring_kind(slot: int) -> str:
    """The region of one slot's gradients: each has its own, so that runs are the same for all slots and for tiles."""
    return f"ring{slot}"


def slot_of(version: int, depth: int) -> int:
    """The slot that holds the gradient of the step from version - 1 to version."""
    return version % depth


class SourceRing:
    """What a source registers besides its live regions: `regions` says under which names.

    counter int64[1]: 2 * version, plus 1 while stepping. slots int64[depth]: of each slot 2 * version when it holds the
    whole gradient of the step to `version`, 2 * version - 1 while that is being written, -1 when it was never used.
    headers uint8[depth * HEADER_BYTES]. ring0 .. ring{depth-1}: a region with the gradients' elements and dtypes.

    Order. A reader believes what lies between two equal looks at a counter, so every store to a counter must become
    visible after all stores before it and before all stores after it. Counters and headers lie in plain host memory,
    also where the tensors lie on a device, and the CPU alone writes them (`counters`). A counter is odd before anything
    is launched that changes what it stands for, and even after the device has done it: CUDA documents that order for
    what the host submits and waits for, and for nothing else. So an even counter may come late, by a thread that
    waits for the device (`settle_next`); where nothing is queued it comes at once.

    Order of calls for the step from v to v + 1, once nothing can prevent it any more: `publish(v + 1, ...)` with
    gradients that are reduced and not yet clipped, `stepping(v)`, the step with whatever moves state (settling lazily
    made moments too), `stepped(v + 1)`.
    """

    def __init__(self, gradients: AnyRegion, depth: int, *, version: int) -> None:
        """Touches all its memory at once, so that no step pays for it. `version` is where the source stands. A slot has
        the elements and dtypes of `gradients`, and lies on their device.

        Raises ValueError for a depth below 1, RuntimeError on a CPU that does not keep stores in order.
        """
        if depth < 1:
            raise ValueError(f"depth of the ring is {depth}, at least 1")
        like = as_region(gradients)
        device = like.device
        self.region_numel = like.numel
        self.depth = depth
        self.version = version
        self.standing: Event = mark(device)
        """When the device has made the state of `version`."""
        self.device = device
        self._counter = HostCounters(1, 2 * version)
        self._slots = HostCounters(depth, NEVER)
        self._headers = host_zeros(depth * HEADER_BYTES, torch.uint8)
        self._header_bytes = self._headers.numpy()
        self._rings = tuple(like.zeros_like() for _ in range(depth))
        self._late: deque[_Late] = deque()
        self._lock = threading.Lock()
        settle(DeviceWait.RING_MADE, device)

    @property
    def small(self) -> dict[str, torch.Tensor]:
        """Counters and headers, in host memory."""
        return {COUNTER: self._counter.memory, SLOTS: self._slots.memory, HEADERS: self._headers}

    @property
    def slots(self) -> dict[str, Region]:
        """The gradients of each slot."""
        return {ring_kind(slot): region for slot, region in enumerate(self._rings)}

    @property
    def regions(self) -> dict[str, Region]:
        """Everything to be registered as a source, by kind."""
        return {kind: as_region(memory) for kind, memory in self.small.items()} | self.slots

    @property
    def bytes(self) -> int:
        """Bytes of all regions."""
        return sum(region.bytes for region in self.regions.values())

    def publish(self, gradients: AnyRegion, header: StepHeader) -> None:
        """Put the gradient of the step to `header.version` into its slot, as it is: reduced and not yet clipped.

        A reader still in the slot's former content finds out by the slot's counter. Only for a step that will be
        applied here: a target replays what it finds. Raises ValueError for a version that is not the next one or
        a region of another size, and HeaderError for a header that does not fit.
        """
        if header.version != self.version + 1:
            raise ValueError(f"header of version {header.version}, expected {self.version + 1}")
        whole = as_region(gradients)
        if whole.numel != self.region_numel:
            raise ValueError(f"gradients have {whole.numel} elements, the ring has {self.region_numel}")
        slot = slot_of(header.version, self.depth)
        encoded = header.encode()
        self._settle_until(self._slots, slot)
        self._slots.put(slot, 2 * header.version - 1)
        self._rings[slot].copy_(whole, non_blocking=True)
        self._header_bytes[slot * HEADER_BYTES : (slot + 1) * HEADER_BYTES] = np.frombuffer(encoded, dtype=np.uint8)
        self._put_late(DeviceWait.SLOT_FILLED, mark(self.device), self._slots, slot, 2 * header.version)

    def stepping(self, version: int) -> None:
        """The step from `version` begins: from here on the live regions change. Nothing of it is launched yet."""
        if version != self.version:
            raise ValueError(f"steps from version {version}, but stands at {self.version}")
        self._settle_until(self._counter, 0)
        self._counter.put(0, 2 * version + 1)

    def stepped(self, version: int) -> None:
        """The step to `version` is over, also when it was skipped: once the device has done what was launched for it,
        the live regions stand."""
        if version != self.version + 1:
            raise ValueError(f"stepped to version {version} from {self.version}")
        self.version = version
        self.standing = mark(self.device)
        self._put_late(DeviceWait.STEP_APPLIED, self.standing, self._counter, 0, 2 * version)

    @property
    def is_due(self) -> bool:
        """Whether a counter is still to be written, once the device has got there."""
        return bool(self._late)

    def settle_next(self) -> bool:
        """Wait for the device and write the counter that is due next. False if none is. For any thread."""
        with self._lock:
            late = self._late[0] if self._late else None
        if late is None:
            return False
        await_event(late.why, self.device, late.event)
        self._write_if_first(late)
        return True

    def _put_late(self, why: DeviceWait, event: Event, counters: HostCounters, at: int, value: int) -> None:
        late = _Late(why, event, counters, at, value)
        with self._lock:
            self._late.append(late)
        if is_host(self.device):
            self._write_if_first(late)

    def _settle_until(self, counters: HostCounters, at: int) -> None:
        """What is odd was even before, and nobody may have seen it skipped: who writes the next number waits."""
        while any(late.counters is counters and late.at == at for late in tuple(self._late)):
            self.settle_next()

    def _write_if_first(self, late: _Late) -> None:
        """Two threads may have waited for the same event: one of them writes."""
        with self._lock:
            if self._late and self._late[0] is late:
                late.counters.put(late.at, late.value)
                self._late.popleft()

    def slot_sum(self, version: int, plan: CertificatePlan) -> int | None:
        """Position-keyed hash of the gradient of the step to `version`, summed over parameters modulo 2^64.

        None when the slot does not hold it, or was overwritten meanwhile. For any thread but the main one: it takes as
        long as hashing a region does. `plan` is the one of the source's regions, the kind hashed is "grad".
        """
        slot = slot_of(version, self.depth)
        if self._slots[slot] == 2 * version - 1:
            self._settle_until(self._slots, slot)
        if self._slots[slot] != 2 * version:
            return None
        sums = plan.sums(self._rings[slot], "grad")
        if self._slots[slot] != 2 * version:
            return None
        return sum(int(part) for part in sums) & MASK


@dataclass(frozen=True, slots=True, eq=False)
class _Late:
    """A counter that becomes `value` once `event` has passed."""

    why: DeviceWait
    event: Event
    counters: HostCounters
    at: int
    value: int
