"""Nodes that are not wanted any more are kept for a while, and no longer."""

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from service.policy.choosing import UtilityPolicy
from service.policy.keeping import LatelyWanted
from service.policy.types import Candidate, PolicyInputs, PolicyKnobs, PolicyVerdict
from service.policy.types import PolicyDecision as Decision
from service.simulation.cluster_replay import replay_cluster
from service.simulation.replay_setup import ReplaySetup
from service.simulation.traces import of_counts


@given(st.lists(st.tuples(st.integers(0, 200), st.integers(0, 9)), min_size=1, max_size=40), st.integers(0, 600))
def test_what_is_kept_is_the_most_that_was_wanted_within_the_time_since_nothing_was(asked, keeps_s) -> None:
    kept, seen, now = LatelyWanted(keeps_s), [], 0
    for gap, wanted in asked:
        now += gap
        seen = [*seen, (now, wanted)] if wanted else []
        most = max((count for at, count in seen if at >= now - keeps_s), default=0)
        assert kept.count(now, wanted) == most


FLAT = (Candidate("DP2", 2, 1.0, 1_000), Candidate("DP8", 8, 0.999, 1_000))
"""Eight nodes are hardly better than two."""


def usd(keeps_s: float, policy=None) -> float:
    trace = of_counts("steady", [(0.0, 8)], 3_600.0)
    setup = ReplaySetup(acquire_s=120.0, decides_every_s=60.0)
    knobs = PolicyKnobs(keeps_s=keeps_s, spares_max=0)
    return replay_cluster(trace, FLAT, policy or First(8, until_s=600.0), setup=setup, knobs=knobs).usd


class First(UtilityPolicy):
    """Wants so many nodes at first, and later what LiveR wants or, with `pauses`, none."""

    def __init__(self, nodes: int, *, until_s: float, pauses: bool = False) -> None:
        self._nodes, self._until_s, self._pauses, self._asked = nodes, until_s, pauses, 0

    def decide(self, inputs: PolicyInputs) -> Decision:
        self._asked += 1
        if self._asked * 60.0 > self._until_s:
            return Decision(PolicyVerdict.PAUSE, "done") if self._pauses else super().decide(inputs)
        decision = super().decide(inputs)
        assert decision.option is not None
        return replace(decision, option=replace(decision.option, hold=(("spot", self._nodes),)))


def test_a_node_that_is_wanted_no_more_is_paid_for_so_much_longer_and_then_given_back() -> None:
    at_once, later = usd(0.0), usd(300.0)
    assert at_once < 8.0
    # Six nodes, five minutes.
    assert round((later - at_once) * 3_600 / 6) == 300


def test_who_wants_nothing_any_more_keeps_nothing() -> None:
    assert usd(300.0, First(8, until_s=600.0, pauses=True)) == usd(0.0, First(8, until_s=600.0, pauses=True))
