"""The one collective of the next world in a cutover: what arrived is compared with what was sent, and everybody votes.

Certificates are sums modulo 2^64, so one rank puts in what the source world's come to, every rank takes off what its
own part of the state comes to, and nothing may be left. All ranks learn the same, so that none can judge otherwise.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from liver_core.handoff.cutover import Level

_LEVELS = (Level.STATE, Level.EVERYTHING)


@dataclass(frozen=True, slots=True)
class Counted:
    """What all ranks of the next world said. Of each level, STATE first: `left`, int64, sent less arrived; how many
    ranks `hold` it; whether it `was_sent`, or nobody could say what there was to compare with."""

    left: tuple[torch.Tensor, torch.Tensor]
    hold: tuple[int, int]
    was_sent: tuple[bool, bool]
    size: int

    @property
    def everything(self) -> bool:
        """Whether every rank holds the gradients too."""
        return self.hold[1] == self.size

    @property
    def unknown(self) -> str:
        """Why nothing can be compared, or nothing."""
        if self.hold[0] < self.size:
            return f"only {self.hold[0]} of {self.size} targets hold the state"
        if not all(self.was_sent[: 1 + self.everything]):
            return "what the source world had did not become known"
        return ""

    def differing(self, state: Sequence[str], gradients: Sequence[str]) -> list[str]:
        """Of the names of what was compared, those that are not what was sent; gradients where all hold them."""
        left = torch.cat(self.left) if self.everything else self.left[0]
        names = [*state, *gradients] if self.everything else state
        return [name for name, equal in zip(names, (left == 0).tolist(), strict=True) if not equal]


def count(
    held: Level,
    arrived: Sequence[torch.Tensor],
    sent: Sequence[torch.Tensor | None],
    size: int,
    reduce: Callable[[torch.Tensor], object],
) -> Counted:
    """Bring this rank's part in, and have it summed over the `size` ranks of the next world in place by `reduce`.

    arrived: of state and gradients, int64, what this rank's share hashes to; equally long on every rank, and taken off
    only where `held` says that it is here. sent: what the source world's hash to, on one rank; None elsewhere.
    """
    left = [torch.zeros_like(mine) if said is None else said.clone() for mine, said in zip(arrived, sent, strict=True)]
    for part, mine, level in zip(left, arrived, _LEVELS, strict=True):
        part -= mine * (held >= level)
    flags = torch.tensor([*(held >= level for level in _LEVELS), *(said is not None for said in sent)])
    whole = torch.cat([*left, flags.to(torch.int64)])
    reduce(whole)
    state, gradients, told = whole.split([len(left[0]), len(left[1]), len(flags)])
    with_state, with_gradients, state_sent, gradients_sent = told.tolist()
    was_sent = (bool(state_sent), bool(gradients_sent))
    return Counted((state, gradients), (with_state, with_gradients), was_sent, size)
