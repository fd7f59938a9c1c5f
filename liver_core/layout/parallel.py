"""Parallel layouts: how many ranks each axis has, and which rank sits where. Pure.

The rank order is Megatron's default "tp-cp-ep-dp-pp" (`megatron.core.parallel_state.RankGenerator`): TP is the
fastest axis and PP the slowest, so rank = tp + TP * (cp + CP * (dp + DP * pp)).
"""

import re
from dataclasses import dataclass, fields
from functools import cache
from math import prod
from typing import Annotated

from liver_core.layout.layout_error import LayoutError
from liver_core.layout.limits import RANKS_MAX, STRICT, Bound

Size = Annotated[int, Bound(ge=1, le=RANKS_MAX)]
_ORDER = ("tp", "cp", "ep", "dp", "pp")


@dataclass(frozen=True, slots=True)
class Coordinates:
    """The position of one rank on every axis of its layout."""

    tp: int
    cp: int
    dp: int
    pp: int


@dataclass(frozen=True, slots=True)
class ParallelLayout:
    """Sizes of the parallel axes. Raises LayoutError naming the field and the rule.

    `ep` and `etp` re-cut the tp x cp x dp ranks of a stage for experts, they add no ranks. `vpp` is the number of
    model chunks that each pipeline stage holds.
    """

    __pydantic_config__ = STRICT

    tp: Size = 1
    pp: Size = 1
    dp: Size = 1
    cp: Size = 1
    ep: Size = 1
    etp: Size = 1
    vpp: Size = 1

    def __post_init__(self) -> None:
        for axis in fields(self):
            size = getattr(self, axis.name)
            if not isinstance(size, int) or isinstance(size, bool) or size < 1:
                raise LayoutError(axis.name, f"must be an integer of at least 1, is {size!r}")
        if self.world_size > RANKS_MAX:
            raise LayoutError("world_size", f"tp*cp*dp*pp = {self.world_size} exceeds {RANKS_MAX} ranks")
        if self.vpp > 1 and self.pp == 1:
            raise LayoutError("vpp", f"{self.vpp} model chunks need more than one pipeline stage, pp is 1")
        per_stage = self.tp * self.cp * self.dp
        if per_stage % (self.ep * self.etp):
            raise LayoutError("ep", f"ep*etp = {self.ep}*{self.etp} does not divide the {per_stage} ranks of a stage")

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.tp * self.cp * self.dp * self.pp

    @property
    def shards(self) -> int:
        """Number of ZeRO-1 shards of a bucket: Megatron's distributed optimizer shards over "dp-cp" together."""
        return self.dp * self.cp

    def coordinates(self, rank: int) -> Coordinates:
        """The position of a rank; raises LayoutError when there is no such rank."""
        if not 0 <= rank < self.world_size:
            raise LayoutError("rank", f"{rank} is not in 0..{self.world_size - 1} of {self}")
        rest, tp = divmod(rank, self.tp)
        rest, cp = divmod(rest, self.cp)
        pp, dp = divmod(rest, self.dp)
        return Coordinates(tp=tp, cp=cp, dp=dp, pp=pp)

    def rank_of(self, *, tp: int = 0, cp: int = 0, dp: int = 0, pp: int = 0) -> int:
        """The rank at a position; raises LayoutError when the position is outside the layout."""
        for name, value in (("tp", tp), ("cp", cp), ("dp", dp), ("pp", pp)):
            if not 0 <= value < getattr(self, name):
                raise LayoutError(name, f"position {value} is not in 0..{getattr(self, name) - 1} of {self}")
        return tp + self.tp * (cp + self.cp * (dp + self.dp * pp))

    def groups(self, axes: str) -> tuple[tuple[int, ...], ...]:
        """The groups of ranks that differ only in `axes` ("tp", "dp-cp", ...), as RankGenerator.get_ranks lists them.

        The order of the names in `axes` does not matter, as in Megatron: ranks in a group are ascending.
        """
        return _groups((self.tp, self.cp, 1, self.dp, self.pp), _named_axes(axes))

    def __str__(self) -> str:
        rarer = (("CP", self.cp), ("EP", self.ep), ("ETP", self.etp), ("VPP", self.vpp))
        parts = [f"TP{self.tp}", f"PP{self.pp}", f"DP{self.dp}", *(f"{name}{size}" for name, size in rarer if size > 1)]
        return "x".join(parts)

    @classmethod
    def parse(cls, text: str) -> "ParallelLayout":
        """Read "TP2xPP2" or "tp2 pp2 dp1"; axes left out are 1. Raises LayoutError with an example."""
        sizes: dict[str, int] = {}
        for part in re.split(r"[x,\s]+", text.strip()):
            match = re.fullmatch(r"(TP|PP|DP|CP|EP|ETP|VPP)=?(\d{1,6})", part, re.IGNORECASE)
            if match is None:
                raise LayoutError("layout", f"cannot read {part!r} of {text!r}; expected something like TP2xPP2xDP1")
            axis = match[1].lower()
            if axis in sizes:
                raise LayoutError("layout", f"names {match[1].upper()} twice in {text!r}")
            sizes[axis] = int(match[2])
        return cls(**sizes)


def _named_axes(axes: str) -> frozenset[str]:
    names = frozenset(axes.split("-"))
    if not names <= set(_ORDER):
        raise LayoutError("axes", f"{axes!r} must be names out of {', '.join(_ORDER)} joined by '-'")
    return names


@cache
def _groups(sizes: tuple[int, ...], axes: frozenset[str]) -> tuple[tuple[int, ...], ...]:
    """Groups of an orthogonal grid. `sizes` in _ORDER, fastest first, for groups and for ranks inside one."""
    strides = [prod(sizes[:index]) for index in range(len(sizes))]
    inside = [(size, stride) for name, size, stride in zip(_ORDER, sizes, strides, strict=True) if name in axes]
    across = [(size, stride) for name, size, stride in zip(_ORDER, sizes, strides, strict=True) if name not in axes]
    offsets = _grid(inside)
    return tuple(tuple(base + offset for offset in offsets) for base in _grid(across))


def _grid(dims: list[tuple[int, int]]) -> list[int]:
    """All sums of index * stride, the first (size, stride) fastest."""
    values = [0]
    for size, stride in dims:
        values = [value + index * stride for index in range(size) for value in values]
    return values
