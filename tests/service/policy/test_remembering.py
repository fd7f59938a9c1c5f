"""Remembered decisions: the same as those made anew, and not made anew."""

import pytest

from service.policy.choosing import UtilityPolicy
from service.policy.remembering import RememberingPolicy
from service.policy.types import Candidate, PolicyDecision, PolicyInputs
from service.simulation.cluster_replay import replay_cluster
from service.simulation.replay_setup import ReplaySetup
from service.simulation.traces import CapacityTrace, of_counts

LAYOUTS = tuple(Candidate(f"DP{n}", n, 8.0 / n + 0.1, 1_000, change_s=5.0) for n in range(1, 9))


class Counting(UtilityPolicy):
    """Counts how often it is asked."""

    def __init__(self) -> None:
        self.asked = 0

    def decide(self, inputs: PolicyInputs) -> PolicyDecision:
        self.asked += 1
        return super().decide(inputs)


def hours_of(counts: list[int], first: int) -> CapacityTrace:
    return of_counts("hours", [(at * 3_600.0, count) for at, count in enumerate(counts[first:])], 24 * 3_600.0)


@pytest.mark.thorough
def test_replays_that_resemble_each_other_are_the_same_with_remembered_decisions_and_ask_less() -> None:
    counts = [8] * 12 + [3] * 12 + [8] * 12
    counting, fresh = Counting(), Counting()
    remembering = RememberingPolicy(counting)
    for first in range(8):
        for gang in (0, 8):
            setup = ReplaySetup(gang=gang, tick_s=600.0)
            trace = hours_of(counts, first)
            kept = replay_cluster(trace, LAYOUTS, remembering, setup=setup)
            assert kept == replay_cluster(trace, LAYOUTS, fresh, setup=setup)
    assert 0 < counting.asked < fresh.asked / 2


def test_no_more_decisions_are_kept_than_it_may_keep() -> None:
    counting = Counting()
    policy = RememberingPolicy(counting, kept_max=1)
    one, other = (PolicyInputs((), LAYOUTS, usd) for usd in (1.0, 2.0))
    for inputs in (one, one, other, one):
        assert policy.decide(inputs) == UtilityPolicy().decide(inputs)
    assert counting.asked == 3
