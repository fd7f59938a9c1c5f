"""The slabs of a region put together so that a device is asked few times: what is as wide is summed at once.

A device takes longer to be asked for a small sum than to make it. A model has hundreds of parameters and a handful of
widths.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from liver_core.certificate.slabs import Slab
from liver_core.memory.overheads import CERTIFICATE_WORDS

PIECE = 1024
"""A slab of one row is cut into pieces of so many words, so that slabs of all lengths have the same width."""
NARROW, NARROW_PART = 32, 8
"""Where a piece has fewer words, what is known of each takes as much memory as the words: then fewer at once."""


@dataclass(frozen=True, slots=True)
class Run:
    """`count` rows of one width, one behind the other from `offset` of the region's `piece` on. The first stands at
    `start` of its flat global parameter, each other `step` further. All in words, which are pairs where the slab was
    `paired`."""

    index: int
    offset: int
    start: int
    step: int
    count: int
    piece: int


@dataclass(frozen=True, slots=True)
class Batch:
    """What is summed at once. `table`: int64 (4, runs) of index, start, step and count."""

    paired: bool
    width: int
    runs: tuple[Run, ...]
    table: np.ndarray

    @property
    def pieces(self) -> int:
        """Of all runs."""
        return int(self.table[3].sum())


def batches_of(slabs: Sequence[Slab], words_at_once: int = CERTIFICATE_WORDS) -> tuple[Batch, ...]:
    """All of `slabs`, no more than `words_at_once` words in a batch."""
    by_width: dict[tuple[bool, int], list[Run]] = {}
    for slab in slabs:
        for width, run in _runs_of(slab, words_at_once):
            by_width.setdefault((slab.paired, width), []).append(run)
    return tuple(
        Batch(paired, width, runs, np.array([(r.index, r.start, r.step, r.count) for r in runs], dtype=np.int64).T)
        for (paired, width), of_width in by_width.items()
        for runs in _cut(of_width, width, words_at_once if width >= NARROW else words_at_once // NARROW_PART)
    )


def _runs_of(slab: Slab, most: int) -> Iterator[tuple[int, Run]]:
    """By width. Rows stay whole if there are several and one fits."""
    if slab.rows > 1 and slab.width <= most:
        yield slab.width, Run(slab.index, slab.offset, slab.start, slab.stride, slab.rows, slab.piece)
        return
    piece = min(PIECE, most)
    pieces, rest = divmod(slab.width, piece)
    for row in range(slab.rows):
        offset, start = slab.offset + row * slab.width, slab.start + row * slab.stride
        if pieces:
            yield piece, Run(slab.index, offset, start, piece, pieces, slab.piece)
        if rest:
            yield rest, Run(slab.index, offset + pieces * piece, start + pieces * piece, 0, 1, slab.piece)


def _cut(runs: Iterable[Run], width: int, most: int) -> Iterator[tuple[Run, ...]]:
    """Runs of at most `most` words together; one that is longer is cut."""
    room = most_pieces = max(1, most // width)
    held: list[Run] = []
    for run in runs:
        done = 0
        while done < run.count:
            taken = min(room, run.count - done)
            offset, start = run.offset + done * width, run.start + done * run.step
            held.append(Run(run.index, offset, start, run.step, taken, run.piece))
            done, room = done + taken, room - taken
            if not room:
                yield tuple(held)
                held, room = [], most_pieces
    if held:
        yield tuple(held)
