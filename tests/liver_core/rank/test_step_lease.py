"""A world steps while one of its ranks holds a step lease, and stands still otherwise. Threads are its ranks."""

import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist

from liver_core.rank.after_step import Ended, Ending
from liver_core.rank.boundary_requests import BoundaryRequests
from liver_core.rank.step_boundary import agree
from liver_core.rank.step_lease import WAIT_MOST_S, await_lease

PAST, FUTURE = -1.0, 1e9


def waits_of(world: Sequence[BoundaryRequests], *, most_s: float = WAIT_MOST_S) -> list[float | Ended]:
    """What each rank of a world waits at one boundary, or how it ends there."""
    store = dist.HashStore()

    def rank(index: int) -> float | Ended:
        group: Any = dist.ProcessGroupGloo(store, index, len(world), timedelta(seconds=20))
        requests = world[index]
        found = agree(requests.word(), group, has_lease=requests.has_lease())
        try:
            return await_lease(found, requests, group, 7, most_s=most_s)
        except Ended as ended:
            return ended

    with ThreadPoolExecutor(len(world)) as ranks:
        return list(ranks.map(rank, range(len(world))))


def ranks(*leased_until: float) -> list[BoundaryRequests]:
    world = [BoundaryRequests() for _ in leased_until]
    for requests, until in zip(world, leased_until, strict=True):
        requests.lease(until)
    return world


@pytest.mark.parametrize("leases", [(FUTURE, FUTURE), (FUTURE, PAST), (PAST, PAST, FUTURE)])
def test_one_lease_is_enough_for_a_world(leases):
    assert waits_of(ranks(*leases)) == [0.0] * len(leases)


def test_ranks_that_no_agent_has_given_a_lease_need_none():
    assert waits_of([BoundaryRequests(), BoundaryRequests()]) == [0.0, 0.0]


def test_a_world_without_a_lease_stands_still_until_one_rank_gets_one():
    world = ranks(PAST, PAST)
    threading.Timer(0.7, lambda: world[1].lease(FUTURE)).start()
    waited = waits_of(world)
    assert all(isinstance(found, float) and found >= 0.5 for found in waited), waited


def test_a_lease_that_has_run_out_is_none():
    requests = BoundaryRequests()
    requests.lease(time.monotonic() + 60.0)
    assert requests.has_lease()
    requests.lease(time.monotonic() - 0.001)
    assert not requests.has_lease()


def test_a_world_without_a_lease_that_is_to_stop_ends_before_the_step_is_applied():
    world = ranks(PAST, PAST)
    for requests in world:
        requests.stop("generation 2 has no rank here")
    ends = waits_of(world)
    assert [end.how for end in ends if isinstance(end, Ended)] == [Ending.STOPPED] * 2
    assert "step 7 was not applied" in str(ends[0].reason if isinstance(ends[0], Ended) else "")


def test_one_rank_that_is_to_stop_does_not_end_a_world():
    world = ranks(PAST, PAST)
    world[0].stop("asked of one only")
    threading.Timer(0.7, lambda: world[0].lease(FUTURE)).start()
    waited = waits_of(world)
    assert all(isinstance(found, float) and found >= 0.5 for found in waited), waited


def test_a_world_that_nobody_replaces_does_not_stand_still_for_ever():
    waited = waits_of(ranks(PAST, PAST), most_s=0.5)
    assert all(isinstance(found, float) and 0.5 <= found < 5.0 for found in waited), waited
