"""One rank's state in one world as regions over Megatron's own tensors, and their memory."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

from liver_core.device import DeviceWait, settle, settle_all
from liver_core.device.region import Region
from liver_core.layout import Manifest, ParallelLayout, RankShards, ResidentBox, resident_boxes
from liver_core.memory.memory_placement import GRAD, MASTER
from liver_core.state.optimizer_chain import OptimizerChain
from liver_core.state.step_tensors import StepTensors
from liver_core.worlds.released_storage import discard, restore, storage_is_released


class OwnedParameter(NamedTuple):
    """One of the optimizer's own parameters: its slice of the regions, and which optimizer of the chain steps it."""

    main: torch.nn.Parameter
    window: slice
    part: DistributedOptimizer

    @property
    def kept(self) -> dict[str, Any]:
        """What the optimizer keeps of it: moments and counts. Made where it never stepped."""
        return self.part.optimizer.state[self.main]


@dataclass(slots=True)
class LiveState:
    """One rank's state in one world as regions, by kind. All regions have the same elements.

    `regions[kind]` has `shards.region_numel` elements and shares memory with Megatron's own tensors. Kinds are
    "master", "grad" and the optimizer's moments, named as its class names them. Gradients lie where Megatron reduces
    them, in as many pieces as there are buckets. `owned`: the optimizer's own parameters.

    Before the cutover a region may wait in host memory (`liver_core.state.host_memory`). Then `homes[kind]` is what it
    is on the device, and `hollow` lists the tensors on the device that have no memory yet.

    `kept_bytes`: of the world before, which is freed. Torch keeps them for whoever asks next, so a driver does not call
    them free. `step_tensors`: what a step changes beside parameters.
    """

    manifest: Manifest
    shards: RankShards
    optimizer: OptimizerChain
    model: Any
    regions: dict[str, Region]
    rank: int
    layout: ParallelLayout
    owned: tuple[OwnedParameter, ...] = ()
    settled: bool = False
    homes: dict[str, Region] = field(default_factory=dict)
    hollow: tuple[torch.Tensor, ...] = ()
    kept_bytes: int = 0
    step_tensors: StepTensors = field(default_factory=StepTensors)

    def resident(self) -> tuple[ResidentBox, ...]:
        """What the regions hold, in global coordinates."""
        return resident_boxes(self.manifest, self.layout, self.rank)

    def buffers(self) -> tuple[torch.Tensor, ...]:
        """Megatron's flat buffers of parameters and gradients."""
        both = ((buffer.param_data, buffer.grad_data) for buffer in self.optimizer.buffers)
        return tuple(tensor for pair in both for tensor in pair if tensor is not None)

    @property
    def moments(self) -> tuple[str, ...]:
        return tuple(kind.name for kind in self.manifest.kinds if kind.name not in (MASTER, GRAD))

    @property
    def device(self) -> torch.device:
        """Where the world trains."""
        return self.regions[GRAD].device if GRAD not in self.homes else self.homes[GRAD].device

    @property
    def device_bytes(self) -> int:
        """Bytes of parameter and gradient buffers, masters and moments on the device, allocated or not yet."""
        whole = self.buffers()
        spans = {tensor.untyped_storage()._cdata for tensor in whole}
        tensors = [tensor for region in (self.regions | self.homes).values() for tensor in region.tensors]
        apart = [tensor for tensor in tensors if tensor.untyped_storage()._cdata not in spans]
        return sum(tensor.numel() * tensor.element_size() for tensor in (*whole, *apart))


def state_kinds(manifest: Manifest) -> tuple[str, ...]:
    """Masters and moments in the manifest's order: all kinds that outlive a step."""
    return tuple(kind.name for kind in manifest.kinds if kind.name != GRAD)


def allocate(live: LiveState) -> int:
    """Allocate released regions and Megatron's parameter and gradient buffers, zeroed. Returns bytes.

    Writes to all of it once, also to what a gather or a backward pass fills later, so that no page faults occur in the
    pause. `hollow` tensors stay without memory.
    """
    waits = {tensor.untyped_storage()._cdata for tensor in live.hollow}
    here = [tensor for kind, region in live.regions.items() if kind not in live.homes for tensor in region.tensors]
    wanted = [tensor for tensor in (*live.buffers(), *here) if tensor.untyped_storage()._cdata not in waits]
    hollow = [tensor for tensor in live.step_tensors.tensors if storage_is_released(tensor)]
    wanted += hollow
    allocated = restore(wanted)
    with torch.no_grad():
        for tensor in wanted:
            tensor.zero_()
    settle(DeviceWait.ALLOCATED, live.device)
    return allocated


def free(live: LiveState) -> int:
    """Free the memory of a world's parameters, gradients, masters and moments. Returns bytes.

    Megatron's modules, hooks and optimizer form reference cycles. Without this call they would keep the memory until
    Python's garbage collector runs. The world must not be used afterwards.
    """
    settle_all(DeviceWait.FREED, live.device)
    return discard((*live.buffers(), *(tensor for region in live.regions.values() for tensor in region.tensors)))
