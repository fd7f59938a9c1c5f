"""Writes checkpoints of one rank in the background, while training goes on."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from liver_core.device.threads import background
from liver_core.layout import Roster
from liver_core.rank.active_world import ActiveWorld
from liver_core.state.checkpoint import error_text, prune, snapshot, write
from liver_core.state.checkpoint_files import ARGUMENTS, LeaseStanding

_log = logging.getLogger(__name__)
TELLERS = 3
"""So many nodes' agents are told of a checkpoint that is complete."""


@dataclass(frozen=True, slots=True)
class Writing:
    """One checkpoint on its way to its folder."""

    path: str
    step: int
    keep: int
    asked: int
    job_id: str
    generation: int
    group: dist.ProcessGroup
    began: float
    tellers: tuple[int, ...]


class CheckpointWriter:
    """Writes one checkpoint at a time in the background. Calls `done(path, step, seconds, asked)` on rank 0, and on the
    first ranks of a few other nodes: an agent that is stopped or cut off tells nobody, and a restart would begin at an
    older checkpoint, which may be removed by then."""

    def __init__(
        self,
        done: Callable[[str, int, float, int], None],
        failed: Callable[[str, str], None],
        standing: Callable[[], LeaseStanding],
    ) -> None:
        """`standing`: of this rank, as of now."""
        self._done = done
        self._failed = failed
        self._standing = standing
        self._thread: threading.Thread | None = None

    def start(
        self,
        active: ActiveWorld,
        small: dict[str, Any],
        arguments: dict[str, Any],
        path: str,
        *,
        keep: int,
        asked: int = 0,
    ) -> None:
        """Take a snapshot now (collective, main thread) and write it in the background. Waits for a write in progress.

        `arguments`: see `megatron_arguments`.

        Once this checkpoint is complete, rank 0 removes all but the newest `keep` complete siblings named step-N.
        `asked`: the number of the request that it answers, 0 without one.
        """
        self.close()
        world = active.world
        made = (world.roster.job_id, world.generation, world.background, time.monotonic(), tellers(world.roster))
        writing = Writing(path, int(small["step"]), keep, asked, *made)
        sharded = {**snapshot(active.world, active.state), ARGUMENTS: arguments}
        self._thread = background(self._write, args=(sharded, small, writing), name="checkpoint")
        self._thread.start()

    def _write(self, sharded: dict[str, Any], small: dict[str, Any], writing: Writing) -> None:
        rank = writing.group.rank()
        try:
            made = {"job_id": writing.job_id, "generation": writing.generation, "standing": self._standing}
            write(sharded, small, writing.path, writing.group, **made)
            if rank in writing.tellers:
                self._done(writing.path, writing.step, time.monotonic() - writing.began, writing.asked)
            if rank == 0 and (left := prune(Path(writing.path), writing.keep, generation=writing.generation)):
                _log.warning("old checkpoints still take space, they could not be removed: %s", "; ".join(left[:3]))
        except (Exception, CheckpointException) as error:
            # Training goes on without this checkpoint. The user gets the reason.
            self._failed(writing.path, error_text(error))

    def close(self, timeout_s: float = 120.0) -> None:
        """Wait for the checkpoint that is being written."""
        if self._thread is not None:
            self._thread.join(timeout_s)
            self._thread = None


def tellers(roster: Roster) -> tuple[int, ...]:
    """The first rank of each of the first few nodes, rank 0 among them."""
    first: dict[str, int] = {}
    for rank, member in enumerate(roster.members):
        first.setdefault(member.node_id, rank)
    return tuple(first.values())[:TELLERS]
