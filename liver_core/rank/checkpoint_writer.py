"""Writes checkpoints of one rank in the background, while training goes on."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from liver_core.device.threads import background
from liver_core.layout import Roster
from liver_core.rank.active_world import ActiveWorld
from liver_core.state.checkpoint import prune, snapshot, write
from liver_core.state.checkpoint_files import ARGUMENTS, LeaseStanding
from liver_core.state.error_texts import error_text
from liver_core.state.megatron_checkpoint import CheckpointError
from liver_core.worlds.megatron import MegatronWorld, renew_background

_log = logging.getLogger(__name__)
TELLERS = 3
"""So many nodes' agents are told of a checkpoint that is complete, or failed."""
LAST_CHECKPOINT_S = 600.0
"""So long a rank that ends waits for a checkpoint that is being written."""


@dataclass(frozen=True, slots=True)
class Writing:
    """One checkpoint on its way to its folder."""

    path: str
    step: int
    keep: int
    asked: int
    job_id: str
    world: MegatronWorld
    began: float


class CheckpointWriter:
    """Writes one checkpoint at a time in the background. Calls `done(path, step, seconds, asked)`, or
    `failed(path, step, text, asked)`, on rank 0 and on the first ranks of a few other nodes: an agent that is stopped
    or cut off tells nobody, and a restart would begin at an older checkpoint, which may be removed by then."""

    def __init__(
        self,
        done: Callable[[str, int, float, int], None],
        failed: Callable[[str, int, str, int], None],
        standing: Callable[[], LeaseStanding],
    ) -> None:
        """`standing`: of this rank, as of now."""
        self._done = done
        self._failed = failed
        self._standing = standing
        self._thread: threading.Thread | None = None
        self._left: dist.ProcessGroup | None = None
        """The group in which this rank, or one that it waited for, has left the others."""

    def is_free(self, world: MegatronWorld, waits_s: float) -> bool:
        """Whether no rank of the world is writing a checkpoint; waits so long for this rank's own. Where one has left
        the group in which they write, the ranks make another one. If they cannot, the next one fails, and says so.

        A collective of `world`. Main thread only."""
        self.close(waits_s)
        is_busy = self._thread is not None and self._thread.is_alive()
        shown = torch.tensor([is_busy, self._left is world.background], dtype=torch.int64)
        dist.all_reduce(shown, op=dist.ReduceOp.MAX, group=world.everyone)
        any_is_busy, any_has_left = shown.tolist()
        if any_is_busy:
            if is_busy:
                _log.warning("a checkpoint is due, but the one before is still being written")
            return False
        if any_has_left:
            renew_background(world)
        return True

    def start(
        self, active: ActiveWorld, small: dict[str, Any], arguments: dict[str, Any], path: str, *, keep: int, asked: int
    ) -> None:
        """Take a snapshot now (collective, main thread) and write it in the background. No rank may be writing one.

        `arguments`: see `megatron_arguments`.

        Once this checkpoint is complete, rank 0 removes all but the newest `keep` complete siblings named step-N.
        `asked`: the number of the request that it answers, 0 without one.
        """
        world = active.world
        writing = Writing(path, int(small["step"]), keep, asked, world.roster.job_id, world, time.monotonic())
        sharded = {**snapshot(active.world, active.state), ARGUMENTS: arguments}
        self._thread = background(self._write, args=(sharded, small, writing), name="checkpoint")
        self._thread.start()

    def _write(self, sharded: dict[str, Any], small: dict[str, Any], writing: Writing) -> None:
        world, path = writing.world, writing.path
        group, generation = world.background, world.generation
        tells = group.rank() in tellers(world.roster)
        try:
            made = {"job_id": writing.job_id, "generation": generation, "standing": self._standing}
            write(sharded, small, path, group, **made)
            if tells:
                self._done(path, writing.step, time.monotonic() - writing.began, writing.asked)
            if group.rank() == 0:
                left = prune(Path(path), writing.keep, job_id=writing.job_id, generation=generation)
                if left:
                    _log.warning("old checkpoints still take space, they could not be removed: %s", "; ".join(left[:3]))
        except Exception as error:
            # Training goes on without this checkpoint. The user gets the reason.
            if not isinstance(error, CheckpointError):
                self._left = group
            if world.retired:
                # Whoever was to tell may have left with that world, and one that was asked for would be waited for.
                text = f"a handoff ended its world before it was complete ({error_text(error)})"
                self._failed(path, writing.step, text, writing.asked)
            elif tells or self._left is group:
                self._failed(path, writing.step, error_text(error), writing.asked)

    def give_up(self, path: str, step: int, text: str, world: MegatronWorld) -> None:
        """Tell that this checkpoint is not written at all."""
        if world.everyone.rank() in tellers(world.roster):
            self._failed(path, step, text, 0)

    def close(self, waits_s: float = LAST_CHECKPOINT_S) -> None:
        """Wait so long for the checkpoint that is being written."""
        if self._thread is not None:
            self._thread.join(waits_s)


def tellers(roster: Roster) -> tuple[int, ...]:
    """The first rank of each of the first few nodes, rank 0 among them."""
    first: dict[str, int] = {}
    for rank, member in enumerate(roster.members):
        first.setdefault(member.node_id, rank)
    return tuple(first.values())[:TELLERS]
