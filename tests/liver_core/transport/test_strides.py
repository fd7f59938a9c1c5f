"""Runs of bytes as few strided copies."""

from __future__ import annotations

import numpy as np

from liver_core.transport.strides import strided


def test_strided_rows_are_the_bytes_of_the_runs_in_their_order():
    draw = np.random.default_rng(0)
    for _ in range(2_000):
        runs = draw.integers(1, 12)
        starts = 200 + np.cumsum(draw.choice([2, 3, 3, 3, 5, 8], runs)) * draw.choice([1, 1, 1, -1])
        lengths, owners = draw.choice([2, 2, 2, 3], runs), np.sort(draw.choice([0, 0, 0, 1], runs))
        found = strided(starts, lengths, owners)
        places = [
            at for run in found for row in range(run.rows) for at in _range(run.start + row * run.stride, run.length)
        ]
        assert places == [at for start, length in zip(starts, lengths, strict=True) for at in _range(start, length)]
        assert [run.first for run in found] == np.cumsum([0, *(run.runs for run in found)])[:-1].tolist()
        assert all(len(set(owners[run.first : run.first + run.runs])) == 1 for run in found)


def _range(start: int, length: int) -> range:
    return range(start, start + length)


def test_columns_are_one_copy_and_what_has_no_gaps_is_one_row():
    columns = strided(np.arange(1_000) * 64, np.full(1_000, 16), np.zeros(1_000))
    assert [(run.rows, run.length, run.stride) for run in columns] == [(1_000, 16, 64)]
    assert [(run.rows, run.length) for run in strided(np.arange(9) * 16, np.full(9, 16), np.zeros(9))] == [(1, 144)]
