"""Where each part of a next world's state waits for the cutover: on the device, or in host memory. Pure.

The device comes first, for what a replayed step touches most. Both memories have a hard budget, worked out from the
manifest and the layout before anything is built.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product

from liver_core.layout import Manifest, ParallelLayout
from liver_core.layout.manifest import DTYPE_BYTES, FLOAT32, GRAD
from liver_core.layout.shards import stage_buckets
from liver_core.memory.memory_budget import BYTES_PER_ELEMENT, TILE_ELEMENTS_LEAST, replay_bytes

MASTER, WEIGHTS = "master", "weights"


class PlacementRefused(MemoryError):
    """The next world fits in no way; the text says which budget it is, what is needed and what there is."""


@dataclass(frozen=True, slots=True)
class Area:
    """One allocation of a world on the device, and the kinds of regions that lie in it.

    `host_bytes` is what it takes in host memory while it has none on the device: its regions only. Weights alone
    take nothing there, since they are made of the masters. `is_cast`: its kinds are not fp32, so that a replayed window
    of them is made fp32 beside it.
    """

    name: str
    device_bytes: int
    host_bytes: int
    kinds: tuple[str, ...] = ()
    is_cast: bool = False


@dataclass(frozen=True, slots=True)
class Streaming:
    """The least that streaming takes on the device: a ring of `ring_bytes`, and tiles of so many elements."""

    ring_bytes: int
    tile_elements: int


@dataclass(frozen=True, slots=True)
class Room:
    """What a rank may take. `device_bytes_max`: more than it holds now, None without a limit. `held_bytes`: what the
    present world holds on this device and gives up at the cutover. `stream`: what streaming takes at least.
    `cast_bytes`: what the next world's first step takes more than one of the present world for copies of its gradients.
    """

    device_bytes_max: int | None
    host_bytes_max: int = 0
    held_bytes: int = 0
    stream: Streaming | None = None
    cast_bytes: int = 0


@dataclass(frozen=True, slots=True)
class MemoryPlacement:
    """`on_host` waits in host memory, `on_device` does not wait."""

    on_device: tuple[Area, ...]
    on_host: tuple[Area, ...]

    @property
    def device_bytes(self) -> int:
        """On the device until the cutover."""
        return sum(area.device_bytes for area in self.on_device)

    @property
    def host_bytes(self) -> int:
        """In host memory until the cutover."""
        return sum(area.host_bytes for area in self.on_host)

    @property
    def world_bytes(self) -> int:
        """On the device from the cutover on."""
        return self.device_bytes + sum(area.device_bytes for area in self.on_host)

    @property
    def staged_kinds(self) -> int:
        """Kinds of which a replayed window is copied first: what waits in host memory, and what is not fp32."""
        cast = (area for area in self.on_device if area.is_cast)
        return sum(len(area.kinds) for area in (*self.on_host, *cast))


def areas(manifest: Manifest, layout: ParallelLayout, stage: int) -> tuple[Area, ...]:
    """What a rank of a pipeline stage allocates, most wanted on the device first.

    A replayed step reads and writes masters and moments, reads gradients once, and never touches weights. Sizes are
    what `megatron_optimizer.adopt` lays out: masters of fp32 parameters lie in the weights, and where there are such,
    those of others wait and move in with them.
    """
    buckets = stage_buckets(manifest, layout, stage)
    region = sum(bucket.shard_numel(layout) for bucket in buckets) * BYTES_PER_ELEMENT
    weights = sum(bucket.padded_numel * DTYPE_BYTES[bucket.buffer.param_dtype] for bucket in buckets)
    gradients = sum(bucket.padded_numel * DTYPE_BYTES[bucket.buffer.grad_dtype] for bucket in buckets)
    own = sum(bucket.shard_numel(layout) * DTYPE_BYTES[bucket.buffer.grad_dtype] for bucket in buckets)
    apart = [bucket for bucket in buckets if bucket.buffer.param_dtype != FLOAT32]
    masters = sum(bucket.shard_numel(layout) for bucket in apart) * BYTES_PER_ELEMENT
    moments = [Area(kind.name, region, region, (kind.name,)) for kind in manifest.kinds if kind.name not in _NO_MOMENTS]
    is_cast = any(bucket.buffer.grad_dtype != FLOAT32 for bucket in buckets)
    grad = Area(GRAD, gradients, own, (GRAD,), is_cast)
    if len(apart) < len(buckets):
        return (Area(WEIGHTS, weights + masters, region, (MASTER,)), *moments, grad)
    return (Area(MASTER, masters, masters, (MASTER,)), *moments, grad, Area(WEIGHTS, weights, 0))


_NO_MOMENTS = (MASTER, GRAD)


def cast_bytes(manifest: Manifest, layout: ParallelLayout, stage: int) -> int:
    """What a step takes on a rank of a stage for fp32 copies of those of its gradients that are not fp32."""
    cast = (each for each in stage_buckets(manifest, layout, stage) if each.buffer.grad_dtype != FLOAT32)
    return sum(bucket.shard_numel(layout) for bucket in cast) * BYTES_PER_ELEMENT


def world_bytes(manifest: Manifest, layout: ParallelLayout) -> int:
    """What the fullest rank of a world holds on its device."""
    stages = (areas(manifest, layout, stage) for stage in range(layout.pp))
    return max(sum(area.device_bytes for area in each) for each in stages)


def place(wanted: Sequence[Area], room: Room, rank: int) -> MemoryPlacement:
    """The placement with the most wanted areas on the device; `wanted` as `areas` gives it, `rank` for the text.

    Where streaming does not fit in any way it is left out of account: then the state is copied in the pause. Raises
    PlacementRefused where even that does not fit.
    """
    for streaming in dict.fromkeys((room.stream, None)):
        for candidate in _candidates(wanted):
            if _fits(candidate, room, streaming):
                return candidate
    raise PlacementRefused(_refusal(wanted, room, rank))


def least_streaming(ring_bytes: int, target_numel: int) -> Streaming:
    """A ring of `ring_bytes`, 0 on a rank that is no source, and the least tile."""
    return Streaming(ring_bytes, min(TILE_ELEMENTS_LEAST, target_numel))


def _candidates(wanted: Sequence[Area]) -> Iterator[MemoryPlacement]:
    """All of them, those first that have an earlier area on the device. There are a handful of kinds."""
    for on_device in product((True, False), repeat=len(wanted)):
        pairs = list(zip(wanted, on_device, strict=True))
        yield MemoryPlacement(tuple(area for area, on in pairs if on), tuple(area for area, on in pairs if not on))


def _fits(placement: MemoryPlacement, room: Room, streaming: Streaming | None) -> bool:
    on_device = room.device_bytes_max is None or _needed(placement, room, streaming) <= room.device_bytes_max
    return on_device and placement.host_bytes <= room.host_bytes_max


def _needed(placement: MemoryPlacement, room: Room, streaming: Streaming | None) -> int:
    """Most bytes on the device at any time, beside what the present world holds.

    The build of the world takes none. At the cutover the present world goes first, so that what is there is most when
    all has come.
    """
    waiting = placement.device_bytes
    ended = (placement.world_bytes - room.held_bytes if placement.on_host else waiting) + room.cast_bytes
    if streaming is not None:
        waiting += streaming.ring_bytes + replay_bytes(streaming.tile_elements, placement.staged_kinds)
    return max(waiting, ended)


def _refusal(wanted: Sequence[Area], room: Room, rank: int) -> str:
    whole = next(_candidates(wanted))
    if not room.host_bytes_max:
        return (
            f"extra_bytes_max: the next world needs {whole.device_bytes} bytes on rank {rank}, "
            f"budget is {room.device_bytes_max}"
        )
    assert room.device_bytes_max is not None, "without a limit everything fits on the device"
    needs = [(_needed(candidate, room, None), candidate.host_bytes) for candidate in _candidates(wanted)]
    least = min(device for device, _ in needs)
    if least > room.device_bytes_max:
        return (
            f"extra_bytes_max: the next world needs {least} bytes on the device of rank {rank} even with the rest in "
            f"host memory, budget is {room.device_bytes_max}"
        )
    least = min(host for device, host in needs if device <= room.device_bytes_max)
    return (
        f"host_bytes_max: the next world needs {least} bytes of host memory on rank {rank} beside "
        f"{room.device_bytes_max} on the device, budget is {room.host_bytes_max}"
    )
