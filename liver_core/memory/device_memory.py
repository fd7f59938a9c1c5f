"""The device memory of a rank: in a layout, and in a handoff from one layout to another. Pure.

What `liver plan memory` shows, and what the planner of the service refuses layouts by. A rank counts by the same
placement, from the manifest of what it has built and from what its device says.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from liver_core.layout import ParallelLayout
from liver_core.memory.memory_budget import BYTES_PER_ELEMENT, DEPTH_LEAST, replay_bytes, ring_bytes
from liver_core.memory.memory_placement import (
    GRAD,
    WEIGHTS,
    Area,
    MemoryPlacement,
    PlacementRefused,
    Room,
    Streaming,
    areas,
    cast_bytes,
    least_streaming,
    place,
)
from liver_core.memory.overheads import DeviceOverheads
from liver_core.memory.transformer_shape import TransformerShape, activation_bytes, counted_in

HOST_BYTES_UNLIMITED = 2**60


@dataclass(frozen=True, slots=True)
class TrainingShape:
    """A model, and how a step cuts its batch. `activations`: measured bytes of them on one rank, instead of an
    estimate; None: estimate."""

    model: TransformerShape
    micro_batch: int
    global_batch: int
    activations: int | None = None


@dataclass(frozen=True, slots=True)
class RankMemory:
    """Bytes on the device of one rank that trains. `elements`: of its share of each kind of state. `own_gradients`: of
    the gradients in that share. `cast`: their copies in a step where they are not fp32; the activations are gone then.
    """

    stage: int
    weights: int
    gradients: int
    optimizer: int
    elements: int
    own_gradients: int
    activations: int
    cast: int
    context: int
    nccl: int

    @property
    def state(self) -> int:
        """What a handoff moves, or makes anew."""
        return self.weights + self.gradients + self.optimizer

    @property
    def total(self) -> int:
        """All of it."""
        return self.state + max(self.activations, self.cast) + self.context + self.nccl


@dataclass(frozen=True, slots=True)
class HandoffMemory:
    """Bytes of the fullest rank that trains while the next world is made beside it.

    `present`, `following`: the two worlds, each as it trains. `stream`: the least that streaming takes, None where
    there is no room for it: then the state is copied in the pause. `landing`: where reads land on their way to host
    memory. `relay`: its context. `choices`: what of the next world may wait on the device, most first; `waits`: what
    does, None where there is no room in any way, and `refusal` says why.
    """

    present: RankMemory
    following: RankMemory
    stream: Streaming | None
    certificate: int
    landing: int
    relay: int
    choices: tuple[MemoryPlacement, ...]
    waits: MemoryPlacement | None = None
    refusal: str = ""

    @property
    def ring(self) -> int:
        """The slots of gradients on the device."""
        return self.stream.ring_bytes if self.stream else 0

    def device_bytes(self, waits: MemoryPlacement) -> int:
        """The most on the device before the cutover, and after it, where so much waits there. The communicators of the
        world that trained are there for a while afterwards."""
        tiles = replay_bytes(self.stream.tile_elements, waits.staged_kinds) if self.stream else 0
        extra = self.following.nccl + self.ring + tiles + self.certificate + self.landing + self.relay
        return max(self.present.total + extra + waits.device_bytes, self.following.total + self.present.nccl)


@lru_cache(maxsize=16_384)
def rank_memory(training: TrainingShape, layout: ParallelLayout, overheads: DeviceOverheads) -> RankMemory:
    """Of the fullest rank. Raises LayoutError where the model does not fit the layout."""
    return max(_stages(training, layout, overheads), key=lambda memory: memory.total)


def _stages(training: TrainingShape, layout: ParallelLayout, overheads: DeviceOverheads) -> Iterator[RankMemory]:
    manifest = counted_in(training.model, layout)
    micro_batches = max(1, training.global_batch // (training.micro_batch * layout.dp))
    # What a stage between the first and the last holds the first holds too, beside the embedding. Where layers with
    # experts are not spread evenly, the first stage that has so many of them holds most.
    sparse = [training.model.sparse_layers(layout, stage) for stage in range(layout.pp)]
    for stage in sorted({layout.pp - 1, *map(sparse.index, sparse)}):
        held = {area.name: area for area in areas(manifest, layout, stage)}
        weights, gradients = held.pop(WEIGHTS).device_bytes, held.pop(GRAD)
        elements = held["exp_avg"].host_bytes // BYTES_PER_ELEMENT
        activations = training.activations
        if activations is None:
            activations = activation_bytes(
                training.model, layout, stage=stage, micro_batch=training.micro_batch, micro_batches=micro_batches
            )
        yield RankMemory(
            stage=stage,
            weights=weights,
            gradients=gradients.device_bytes,
            optimizer=sum(area.device_bytes for area in held.values()),
            elements=elements,
            own_gradients=gradients.host_bytes,
            activations=activations,
            cast=cast_bytes(manifest, layout, stage),
            context=overheads.context + overheads.workspaces,
            nccl=overheads.nccl(layout.world_size),
        )


def handoff_memory(
    training: TrainingShape,
    source: ParallelLayout,
    target: ParallelLayout,
    *,
    device_bytes: int,
    host_bytes: int = HOST_BYTES_UNLIMITED,
    overheads: DeviceOverheads | None = None,
) -> HandoffMemory:
    """Of a rank that is the fullest in both worlds, on a device of `device_bytes`.

    The next world is put on the device as far as there is room, the rest into `host_bytes` of host memory. Where
    streaming does not fit in any way its ring and tiles are left out: then the state is copied in the pause.
    """
    overheads = overheads or DeviceOverheads()
    present = rank_memory(training, source, overheads)
    following = rank_memory(training, target, overheads)
    wanted = areas(counted_in(training.model, target), target, following.stage)
    stream = least_streaming(ring_bytes(present.own_gradients, DEPTH_LEAST), following.elements)
    beside = (overheads.certificate, overheads.landing, overheads.relay)
    training_bytes = present.total + following.nccl + sum(beside)
    more = max(0, following.cast - present.cast)
    room = Room(device_bytes - training_bytes, host_bytes, held_bytes=present.state, stream=stream, cast_bytes=more)
    found = HandoffMemory(present, following, stream, *beside, in_turn(wanted))
    for layout, alone in ((source, training_bytes), (target, following.total + present.nccl)):
        if alone > device_bytes:
            return replace(found, refusal=f"{layout} alone needs {alone} bytes on a rank, a device has {device_bytes}")
    try:
        waits = place(wanted, room, 0)
    except PlacementRefused as refused:
        return replace(found, refusal=str(refused))
    streams = found.device_bytes(waits) <= device_bytes
    return replace(found, waits=waits, stream=stream if streams else None)


def in_turn(wanted: Sequence[Area]) -> tuple[MemoryPlacement, ...]:
    """All on the device; then without the least wanted of it, and so on."""
    return tuple(MemoryPlacement(tuple(wanted[:count]), tuple(wanted[count:])) for count in range(len(wanted), -1, -1))
