"""Which checkpoint a start loads. Rank 0 chooses for all, since ranks that look at different times see different ones.

It counts as damaged only where a rank of every node sees that: shared storage shows things late, and one node alone may
lack it.
"""

from __future__ import annotations

import contextlib
import logging
import time
from pathlib import Path

from liver_core.rank.next_world import NextWorld
from liver_core.rank.store_exchange import Cancelled, Exchange
from liver_core.state.checkpoint_damage import damage_of
from liver_core.state.checkpoint_files import (
    STEP,
    CheckpointError,
    DamagedCheckpoint,
    later_ones,
    missing_file,
)

LATE_S = 30.0
"""So long what is missing may still come into sight."""
_AGAIN_S = 0.5
_log = logging.getLogger(__name__)


def agreed_checkpoint(made: NextWorld, deadline: float) -> str:
    """The path of what all ranks load, empty where there is nothing. Raises DamagedCheckpoint on all of them where that
    cannot be loaded as every node sees it, CheckpointError where some nodes see it otherwise or nothing is in sight."""
    if made.target_rank == 0:
        path, damage = _chosen(made, deadline)
        made.exchange.post("checkpoint", [path, damage])
    path, damage = made.exchange.wait("checkpoint", deadline)
    if damage and _is_so_on_every_node(made, Path(path), deadline):
        raise DamagedCheckpoint(path, damage)
    if damage:
        raise CheckpointError(f"checkpoint {path}: {damage}, as the node of rank 0 sees it; another one sees no damage")
    if path:
        with contextlib.suppress(OSError):  # Whoever loads it says more of that.
            _await_sight(made.exchange, Path(path), deadline)
    return path


def _chosen(made: NextWorld, deadline: float) -> tuple[str, str]:
    """The newest later one that is whole, else the one that was asked for and what is wrong with it."""
    wanted, later = made.request.checkpoint, made.request.later
    for folder in () if later is None else later_ones(made.request.job_id, later):
        if _is_damaged_here(folder):
            _log.warning("the job wrote %s after %s, but it is damaged", folder, wanted or "its beginning")
        else:
            _log.warning("the job begins from %s, which it wrote after %s", folder, wanted or "its beginning")
            return str(folder), ""
    if not wanted:
        return "", ""
    folder = Path(wanted)
    _await_sight(made.exchange, folder, deadline)
    damage = damage_of(folder)
    if damage and not folder.exists() and later is not None and folder.parent == Path(later.folder):
        _check_that_others_are_in_sight(folder)
    return wanted, damage


def _check_that_others_are_in_sight(folder: Path) -> None:
    """Where none of a job's checkpoints is there, its storage is not: nothing is known of this one."""
    if not any(not missing_file(entry) for entry in folder.parent.glob(f"{STEP}*")):
        raise CheckpointError(
            f"checkpoint {folder}: is not there, and no other checkpoint is in {folder.parent} either; "
            "checkpoint.path must be readable from every node"
        )


def _is_so_on_every_node(made: NextWorld, folder: Path, deadline: float) -> bool:
    """The first rank of each node looks; one that sees no damage, or cannot tell, answers for all."""
    members, rank = made.request.target.members, made.target_rank
    assert rank is not None
    if all(member.node_id != members[rank].node_id for member in members[:rank]):
        nodes = len(made.request.target.node_ids())
        if not _is_damaged_here(folder, unknown=False):
            made.exchange.settle("damaged", False)
        elif made.exchange.count("damaged/nodes", 1) >= nodes:
            made.exchange.settle("damaged", True)
    return made.exchange.wait("damaged", deadline)


def _is_damaged_here(folder: Path, *, unknown: bool = True) -> bool:
    try:
        return bool(damage_of(folder))
    except (OSError, MemoryError):
        return unknown


def _await_sight(exchange: Exchange, folder: Path, deadline: float) -> None:
    until = min(deadline, time.monotonic() + LATE_S)
    while missing_file(folder) and time.monotonic() < until:
        if exchange.cancelled():
            raise Cancelled(f"aborted while waiting for {folder}")
        time.sleep(_AGAIN_S)
