"""The one collective of the next world in a cutover: it compares what arrived with what was sent, and counts votes.

Certificates are sums modulo 2^64. One rank adds the source world's sums, every rank subtracts the sums of its own part
of the state, and the result must be zero. All ranks get the same result, so none can judge differently.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from liver_core.handoff.cutover import Level

_LEVELS = (Level.STATE, Level.EVERYTHING)


@dataclass(frozen=True, slots=True)
class Counted:
    """The result over all ranks of the next world. Each pair is for the levels STATE and EVERYTHING, in this order.

    `left`: int64, sent minus arrived. `ranks_with`: how many ranks have it. `was_sent`: whether the source world's sums
    are known, so that there is something to compare with.
    """

    left: tuple[torch.Tensor, torch.Tensor]
    ranks_with: tuple[int, int]
    was_sent: tuple[bool, bool]
    size: int

    @property
    def everything(self) -> bool:
        """Whether every rank has the gradients too."""
        return self.ranks_with[1] == self.size

    @property
    def unknown(self) -> str:
        """Why nothing can be compared; empty if it can."""
        if self.ranks_with[0] < self.size:
            return f"only {self.ranks_with[0]} of {self.size} targets hold the state"
        if not all(self.was_sent[: 1 + self.everything]):
            return "the source world's certificate is unknown"
        return ""

    def differing(self, state: Sequence[str], gradients: Sequence[str]) -> list[str]:
        """The names whose sums differ from what was sent. Includes gradients if all ranks have them."""
        left = torch.cat(self.left) if self.everything else self.left[0]
        names = [*state, *gradients] if self.everything else state
        return [name for name, equal in zip(names, (left == 0).tolist(), strict=True) if not equal]


def count(
    reached: Level,
    arrived: Sequence[torch.Tensor],
    sent: Sequence[torch.Tensor | None],
    size: int,
    reduce: Callable[[torch.Tensor], object],
) -> Counted:
    """Add this rank's part. `reduce` sums it in place over the `size` ranks of the next world.

    arrived: int64 hash sums of this rank's state and gradients, of equal length on every rank. They are subtracted only
    for the levels that this rank has `reached`. sent: the source world's sums, on one rank; None elsewhere.
    """
    left = [torch.zeros_like(mine) if sums is None else sums.clone() for mine, sums in zip(arrived, sent, strict=True)]
    for part, mine, level in zip(left, arrived, _LEVELS, strict=True):
        part -= mine * (reached >= level)
    flags = torch.tensor([*(reached >= level for level in _LEVELS), *(sums is not None for sums in sent)])
    whole = torch.cat([*left, flags.to(torch.int64)])
    reduce(whole)
    state, gradients, counts = whole.split([len(left[0]), len(left[1]), len(flags)])
    with_state, with_gradients, state_sent, gradients_sent = counts.tolist()
    was_sent = (bool(state_sent), bool(gradients_sent))
    return Counted((state, gradients), (with_state, with_gradients), was_sent, size)
