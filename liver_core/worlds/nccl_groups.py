"""The NCCL communicators of one world: made at a quiet moment, one and the rest split from it, aborted from any thread.

Preparing makes torch's backends, which start nothing. Making communicators waits for the device, and with another
world's collectives in flight that can be for ever (NCCL issues 195, 623), so `connect` has a boundary of its own.
Written after torch 2.13 (ProcessGroupNCCL) and NCCL 2.30; tested against a model of both, not run on a GPU.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from liver_core.device.rank_device import own_device, own_gpu
from liver_core.worlds.group_plan import GroupPlan, Ranks


class NcclMoved(RuntimeError):
    """The installed torch lacks a name of NCCL's that we rely on."""


class NcclLibrary(Protocol):
    """What of torch is used: its backend class and the options of one."""

    def options(self) -> Any: ...
    def backend(self, store: dist.Store, rank: int, size: int, options: Any) -> Any: ...


class TorchNccl:
    """Torch's own. Raises NcclMoved where this torch was built without NCCL or has other names."""

    def options(self) -> Any:
        """Fresh options of one backend."""
        found: Any = getattr(c10d, "ProcessGroupNCCL", None)
        if found is None:
            raise NcclMoved(f"torch {torch.__version__} was built without NCCL, which a GPU for each rank needs")
        options = found.Options()
        if not hasattr(options.config, "split_share"):
            raise NcclMoved(f"torch {torch.__version__}: ProcessGroupNCCL.Options.config lacks split_share")
        return options

    def backend(self, store: dist.Store, rank: int, size: int, options: Any) -> Any:
        """Starts its watchdog thread, and no communicator."""
        return c10d.ProcessGroupNCCL(store, rank, size, options)


@dataclass(frozen=True, slots=True)
class TrainsOn:
    """Where a rank trains. `gpu`: a name that no other GPU of any machine has; empty on the CPU."""

    gpu: str
    device: torch.device
    library: NcclLibrary


def own_place() -> TrainsOn:
    """Where this process trains."""
    return TrainsOn(own_gpu(), own_device(), TorchNccl())


class NcclGroups:
    """One rank's part of a world's communicators. `timeout_s`: of a collective."""

    def __init__(self, plan: GroupPlan, rank: int, place: TrainsOn, *, timeout_s: float) -> None:
        self._plan = plan
        self._rank = rank
        self._device = place.device
        self._library = place.library
        self._timeout = timedelta(seconds=timeout_s)
        self._backends: dict[Ranks, Any] = {}
        self._guard = threading.Lock()
        self._connected = self._aborted = False

    def make(self, store: dist.Store, ranks: Ranks, name: str) -> Any:
        """The backend of one group, the world's before all others. Starts no communicator."""
        options = self._library.options()
        # Of the communicator that others are split from: they get its channels and buffers instead of their own.
        options.config.split_share = 1
        # A blocking call returns when the communicator can be used, and not before.
        options.config.blocking = 1
        options._timeout = self._timeout
        options.global_ranks_in_group = list(ranks)
        options.group_name = name
        if ranks != self._plan.world:
            options.split_from = self._backends[self._plan.world]
            # Torch 2.6 refuses colour 0. Groups of one split share no rank, so their first ranks tell them apart.
            options.split_color = ranks[0] + 1
        backend = self._library.backend(store, ranks.index(self._rank), len(ranks), options)
        self._backends[ranks] = backend
        return backend

    def connect(self) -> None:
        """Make all communicators. Every rank of the world calls it at the same time, in its main thread, while nothing
        else is queued on its device. Raises RuntimeError if a peer is gone, or once the groups are aborted."""
        with self._guard:
            if self._connected:
                return
            if self._aborted:
                raise RuntimeError("the communicators of this world were aborted before they were made")
        whole = self._backends[self._plan.world]
        whole.eager_connect_single_device(self._device)
        for split in self._plan.splits:
            mine = next((ranks for ranks in split if self._rank in ranks), None)
            if mine is None:
                whole.perform_nocolor_split(self._device)
            else:
                self._backends[mine].eager_connect_single_device(self._device)
        with self._guard:
            self._connected = True

    def abort(self) -> None:
        """A peer is dead: end what this rank waits for on the device. From any thread, once and for all.

        The other groups before the world's, whose resources they use.
        """
        with self._guard:
            if self._aborted:
                return
            self._aborted = True
            found = list(self._backends.values())
        for backend in reversed(found):
            backend.abort()
