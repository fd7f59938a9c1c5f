"""The sum of a step over the world, by threads that are its ranks."""

import math
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist

from liver_core.rank.step_boundary import StepTotals, start_total
from liver_core.training.job import StepResult

TOP = (1 << 64) - 1


def totals_of(results: Sequence[StepResult], digests: Sequence[int], chains: Sequence[int | None]) -> list[StepTotals]:
    """What each rank of a world learns."""
    store = dist.HashStore()

    def rank(index: int) -> StepTotals:
        group: Any = dist.ProcessGroupGloo(store, index, len(results), timedelta(seconds=20))
        return start_total(results[index], digests[index], group, chains[index]).wait()

    with ThreadPoolExecutor(len(results)) as ranks:
        return list(ranks.map(rank, range(len(results))))


def test_every_rank_learns_the_same_sums():
    results = [StepResult(1.5, 1, 64), StepResult(2.5, 3, 32), StepResult(0.0, 0, 0)]
    learned = totals_of(results, [TOP, 7, 1 << 63], [TOP, TOP, 5])
    assert learned == [StepTotals(1.0, 96, ((1 << 63) + 6) & TOP, 3)] * 3


def test_a_norm_that_is_not_known_yet_makes_no_totals_unequal():
    first, second = (totals_of([StepResult(1.0, 1, 4)], [5], [0])[0] for _ in range(2))
    assert first.norm is None and first == second


@pytest.mark.parametrize("without", [0, 1])
def test_a_chain_that_one_rank_does_not_know_is_not_known(without: int):
    chains: list[int | None] = [0, 9]
    chains[without] = None
    learned = totals_of([StepResult(1.0, 1, 1)] * 2, [1, 2], chains)
    assert [each.chain for each in learned] == [None, None]


def test_nothing_streamed_is_known_to_sum_to_nothing():
    (alone,) = totals_of([StepResult(0.0, 0, 4)], [0], [0])
    assert alone.chain == 0 and math.isnan(alone.loss)
