"""Writes checkpoints of one rank in the background, while training goes on."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from liver_core.rank.active_world import ActiveWorld
from liver_core.state.checkpoint import error_text, prune, snapshot, write


class CheckpointWriter:
    """Writes one checkpoint at a time in the background. Calls `done(path, step, seconds)` on rank 0."""

    def __init__(self, done: Callable[[str, int, float], None], failed: Callable[[str, str], None]) -> None:
        self._done = done
        self._failed = failed
        self._thread: threading.Thread | None = None

    def start(self, active: ActiveWorld, small: dict[str, Any], path: str, *, keep: int | None = None) -> None:
        """Take a snapshot now (collective, main thread) and write it in the background. Waits for a write in progress.

        With `keep`: once this checkpoint is complete, rank 0 removes all but the newest `keep` complete siblings named
        step-N.
        """
        self.close()
        started = time.monotonic()
        sharded = snapshot(active.world, active.state)
        arguments = (sharded, small, path, active.world.background, started, keep)
        self._thread = threading.Thread(target=self._write, args=arguments, name="checkpoint", daemon=True)
        self._thread.start()

    def _write(
        self,
        sharded: dict[str, Any],
        small: dict[str, Any],
        path: str,
        group: dist.ProcessGroup,
        started: float,
        keep: int | None,
    ) -> None:
        try:
            write(sharded, small, path, group)
            if group.rank() == 0 and keep is not None:
                prune(Path(path).parent, keep)
        except (Exception, CheckpointException) as error:
            # Training goes on without this checkpoint. The user gets the reason.
            self._failed(path, error_text(error))
            return
        if group.rank() == 0:
            self._done(path, int(small["step"]), time.monotonic() - started)

    def close(self, timeout_s: float = 120.0) -> None:
        """Wait for the checkpoint that is being written."""
        if self._thread is not None:
            self._thread.join(timeout_s)
            self._thread = None
