"""The NCCL communicators of one world: made at a quiet moment, one and the rest split from it, aborted from any thread.

Preparing makes torch's backends, which start nothing. Making communicators waits for the device, and with another
world's collectives in flight that can be for ever (NCCL issues 195, 623), so `connect` has a boundary of its own.
Written after torch 2.13 (ProcessGroupNCCL) and NCCL 2.30; tested against a model of both, not run on a GPU.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from liver_core.device.rank_device import own_device, own_gpu
from liver_core.device.threads import background
from liver_core.worlds.group_plan import GroupPlan, Ranks

CONNECT_S = 20.0
"""How long making the communicators of a world may take. Training stands meanwhile, and a rank that stands for much
longer counts as hanging."""
_log = logging.getLogger(__name__)
_ABORT_S = 30.0
"""How long whoever frees a world waits for an abort that another thread has begun."""


class NcclMoved(RuntimeError):
    """The installed torch lacks a name of NCCL's that we rely on."""


class CommunicatorsEnded(RuntimeError):
    """The communicators of a world were aborted, or not made in time; the text says why."""


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
        self._changed = threading.Condition()
        self._connected = False
        self._problem: BaseException | None = None
        self._ended = ""
        self._aborted = threading.Event()

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

    def connect(self, limit_s: float, *, since: float) -> None:
        """Make all communicators. Every rank of the world calls it at the same time, while nothing else is queued on
        its device; the calling thread waits.

        Raises CommunicatorsEnded once they are aborted, or `limit_s` seconds after `since` (time.monotonic seconds),
        and RuntimeError of NCCL. NCCL offers no way to end a call that makes one, so it runs in a thread of its own.
        Where it does not come back, that thread and what it holds are left to it.
        """
        with self._changed:
            if self._connected:
                return
            if self._ended:
                raise CommunicatorsEnded(
                    f"the communicators of this world were aborted before they were made: {self._ended}"
                )
        background(self._make_all, name="communicators").start()
        with self._changed:
            self._changed.wait_for(
                lambda: self._connected or self._problem is not None or self._ended != "",
                since + limit_s - time.monotonic(),
            )
            ended, problem, connected = self._ended, self._problem, self._connected
        if ended:
            raise CommunicatorsEnded(ended)
        if problem is not None:
            raise problem
        if not connected:
            late = f"not made within the limit of {limit_s:g} s after this rank began (connect_s)"
            self.abandon(late)
            raise CommunicatorsEnded(late)

    def abandon(self, why: str) -> None:
        """`abort` without waiting for it: NCCL may take long, and the calling thread has more to do."""
        if self._end(why):
            background(self._abort_all, name="abort-communicators").start()

    def abort(self, why: str = "this world is over") -> None:
        """End what this rank waits for on the device. From any thread, once and for all."""
        if self._end(why):
            self._abort_all()
        self._aborted.wait(_ABORT_S)

    def _end(self, why: str) -> bool:
        """Whether this is the first reason to end them."""
        with self._changed:
            first = not self._ended
            self._ended = self._ended or why
            self._changed.notify_all()
            return first

    def _abort_all(self) -> None:
        """The other groups before the world's, whose resources they use. One that fails keeps none of them waiting."""
        for ranks, backend in reversed(list(self._backends.items())):
            try:
                backend.abort()
            except Exception:
                _log.exception("the communicator of ranks %s cannot be aborted", ranks)
        self._aborted.set()

    def _make_all(self) -> None:
        problem: BaseException | None = None
        try:
            for make in self._makings():
                if self._ended:
                    break
                make()
        except Exception as error:
            problem = error
        with self._changed:
            self._problem, self._connected = problem, problem is None and not self._ended
            late = self._ended != ""
            self._changed.notify_all()
        if late:
            self._abort_all()  # What was made since the first abort.

    def _makings(self) -> list[Callable[[], Any]]:
        whole = self._backends[self._plan.world]
        makings = [partial(whole.eager_connect_single_device, self._device)]
        for split in self._plan.splits:
            mine = next((ranks for ranks in split if self._rank in ranks), None)
            if mine is None:
                makings.append(partial(whole.perform_nocolor_split, self._device))
            else:
                makings.append(partial(self._backends[mine].eager_connect_single_device, self._device))
        return makings
