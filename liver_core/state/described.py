"""Whether a parameter is cut over tensor-parallel ranks as its marks say: Megatron's sharded state dict is the judge.

A parameter that is cut and not marked would be taken for one that all ranks hold, and be handed over as another rank's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from liver_core.state.step_counts import UnsupportedState


class Piece(Protocol):
    """What is looked at of a Megatron ShardedTensor: shapes and offset in elements, global ones with prepended axes."""

    key: str
    local_shape: tuple[int, ...]
    global_shape: tuple[int, ...]
    global_offset: tuple[int, ...]
    prepend_axis_num: int


def check_cut(name: str, shape: tuple[int, ...], pieces: Sequence[Piece], tp_dim: int | None, tp: int) -> None:
    """Whether this rank's `shape` is one of `tp` parts of the parameter along `tp_dim`; the whole without one. Several
    pieces are blocks of equal sizes, one behind the other along that dim. Raises UnsupportedState where they differ."""
    sizes = [tuple(piece.local_shape) for piece in pieces]
    if len(set(sizes)) > 1:
        raise UnsupportedState(
            f"parameter {name}: is described in parts of unequal sizes, {' and '.join(map(str, sizes))}; only blocks "
            "of one size are moved, as those of a gated linear unit. Keep such parts in parameters of their own"
        )
    axis, blocks, ranks = tp_dim or 0, len(pieces), tp if tp_dim is not None else 1

    def grown(by: int) -> tuple[int, ...]:
        return tuple(size * (by if dim == axis else 1) for dim, size in enumerate(sizes[0]))

    if grown(blocks) != shape:
        raise UnsupportedState(
            f"parameter {name}: has shape {shape}, and sharded_state_dict describes {blocks} parts of {sizes[0]}"
        )
    in_one = len({piece.key for piece in pieces}) == 1
    for number, piece in enumerate(pieces):
        wanted, found = grown(ranks * blocks if in_one else ranks), tuple(piece.global_shape[piece.prepend_axis_num :])
        if found != wanted:
            raise UnsupportedState(_how_cut(name, found, wanted, tp_dim))
        block, offset = grown(ranks)[axis : axis + 1], piece.global_offset[piece.prepend_axis_num :][axis : axis + 1]
        if in_one and any(at // size != number for at, size in zip(offset, block, strict=True)):
            raise UnsupportedState(f"parameter {name}: part {number} of {blocks} begins at {offset[0]} of {found}")


def _how_cut(name: str, found: tuple[int, ...], wanted: tuple[int, ...], tp_dim: int | None) -> str:
    marked = "not marked as tensor parallel" if tp_dim is None else f"marked as cut along dim {tp_dim}"
    cut = next((dim for dim, (there, here) in enumerate(zip(found, wanted, strict=False)) if there != here), 0)
    return (
        f"parameter {name}: sharded_state_dict says that all tensor-parallel ranks together have shape {found}, but it "
        f"is {marked}, which makes {wanted}; before DistributedDataParallel set tensor_model_parallel=True, "
        f"partition_dim={cut} and partition_stride=1 on it (its part of the gradient norm is wrong without them)"
    )
