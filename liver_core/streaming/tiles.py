"""Tiles: one target rank's region cut into ranges that are streamed one after another, with the reads of each. Pure.

All offsets are in elements of a region and the same for every state kind. Nothing here knows of versions.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from math import inf

from liver_core.reshard import CopyRuns, PlanError, RankPlan

LOCAL = -1
"""The peer number of the process itself: its share is copied in memory, by the same rules as any other."""

_GOLDEN = 40_503
"""The golden ratio's part of 2^16."""
Span = tuple[int, int]
"""start <= i < stop in the target's region."""


@dataclass(frozen=True, slots=True)
class TilePart:
    """What a tile takes from one peer; runs ascend by target offset."""

    peer: int
    runs: tuple[CopyRuns, ...]


@dataclass(frozen=True, slots=True)
class Tile:
    """The elements of target region[start:stop] that belong to parameters: those in `spans`, ascending.

    `reads` write exactly these, ascending by peer. `deadline` is when the first of its sources leaves, inf if none.
    """

    start: int
    stop: int
    spans: tuple[Span, ...]
    reads: tuple[TilePart, ...]
    deadline: float

    @property
    def peers(self) -> tuple[int, ...]:
        """Ascending."""
        return tuple(read.peer for read in self.reads)

    @property
    def elements(self) -> int:
        """Elements of one kind, padding between parameters not counted."""
        return sum(stop - start for start, stop in self.spans)


def cut_tiles(
    plan: RankPlan, parameters: Iterable[Span], tile_elements: int, *, leaving: Mapping[int, float] | None = None
) -> tuple[Tile, ...]:
    """All tiles of `plan` in rescue order: earliest deadline of a leaving source first, then by region offset, where
    each rank begins elsewhere and goes round.

    parameters: the ranges of the region that hold parameters, for example from `RankShards.parameters`.
    tile_elements: no tile has a longer range. A tile is a part of one parameter, or several small ones whole.
    leaving: source rank -> deadline in seconds; a rank of this process leaves nobody. Raises PlanError when the plan
    does not write exactly the parameters. Takes time in proportion to runs and tiles, not to elements or rows.
    """
    if tile_elements < 1:
        raise PlanError(f"tile_elements must be positive, is {tile_elements}")
    groups = list(_grouped(sorted(parameters), tile_elements))
    pieces: list[list[TilePart]] = [[] for _ in groups]
    for peer, runs in sorted(_by_peer(plan).items()):
        for index, clipped in _shared_out(runs, [(spans[0][0], spans[-1][1]) for spans in groups]):
            pieces[index].append(TilePart(peer, clipped))
    ranks = {} if leaving is None else leaving
    tiles = [_tile(spans, tuple(reads), ranks) for spans, reads in zip(groups, pieces, strict=True)]
    covered, planned = sum(tile.elements for tile in tiles), plan.elements
    if covered != planned:
        raise PlanError(f"the plan writes {planned} elements of rank {plan.target_rank}, parameters have {covered}")
    tiles.sort(key=lambda tile: (tile.deadline, tile.start))
    return tuple(_spread(tiles, plan.target_rank))


def _spread(tiles: Iterable[Tile], rank: int) -> Iterator[Tile]:
    """Ranks of a stage hold the same places of a model, and would all read from the same sources at the same time."""
    for _, equal in groupby(tiles, key=lambda tile: tile.deadline):
        held = list(equal)
        # Multiples of the golden ratio lie far apart, however many of them there are.
        first = rank * _GOLDEN % 2**16 * len(held) // 2**16
        yield from held[first:]
        yield from held[:first]


def clip_runs(run: CopyRuns, start: int, stop: int) -> Iterator[CopyRuns]:
    """The part of `run` that writes target elements start <= i < stop: a partial row, whole rows, a partial row."""
    if run.count == 1:
        yield from _row(run, 0, start, stop)
        return
    stride, offset, length = run.target_stride, run.target_offset, run.length
    first = max(0, (start - offset - length) // stride + 1)
    last = min(run.count - 1, (stop - offset - 1) // stride)
    if first > last:
        return
    head = first if offset + first * stride < start else None
    tail = last if offset + last * stride + length > stop else None
    whole_first = first if head is None else first + 1
    whole_last = last if tail is None else last - 1
    if head is not None:
        yield from _row(run, head, start, stop)
    if whole_first <= whole_last:
        yield _rows(run, whole_first, whole_last - whole_first + 1)
    if tail is not None and tail != head:
        yield from _row(run, tail, start, stop)


def _row(run: CopyRuns, index: int, start: int, stop: int) -> Iterator[CopyRuns]:
    target = run.target_offset + index * run.target_stride
    low, high = max(start, target), min(stop, target + run.length)
    if low < high:
        yield CopyRuns(run.source_offset + index * run.source_stride + low - target, low, high - low)


def _rows(run: CopyRuns, first: int, count: int) -> CopyRuns:
    source, target = run.source_offset + first * run.source_stride, run.target_offset + first * run.target_stride
    if count == 1:
        return CopyRuns(source, target, run.length)
    return CopyRuns(source, target, run.length, count, run.source_stride, run.target_stride)


def _grouped(parameters: Sequence[Span], tile_elements: int) -> Iterator[tuple[Span, ...]]:
    """Spans of each tile: pieces of a parameter that is too large, or as many whole neighbours as fit one range."""
    held: list[Span] = []
    for start, stop in parameters:
        if held and stop - held[0][0] > tile_elements:
            yield tuple(held)
            held = []
        if stop - start <= tile_elements:
            held.append((start, stop))
            continue
        count = -(-(stop - start) // tile_elements)
        cuts = [start + (stop - start) * piece // count for piece in range(count + 1)]
        for low, high in pairwise(cuts):
            yield ((low, high),)
    if held:
        yield tuple(held)


def _by_peer(plan: RankPlan) -> dict[int, tuple[CopyRuns, ...]]:
    found = {part.source_rank: part.runs for part in plan.remote}
    return {**found, LOCAL: plan.local.runs} if plan.local else found


def _shared_out(runs: Iterable[CopyRuns], ranges: Sequence[Span]) -> Iterator[tuple[int, tuple[CopyRuns, ...]]]:
    """(index of the range, what of the runs falls into it), by one sweep over both in target order.

    A strided run may reach over many ranges and interleave with others; it is looked at once for each range it spans.
    """
    waiting = sorted(runs, key=lambda run: run.target_offset)
    taken = 0
    active: list[tuple[int, int, CopyRuns]] = []
    for index, (start, stop) in enumerate(ranges):
        while taken < len(waiting) and waiting[taken].target_offset < stop:
            heapq.heappush(active, (waiting[taken].target_stop, taken, waiting[taken]))
            taken += 1
        while active and active[0][0] <= start:
            heapq.heappop(active)
        clipped = [piece for _, _, run in active for piece in clip_runs(run, start, stop)]
        if clipped:
            yield index, tuple(sorted(clipped, key=lambda piece: piece.target_offset))


def _tile(spans: tuple[Span, ...], reads: tuple[TilePart, ...], leaving: Mapping[int, float]) -> Tile:
    expected = sum(stop - start for start, stop in spans)
    read = sum(run.elements for each in reads for run in each.runs)
    if read != expected:
        raise PlanError(f"the plan writes {read} elements of region[{spans[0][0]}:{spans[-1][1]}], not {expected}")
    deadline = min((leaving.get(each.peer, inf) for each in reads), default=inf)
    return Tile(spans[0][0], spans[-1][1], spans, reads, deadline)
