"""Parallel layouts: how many ranks each axis has, and which rank sits where. Pure.

The rank order is Megatron's default "tp-cp-ep-dp-pp" (`megatron.core.parallel_state.RankGenerator`): TP is the
fastest axis and PP the slowest, so rank = tp + TP * (cp + CP * (dp + DP * pp)). Experts have a grid of their own over
the ranks of a stage: etp + ETP * (ep + EP * edp).
"""

import re
from dataclasses import dataclass, fields
from enum import StrEnum
from functools import cache
from math import prod
from typing import Annotated

from liver_core.layout.layout_error import LayoutError
from liver_core.layout.limits import RANKS_MAX, STRICT, Bound

Size = Annotated[int, Bound(ge=1, le=RANKS_MAX)]
_ORDER = ("tp", "cp", "ep", "dp", "pp")


class BufferClass(StrEnum):
    """Which ranks reduce a parameter's gradient, and so in which of Megatron's two families of buffers it lies.

    Experts lie in buffers of their own where EP is more than 1, and in the dense ones where it is 1 (megatron-core up
    to 0.18: `allreduce` of a parameter is False only for an expert under EP).
    """

    DENSE = "dense"
    EXPERT = "expert"


@dataclass(frozen=True, slots=True)
class Coordinates:
    """The position of one rank on every axis of its layout; `etp`, `ep` and `edp` are those of the experts' grid."""

    tp: int
    cp: int
    dp: int
    pp: int
    etp: int = 0
    ep: int = 0
    edp: int = 0


