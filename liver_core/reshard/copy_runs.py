"""From boxes to copies: the runs that move the common part of two row-major boxes, and joining of runs. Pure."""

from collections.abc import Iterable, Iterator
from itertools import product

from liver_core.layout import Box
from liver_core.reshard.plan import CopyRuns


def runs_between(source: Box, source_offset: int, target: Box, target_offset: int, common: Box) -> list[CopyRuns]:
    """The copies of `common` from a source box at region[source_offset:] to a target box at region[target_offset:].

    Both boxes lie row-major and contiguous. As few runs as strides allow: a column slice is one CopyRuns.
    """
    source_strides = _strides(source.shape)
    target_strides = _strides(target.shape)
    for low, s_low, t_low, s_stride, t_stride in zip(
        common.start, source.start, target.start, source_strides, target_strides, strict=True
    ):
        source_offset += (low - s_low) * s_stride
        target_offset += (low - t_low) * t_stride
    dims = _joined_dims(list(zip(common.shape, source_strides, target_strides, strict=True)))
    length = 1
    if dims and dims[-1][1:] == (1, 1):
        length = dims.pop()[0]
    count, source_stride, target_stride = dims.pop() if dims else (1, 0, 0)
    return [
        CopyRuns(source_offset + s_by, target_offset + t_by, length, count, source_stride, target_stride)
        for s_by, t_by in _outer_offsets(dims)
    ]


def join_runs(runs: Iterable[CopyRuns]) -> tuple[CopyRuns, ...]:
    """The same copies in fewer runs, ascending by target offset: neighbours joined, then equal steps folded."""
    ordered = sorted(runs, key=lambda run: run.target_offset)
    return tuple(_folded(_neighbours_joined(ordered)))


def _strides(shape: tuple[int, ...]) -> list[int]:
    strides = [1]
    for size in reversed(shape[1:]):
        strides.append(strides[-1] * size)
    return strides[::-1]


def _joined_dims(dims: list[tuple[int, int, int]]) -> list[tuple[int, int, int]]:
    """(extent, source stride, target stride) with dims of extent 1 dropped and dims that run on joined."""
    joined: list[tuple[int, int, int]] = []
    for extent, s_stride, t_stride in dims:
        if extent == 1:
            continue
        if joined and joined[-1][1:] == (extent * s_stride, extent * t_stride):
            joined[-1] = (joined[-1][0] * extent, s_stride, t_stride)
        else:
            joined.append((extent, s_stride, t_stride))
    return joined


def _outer_offsets(dims: list[tuple[int, int, int]]) -> Iterator[tuple[int, int]]:
    for indices in product(*(range(extent) for extent, _, _ in dims)):
        yield (
            sum(index * dim[1] for index, dim in zip(indices, dims, strict=True)),
            sum(index * dim[2] for index, dim in zip(indices, dims, strict=True)),
        )


def _neighbours_joined(runs: list[CopyRuns]) -> Iterator[CopyRuns]:
    """Single runs that continue one another at both ends become one."""
    held: CopyRuns | None = None
    for run in runs:
        if held and run.count == held.count == 1 and _continues(held, run):
            held = CopyRuns(held.source_offset, held.target_offset, held.length + run.length)
            continue
        if held:
            yield held
        held = run
    if held:
        yield held


def _continues(held: CopyRuns, run: CopyRuns) -> bool:
    return run.source_offset == held.source_stop and run.target_offset == held.target_stop


def _folded(runs: Iterable[CopyRuns]) -> Iterator[CopyRuns]:
    """Runs of one length at equal steps become one CopyRuns."""
    held: CopyRuns | None = None
    for run in runs:
        folded = _fold(held, run) if held else None
        if held and not folded:
            yield held
        held = folded or run
    if held:
        yield held


def _fold(held: CopyRuns, run: CopyRuns) -> CopyRuns | None:
    if held.length != run.length:
        return None
    if held.count > 1:
        source_step, target_step = held.source_stride, held.target_stride
    else:
        source_step = run.source_offset - held.source_offset
        target_step = run.target_offset - held.target_offset
    if min(source_step, target_step) < held.length:
        return None
    follows = (
        run.source_offset == held.source_offset + held.count * source_step
        and run.target_offset == held.target_offset + held.count * target_step
        and (run.count == 1 or (run.source_stride, run.target_stride) == (source_step, target_step))
    )
    if not follows:
        return None
    count = held.count + run.count
    return CopyRuns(held.source_offset, held.target_offset, held.length, count, source_step, target_step)
