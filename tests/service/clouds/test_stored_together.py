"""Readers that store together: each is answered after a commit that holds all its own, and fails for its own only."""

import threading
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import pytest

from service.clouds.stored_together import StoredTogether

WITHIN_S = 20.0


class Store:
    """Takes numbers; the first commit ends when `goes_on` is set; 13 cannot be stored."""

    def __init__(self) -> None:
        self.commits: list[list[int]] = []
        self.tries = 0
        self.at_work = 0
        self.begun, self.goes_on = threading.Event(), threading.Event()

    def commit(self, numbers: Sequence[int]) -> None:
        self.at_work += 1
        assert self.at_work == 1, "two transactions at a time"
        self.tries += 1
        self.begun.set()
        assert self.goes_on.wait(WITHIN_S)
        self.at_work -= 1
        if 13 in numbers:
            raise ValueError("13")
        self.commits.append(list(numbers))


def stored(batches: Sequence[Sequence[int]], **options) -> tuple[Store, list[Future[None]]]:
    """The first batch is at work while the others come."""
    store = Store()
    together = StoredTogether(store.commit, **options)
    with ThreadPoolExecutor(len(batches)) as pool:
        asked = [pool.submit(together.store, batches[0])]
        assert store.begun.wait(WITHIN_S)
        asked += [pool.submit(together.store, batch) for batch in batches[1:]]
        for _ in range(int(WITHIN_S / 0.01)):
            if len(together._waiting) == len(batches) - 1:
                break
            threading.Event().wait(0.01)
        assert not any(each.done() for each in asked), "answered before the commit"
        store.goes_on.set()
        for each in asked:
            each.exception(WITHIN_S)
    return store, asked


def test_what_waits_while_a_transaction_is_under_way_is_the_next_one():
    store, asked = stored([[1], [2, 3], [4], [5, 6]])
    assert [each.exception() for each in asked] == [None] * 4
    assert store.commits[0] == [1] and sorted(store.commits[1]) == [2, 3, 4, 5, 6] and len(store.commits) == 2


def test_a_batch_that_cannot_be_stored_fails_alone():
    store, asked = stored([[1], [2, 3], [13, 4], [5]])
    assert [type(each.exception()) for each in asked] == [type(None), type(None), ValueError, type(None)]
    assert sorted(number for commit in store.commits for number in commit) == [1, 2, 3, 5]


@pytest.mark.parametrize("most", [1, 3])
def test_no_transaction_has_more_than_may_be_but_for_one_reader_that_has_more(most):
    batches = [[1], [2, 3], [4], [5], [6, 7, 8, 9]]
    store, asked = stored(batches, most=most)
    assert [each.exception() for each in asked] == [None] * 5
    assert all(len(commit) <= most or commit in batches for commit in store.commits)
    assert sorted(number for commit in store.commits for number in commit) == list(range(1, 10))
