"""One rank's state in one world, as flat regions over Megatron's own tensors, and the memory that they take."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

from liver_core.layout import Manifest, ParallelLayout, RankShards, ResidentBox, resident_boxes
from liver_core.streaming.memory_placement import GRAD, MASTER
from liver_core.worlds.released import discard, restore


@dataclass(slots=True)
class LiveState:
    """One rank's state in one world as flat fp32 regions, by kind; every region has the same offsets.

    `regions[kind]` has `shards.region_numel` elements and shares memory with Megatron's own tensors. Kinds are
    "master", "grad" and the optimizer's moments under the names its own class gives them. `gradients` is where Megatron
    keeps the reduced gradients, bucket after bucket; `collected` while they lie in the region "grad" instead.
    `windows`: each of the optimizer's own parameters, and where in the regions it lies.

    In a world that waits, a region may lie in host memory (`liver_core.state.host_memory`): then `homes[kind]` is the
    tensor on the device that it belongs in, and `hollow` are the device's allocations that have no memory yet.
    """

    manifest: Manifest
    shards: RankShards
    optimizer: DistributedOptimizer
    model: Any
    regions: dict[str, torch.Tensor]
    rank: int
    layout: ParallelLayout
    gradients: tuple[torch.Tensor, ...] = ()
    windows: tuple[tuple[torch.nn.Parameter, slice], ...] = ()
    settled: bool = False
    collected: bool = False
    homes: dict[str, torch.Tensor] = field(default_factory=dict)
    hollow: tuple[torch.Tensor, ...] = ()

    def resident(self) -> tuple[ResidentBox, ...]:
        """What the regions hold, in global coordinates."""
        return resident_boxes(self.manifest, self.layout, self.rank)

    def buffers(self) -> tuple[torch.Tensor, ...]:
        """Megatron's flat buffers of parameters and gradients."""
        buffer = self.optimizer.buffers[0]
        return tuple(tensor for tensor in (buffer.param_data, buffer.grad_data) if tensor is not None)

    @property
    def moments(self) -> tuple[str, ...]:
        return tuple(kind.name for kind in self.manifest.kinds if kind.name not in (MASTER, GRAD))

    @property
    def device(self) -> torch.device:
        """Where the world trains."""
        return self.gradients[0].device

    @property
    def device_bytes(self) -> int:
        """Bytes of parameter and gradient buffers, masters and moments on the device, with memory or still without."""
        whole = self.buffers()
        spans = {tensor.untyped_storage()._cdata for tensor in whole}
        regions = (self.regions | self.homes).values()
        apart = [region for region in regions if region.untyped_storage()._cdata not in spans]
        return sum(tensor.numel() * tensor.element_size() for tensor in (*whole, *apart))


def state_kinds(manifest: Manifest) -> tuple[str, ...]:
    """Masters and moments, in the manifest's order: all that outlives a step."""
    return tuple(kind.name for kind in manifest.kinds if kind.name != GRAD)


def allocate(live: LiveState) -> int:
    """Give released regions and Megatron's parameter and gradient buffers their memory, zeroed. Returns bytes.

    All of it is written to once here, also what a gather or a backward pass fills later: no pause pays for page faults.
    What is `hollow` stays so.
    """
    waits = {tensor.untyped_storage()._cdata for tensor in live.hollow}
    here = [region for kind, region in live.regions.items() if kind not in live.homes]
    wanted = [tensor for tensor in (*live.buffers(), *here) if tensor.untyped_storage()._cdata not in waits]
    allocated = restore(wanted)
    with torch.no_grad():
        for tensor in wanted:
            tensor.zero_()
    return allocated


def free(live: LiveState) -> int:
    """Give the memory of a world's parameters, gradients, masters and moments back. Returns bytes.

    Explicitly, because Megatron's modules, hooks and optimizer refer to each other in circles: they would keep it
    until Python's collector happens to come by. The world must not be used afterwards.
    """
    return discard((*live.buffers(), *live.regions.values()))
