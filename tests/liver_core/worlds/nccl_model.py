"""NCCL and torch's backend of it, as far as groups are made: a model over gloo that refuses what would hang or be
wrong.

A communicator is made by all its ranks together; a split is one call of all ranks of its parent, and those of one
colour get one communicator, in the order of their ranks. Whoever calls something else, or in another order, raises.
"""

from __future__ import annotations

import threading
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

_Gloo: Any = c10d.ProcessGroupGloo
NOBODY = -1
"""The colour of a rank that is in no part of a split."""


class ModelNccl:
    """A library that keeps what it made. `made`: (name of the group, ranks, how its communicator was made), in order.
    `looks`: called each time that NCCL would touch the device. `fails`: why it cannot, once it cannot."""

    def __init__(self, looks: Any = lambda: None) -> None:
        self.made: list[tuple[str, tuple[int, ...], str]] = []
        self.backends: list[ModelBackend] = []
        self.aborted: list[str] = []
        self.looks = looks
        self.fails = ""

    def options(self) -> Any:
        config = SimpleNamespace(split_share=None, blocking=None)
        return SimpleNamespace(config=config, split_from=None, split_color=None)

    def backend(self, store: dist.Store, rank: int, size: int, options: Any) -> Any:
        backend = ModelBackend(store, rank, size, options, self)
        self.backends.append(backend)
        return backend


class ModelBackend(_Gloo):
    """`has_communicator`: whether it was made. Collectives before that raise."""

    def __init__(self, store: dist.Store, rank: int, size: int, asked: Any, library: ModelNccl) -> None:
        from liver_core.worlds.groups import gloo_options

        super().__init__(store, rank, size, gloo_options("127.0.0.1", timedelta(seconds=20)))
        self.asked, self.library = asked, library
        self.has_communicator = False
        self.ended = threading.Event()

    def collective(self) -> None:
        """One that a rank never joins: it comes back when the communicator is aborted, and not before."""
        assert self.has_communicator
        self.ended.wait()
        raise RuntimeError("NCCL communicator was aborted on rank 1.")

    def eager_connect_single_device(self, device: Any) -> None:
        assert not self.has_communicator, "made twice"
        if self.library.fails:
            raise RuntimeError(self.library.fails)
        self.library.looks()
        parent = self.asked.split_from
        if parent is None:
            self._agree(("world", NOBODY))
            how = "world"
        else:
            parent.split(self.asked.split_color, self.asked.global_ranks_in_group)
            how = "split"
            assert parent.asked.config.split_share == 1, "a communicator with buffers of its own"
        self.has_communicator = True
        self.library.made.append((self.asked.group_name, tuple(self.asked.global_ranks_in_group), how))

    def perform_nocolor_split(self, device: Any) -> None:
        self.split(NOBODY, [])

    def split(self, color: int, ranks: list[int]) -> None:
        """As a parent: one call of all its ranks."""
        assert self.has_communicator, "split from a communicator that is not there"
        by_rank = self._agree(("split", color))
        mine = [at for at, (_, each) in enumerate(by_rank) if each == color]
        assert color == NOBODY or mine == ranks, f"colour {color} is that of ranks {mine}, the group is {ranks}"

    def abort(self) -> None:
        self.ended.set()
        self.library.aborted.append(self.asked.group_name)

    def _agree(self, call: tuple[str, int]) -> list[tuple[str, int]]:
        """What each rank calls at this point. All must call the same, or NCCL would wait for ever."""
        code = torch.tensor([["world", "split"].index(call[0]), call[1]], dtype=torch.int64)
        codes = [torch.zeros_like(code) for _ in range(self.size())]
        self.allgather([codes], [code]).wait()
        calls = [(("world", "split")[int(kind)], int(color)) for kind, color in (each.tolist() for each in codes)]
        assert {kind for kind, _ in calls} == {call[0]}, calls
        return calls
