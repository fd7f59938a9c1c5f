"""The source's side of streaming: its counter, and a ring of the last steps' gradients with headers and own counters.

The source's main thread writes at each step and never waits for a reader, reads nothing back and synchronises nothing.
Not here: who reads (`target`), and what a header holds (`header`).
"""

from __future__ import annotations

import platform
from collections.abc import Sequence

import torch

from liver_core.certificate import MASK, CertificatePlan
from liver_core.streaming.header import HEADER_BYTES, StepHeader

COUNTER = "counter"
SLOTS = "slots"
HEADERS = "headers"
NEVER = -1
"""A slot's counter before its first use."""

_ORDERED_STORES = ("x86_64", "AMD64", "i686")


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
    headers uint8[depth * HEADER_BYTES]. ring0 .. ring{depth-1} float32[region_numel].

    Order. A reader believes what lies between two equal looks at a counter, so every store to a counter must become
    visible after all stores before it and before all stores after it. On a CPU all stores are plain ones of the calling
    thread (a torch kernel that works with several threads joins them before it returns, and memcpy ends streaming
    stores with a fence), and x86 makes stores visible in program order; other CPUs do not, and are refused. On CUDA
    counters lie on the device beside the tensors and every store is an operation on the current stream, which must be
    the stream of the optimizer step: the stream is the order, and nothing synchronises with the host. One-sided
    readers of device memory over RDMA need GPUDirect's ordering besides; this has not been run on a GPU.

    Order of calls for the step from v to v + 1, once nothing can prevent it any more: `publish(v + 1, ...)` with
    gradients that are reduced and not yet clipped, `stepping(v)`, the step with whatever moves state (settling lazily
    made moments too), `stepped(v + 1)`.
    """

    def __init__(self, region_numel: int, depth: int, *, version: int, device: torch.device) -> None:
        """Touches all its memory at once, so that no step pays for it. `version` is where the source stands.

        Raises ValueError for a depth below 1, RuntimeError on a CPU that does not keep stores in order.
        """
        if depth < 1:
            raise ValueError(f"depth of the ring is {depth}, at least 1")
        if device.type == "cpu" and platform.machine() not in _ORDERED_STORES:
            raise RuntimeError(
                f"streaming from host memory needs stores in order (x86-64), this is {platform.machine()}"
            )
        self.region_numel = region_numel
        self.depth = depth
        self.version = version
        self._counter = torch.full((1,), 2 * version, dtype=torch.int64, device=device)
        self._slots = torch.full((depth,), NEVER, dtype=torch.int64, device=device)
        self._headers = torch.zeros(depth * HEADER_BYTES, dtype=torch.uint8, device=device)
        self._rings = tuple(torch.zeros(region_numel, dtype=torch.float32, device=device) for _ in range(depth))

    @property
    def regions(self) -> dict[str, torch.Tensor]:
        """Everything to be registered as a source, by kind."""
        rings = {ring_kind(slot): tensor for slot, tensor in enumerate(self._rings)}
        return {COUNTER: self._counter, SLOTS: self._slots, HEADERS: self._headers, **rings}

    @property
    def bytes(self) -> int:
        """Bytes of all regions."""
        return sum(tensor.numel() * tensor.element_size() for tensor in self.regions.values())

    def publish(self, gradients: Sequence[torch.Tensor], header: StepHeader) -> None:
        """Put the gradient of the step to `header.version` into its slot. `gradients` are flat fp32 parts; laid end to
        end they are the region.

        A reader still in the slot's former content finds out by the slot's counter. Only for a step that will be
        applied here: a target replays what it finds. Raises ValueError for a version that is not the next one or
        a region of another size, and HeaderError for a header that does not fit.
        """
        if header.version != self.version + 1:
            raise ValueError(f"header of version {header.version}, expected {self.version + 1}")
        sizes = [part.numel() for part in gradients]
        if sum(sizes) != self.region_numel:
            raise ValueError(f"gradients have {sum(sizes)} elements, the ring has {self.region_numel}")
        slot = slot_of(header.version, self.depth)
        encoded = torch.frombuffer(bytearray(header.encode()), dtype=torch.uint8)
        with torch.no_grad():
            self._slots[slot].fill_(2 * header.version - 1)
            for window, part in zip(self._rings[slot].split(sizes), gradients, strict=True):
                window.copy_(part)
            self._headers[slot * HEADER_BYTES : (slot + 1) * HEADER_BYTES].copy_(_staged(encoded, self._headers))
            self._slots[slot].fill_(2 * header.version)

    def stepping(self, version: int) -> None:
        """The step from `version` begins: from here on the live regions change."""
        if version != self.version:
            raise ValueError(f"steps from version {version}, but stands at {self.version}")
        with torch.no_grad():
            self._counter.fill_(2 * version + 1)

    def stepped(self, version: int) -> None:
        """The step to `version` is over, also when it was skipped: the live regions stand."""
        if version != self.version + 1:
            raise ValueError(f"stepped to version {version} from {self.version}")
        self.version = version
        with torch.no_grad():
            self._counter.fill_(2 * version)

    def slot_sum(self, version: int, plan: CertificatePlan) -> int | None:
        """Position-keyed hash of the gradient of the step to `version`, summed over parameters modulo 2^64.

        None when the slot does not hold it, or was overwritten meanwhile. For any thread but the main one: it takes as
        long as hashing a region does. `plan` is the one of the source's regions, the kind hashed is "grad".
        """
        slot = slot_of(version, self.depth)
        if int(self._slots[slot]) != 2 * version:
            return None
        sums = plan.sums(self._rings[slot], "grad")
        if int(self._slots[slot]) != 2 * version:
            return None
        return sum(int(part) for part in sums) & MASK


def _staged(encoded: torch.Tensor, beside: torch.Tensor) -> torch.Tensor:
    """Bytes on the way to `beside`. To a device a pageable source is staged by the driver before the copy returns."""
    return encoded if beside.device.type == "cpu" else encoded.to(beside.device)