@dataclass(frozen=True, slots=True)
class ParallelLayout:
    """Sizes of the parallel axes. Raises LayoutError naming the field and the rule.

    `ep` and `etp` re-cut the tp x cp x dp ranks of a stage for experts, they add no ranks. `etp` None is Megatron's
    default, as TP; what comes to the same is read as None: ETP = TP, and 1 without EP, which records of dense jobs say.
    `vpp` is the number of model chunks that each pipeline stage holds.
    """

    __pydantic_config__ = STRICT

    tp: Size = 1
    pp: Size = 1
    dp: Size = 1
    cp: Size = 1
    ep: Size = 1
    etp: Size | None = None
    vpp: Size = 1

    def __post_init__(self) -> None:
        for axis in fields(self):
            size = getattr(self, axis.name)
            if axis.name == "etp" and size is None:
                continue
            if not isinstance(size, int) or isinstance(size, bool) or size < 1:
                raise LayoutError(axis.name, f"must be an integer of at least 1, is {size!r}")
        if self.world_size > RANKS_MAX:
            raise LayoutError("world_size", f"tp*cp*dp*pp = {self.world_size} exceeds {RANKS_MAX} ranks")
        if self.vpp > 1 and self.pp == 1:
            raise LayoutError("vpp", f"{self.vpp} model chunks need more than one pipeline stage, pp is 1")
        if self.etp == self.tp or (self.etp == 1 and self.ep == 1):
            object.__setattr__(self, "etp", None)
        if self.stage_size % (self.ep * self.expert_tp):
            sizes = f"ep*etp = {self.ep}*{self.expert_tp}"
            raise LayoutError("ep", f"{sizes} does not divide the {self.stage_size} ranks of a stage")

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.tp * self.cp * self.dp * self.pp

    @property
    def stage_size(self) -> int:
        """Ranks of one pipeline stage."""
        return self.tp * self.cp * self.dp

    @property
    def expert_tp(self) -> int:
        """Ranks that cut each matrix of an expert."""
        return self.tp if self.etp is None else self.etp

    @property
    def expert_dp(self) -> int:
        """Ranks of a stage that hold the same parts of the same experts."""
        return self.stage_size // (self.expert_tp * self.ep)

    def buffer_class(self, *, expert: bool) -> BufferClass:
        """In which family of buffers a parameter lies, an expert's or another."""
        return BufferClass.EXPERT if expert and self.ep > 1 else BufferClass.DENSE

    def cut(self, *, expert: bool) -> int:
        """Over how many ranks a parameter is split: TP, or ETP for an expert's."""
        return self.expert_tp if expert else self.tp

    def part(self, at: Coordinates, *, expert: bool) -> int:
        """Which of these parts a rank has: its place on TP, or on ETP for an expert's parameter."""
        return at.etp if expert else at.tp

    def shards(self, of: BufferClass) -> int:
        """Number of ZeRO-1 shards of a bucket: Megatron shards over "dp-cp", and those of experts over expert DP."""
        return self.expert_dp if of is BufferClass.EXPERT else self.dp * self.cp

    def shard(self, of: BufferClass, at: Coordinates) -> int:
        """Which ZeRO-1 shard of the buckets of a class a rank has; in "dp-cp" CP is the faster axis."""
        return at.edp if of is BufferClass.EXPERT else at.dp * self.cp + at.cp

    def owner(self, of: BufferClass, *, cut: int, shard: int, ep: int = 0, pp: int = 0) -> int:
        """The rank with part `cut` of a parameter, and that shard of its bucket. Positions are the caller's to check:
        `cut` is on TP, for the expert class on ETP, and `ep` means something to that class alone."""
        if of is BufferClass.EXPERT:
            return cut + self.expert_tp * (ep + self.ep * shard) + self.stage_size * pp
        return cut + self.tp * shard + self.stage_size * pp

    def coordinates(self, rank: int) -> Coordinates:
        """The position of a rank; raises LayoutError when there is no such rank."""
        if not 0 <= rank < self.world_size:
            raise LayoutError("rank", f"{rank} is not in 0..{self.world_size - 1} of {self}")
        pp, in_stage = divmod(rank, self.stage_size)
        rest, tp = divmod(in_stage, self.tp)
        dp, cp = divmod(rest, self.cp)
        rest, etp = divmod(in_stage, self.expert_tp)
        edp, ep = divmod(rest, self.ep)
        return Coordinates(tp=tp, cp=cp, dp=dp, pp=pp, etp=etp, ep=ep, edp=edp)

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

    def expert_groups(self, axes: str) -> tuple[tuple[int, ...], ...]:
        """The same on the experts' grid, where "tp" is ETP and "dp" is expert DP: "ep", "tp-ep", "dp", "tp-ep-pp"."""
        return _groups((self.expert_tp, 1, self.ep, self.expert_dp, self.pp), _named_axes(axes))

    def __str__(self) -> str:
        rarer = (("CP", self.cp), ("EP", self.ep), ("VPP", self.vpp))
        parts = [f"TP{self.tp}", f"PP{self.pp}", f"DP{self.dp}", *(f"{name}{size}" for name, size in rarer if size > 1)]
        return "x".join(parts if self.etp is None else [*parts, f"ETP{self.etp}"])

    @classmethod
    def parse(cls, text: str) -> "ParallelLayout":
        """Read "TP2xPP2" or "tp2 pp2 dp1"; axes left out are 1, ETP is as TP. Raises LayoutError with an example."""
        sizes: dict[str, int] = {}
        for part in re.split(r"[x,\s]+", text.strip()):
            match = re.fullmatch(r"(TP|PP|DP|CP|EP|ETP|VPP)=?(\d{1,6})", part, re.IGNORECASE)
            if match is None:
                raise LayoutError("layout", f"cannot read {part!r} of {text!r}; expected something like TP2xPP2xDP1")
            axis = match[1].lower()
            if axis in sizes:
                raise LayoutError("layout", f"names {match[1].upper()} twice in {text!r}")
            sizes[axis] = int(match[2])
        found = cls(**sizes)
        if sizes.get("etp", found.expert_tp) != found.expert_tp:
            rule = f"ETP{sizes['etp']} needs EP above 1: without it experts are cut as TP cuts"
            raise LayoutError("etp", f"{rule}, is {text!r}")
        return found


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
