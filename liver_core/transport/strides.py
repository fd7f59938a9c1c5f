"""Runs of bytes as few strided copies. Pure: numbers in, numbers out, without torch."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np


class Strided(NamedTuple):
    """So many rows of `length` bytes, the first at `start`, each `stride` bytes after the last, 0 for a row alone.
    `first`: the run that it begins with; `runs`: how many it stands for."""

    first: int
    runs: int
    start: int
    length: int
    rows: int
    stride: int

    @property
    def bytes(self) -> int:
        return self.length * self.rows


def strided(starts: np.ndarray, lengths: np.ndarray, owners: np.ndarray) -> list[Strided]:
    """The same bytes in the same order. `starts`, `lengths`: int64 (runs,) in bytes; `owners`: what each lies in, which
    nothing crosses. Runs of one length without gaps become one row."""
    steps = np.diff(starts)
    joined = (np.diff(lengths) == 0) & (np.diff(owners) == 0) & (steps >= lengths[:-1])
    steps = np.where(joined, steps, -1)
    # Where runs from each one on stop being as far apart as this one and the next.
    changes = np.append(np.flatnonzero(np.diff(steps)) + 1, len(steps))
    stops = changes[np.searchsorted(changes, np.arange(len(steps)), side="right")] if len(steps) else changes
    found, at = [], 0
    begin, size, step, stop = starts.tolist(), lengths.tolist(), steps.tolist(), stops.tolist()
    while at < len(begin):
        last = stop[at] if at < len(step) and step[at] >= 0 else at
        runs, stride = last - at + 1, step[at] if last > at else 0
        if stride == size[at]:
            found.append(Strided(at, runs, begin[at], size[at] * runs, 1, 0))
        else:
            found.append(Strided(at, runs, begin[at], size[at], runs, stride))
        at = last + 1
    return found
