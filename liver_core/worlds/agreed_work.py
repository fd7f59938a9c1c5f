"""Work that all ranks of a group do at once: it is done on all of them, or all of them learn which could not, and why.

A rank that raises while the others are in a collective leaves them there for as long as the group's timeout.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist

from liver_core.worlds.alone_group import AloneGroup

REASON_CHARS_MAX = 2000
_LEAVES_AFTER_S = 0.05
_UNUSED_TAG = 0x11FE
T = TypeVar("T")


class CannotDo(Exception):
    """Why this rank cannot do its part: the text says all. `names_ranks`: also whose fault it is."""

    def __init__(self, text: str, *, names_ranks: bool = False) -> None:
        super().__init__(text)
        self.names_ranks = names_ranks


class NotDone(RuntimeError):
    """The first rank that could not do its part, and why; the same on all ranks of the group."""


def do_together(action: Callable[[], T], group: dist.ProcessGroup, *, errors: type[Exception] = Exception) -> T:
    """Run `action` on this rank. A collective of `group`. Raises NotDone on all ranks if it raised one of `errors` on
    any. Other errors are passed on: an `action` that has collectives itself names those that all ranks can follow."""
    result, reason = None, ""
    try:
        result = action()
    except errors as error:
        reason = _said(error, group.rank())
    rank = first_rank(bool(reason), group)
    if rank is None:
        return result  # type: ignore[return-value]
    told = [reason]
    dist.broadcast_object_list(told, group=group, group_src=rank)
    raise NotDone(told[0])


def first_rank(is_here: bool, group: dist.ProcessGroup) -> int | None:
    """The lowest rank of the group on which `is_here` is true, or None. A collective of the group."""
    ranks = dist.get_world_size(group)
    lowest = torch.tensor([dist.get_rank(group) if is_here else ranks], dtype=torch.int64)
    dist.all_reduce(lowest, op=dist.ReduceOp.MIN, group=group)
    return int(lowest.item()) if lowest.item() < ranks else None


def leave(group: dist.ProcessGroup) -> None:
    """End the waits of all other ranks in `group`, which nobody can use any more. Over the host only.

    Gloo has no word for it: shutdown and abort let the others wait. It closes all connections of a group where a
    receive is out of time.
    """
    if isinstance(group, AloneGroup) or group.size() == 1:
        return
    with contextlib.suppress(RuntimeError):
        nothing = [torch.zeros(1, device="cpu")]
        group.recv(nothing, (group.rank() + 1) % group.size(), _UNUSED_TAG).wait(timedelta(seconds=_LEAVES_AFTER_S))


def _said(error: Exception, rank: int) -> str:
    text = str(error) if isinstance(error, CannotDo) else f"{type(error).__name__}: {error}"
    return (text if isinstance(error, CannotDo) and error.names_ranks else f"rank {rank}: {text}")[:REASON_CHARS_MAX]
