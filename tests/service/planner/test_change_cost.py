"""What a change is taken to cost: by the job's own handoffs where there are enough, else by the line through others."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from service.planner.change_cost import (
    OWN_MOST,
    ChangeCost,
    cost_of_report,
    expected_change,
    fitted_cost,
    own_changes,
    shipped_cost,
    state_bytes,
)
from service.planner.decision import decide
from service.planner.inputs import PoolMarket
from tests.service.planner.test_decision import job
from tests.service.planner.test_worth import MARGIN, priced


def test_two_handoffs_are_too_few_to_go_by_and_three_are_not():
    assert own_changes([4.0, 2.0]) is None
    own = own_changes([4.0, 2.0, 90.0])
    assert own is not None and (own.lost_s, own.spread_s, own.handoffs) == (4.0, 88.0, 3)


@given(st.lists(st.floats(-1.0, 900.0), min_size=3, max_size=20))
def test_only_the_newest_handoffs_count_and_none_gains_time(lost_s):
    own = own_changes(lost_s)
    assert own is not None and own == own_changes(lost_s[:OWN_MOST])
    assert own.handoffs == min(len(lost_s), OWN_MOST)
    newest = [max(0.0, each) for each in lost_s[:OWN_MOST]]
    assert min(newest) <= own.lost_s <= max(newest)


def test_what_a_change_is_taken_to_cost_says_by_what():
    file = job()
    line = expected_change(file, None)
    assert line.lost_s == pytest.approx(shipped_cost().lost_s(state_bytes(file)))
    assert (line.handoffs, line.source) == (0, shipped_cost().source)
    assert not line.is_extrapolated
    tiny = {"num_layers": 1, "hidden_size": 64, "num_attention_heads": 4, "padded_vocab_size": 64, "seq_length": 64}
    assert expected_change(job(model=tiny), None).is_extrapolated, "no state of less than 16 MB was measured"
    copied = expected_change(file, None, copy_s=100.0)
    assert 100.0 < copied.lost_s < 110.0 and "wires" in copied.source
    assert expected_change(file, own_changes([3.0, 3.0, 3.0]), copy_s=100.0).lost_s == 3.0
    own = expected_change(file, own_changes([3.0, 3.0, 3.0]))
    assert (own.lost_s, own.source, own.handoffs, own.is_extrapolated) == (3.0, "its own handoffs", 3, False)


def test_a_job_whose_own_handoffs_were_dear_is_on_fewer_nodes_of_a_pool_that_loses_some_often():
    markets = (PoolMarket("a", 1.0, 3.0, life_s=900.0, losses=9, watched_h=2.0),)
    benchmarked = replace(priced(1.3 * MARGIN, markets=markets), world=None)
    dear = replace(benchmarked, changes=own_changes([300.0, 280.0, 320.0]))
    counts = [len(decide(inputs).target.node_ids()) for inputs in (benchmarked, dear)]  # type: ignore[union-attr]
    assert counts == [4, 2]
    assert dear.digest() != benchmarked.digest()


@pytest.mark.parametrize(
    ("points", "base_s", "s_per_gb", "error_s"),
    [
        # All on one line.
        ([(1, 3.0), (2, 5.0), (4, 9.0)], 1.0, 2.0, 0.0),
        # Weights of 1, 1/4 and 1/4. Weighted means: 1.5 GB, 4/3 s. Slope: 0.5 / 0.875. Missed by 1, 8 and 4 of 21.
        ([(1, 1.0), (2, 2.0), (3, 2.0)], 10 / 21, 4 / 7, 13 / 63),
        # One size: the weighted mean, (1 + 2/4) / (1 + 1/4), of which 1 and 2 are 0.2 and 0.8 away.
        ([(1, 1.0), (1, 2.0)], 1.2, 0.0, 0.5),
        # A larger state that took less time: the weighted mean, (4/16 + 2/4) / (1/16 + 1/4).
        ([(1, 4.0), (2, 2.0)], 2.4, 0.0, 1.0),
        # The line would begin below zero, so that it goes through zero: (1 + 8/16) / (1 + 4/16) a GB.
        ([(1, 1.0), (2, 4.0)], 0.0, 1.2, 0.9),
        # What lost no time weighs as what lost a millisecond, a million times what lost a second.
        ([(1, 0.0), (1, 1.0)], 1 / 1_000_001, 0.0, 0.5),
    ],
)
def test_the_line_of_least_relative_squares_by_hand(points, base_s, s_per_gb, error_s):
    found = fitted_cost([(size * 1e9, lost) for size, lost in points], "a test")
    expected = pytest.approx((base_s, s_per_gb, error_s), rel=1e-9, abs=1e-12)
    assert (found.base_s, found.s_per_gb, found.error_s) == expected
    assert found.measured_gb == (points[0][0], points[-1][0])
    assert (found.points, found.source) == (len(points), "a test")


def test_a_line_through_nothing_is_refused():
    with pytest.raises(ValueError, match="no handoff was measured"):
        fitted_cost([], "a test")


def test_a_cost_is_a_part_for_every_change_and_one_for_every_gb_and_certain_between_what_was_measured():
    cost = ChangeCost(2.0, 3.0, 0.5, (1.0, 4.0), 7, "a test")
    assert [cost.lost_s(size) for size in (0.0, 1e9, 4e9)] == [2.0, 5.0, 14.0]
    assert [cost.is_extrapolated(size) for size in (0.9e9, 1e9, 2e9, 4e9, 4.1e9)] == [True, False, False, False, True]


def test_the_cost_that_is_shipped_is_of_fifteen_handoffs_of_16_mb_to_4_gb():
    cost = shipped_cost()
    assert (cost.points, cost.measured_gb, cost.source) == (15, (0.016, 4.0), "docs/benchmarks.md, two CPU cores")


def test_of_a_report_only_live_handoffs_that_went_through_count():
    live = [{"state_bytes": 1_000_000_000, "live": {"lost_s": 3}}, {"state_bytes": 2e9, "live": {"lost_s": 5.0}}]
    nothing = {"state_bytes": 3e9, "live": {"lost_s": 0}}
    none = [
        {"state_bytes": 9e9, "live": None},
        {"state_bytes": 9e9},
        {"state_bytes": 9e9, "live": {"lost_s": None}},
        {"state_bytes": 9e9, "live": {"lost_s": "3"}},
        {"state_bytes": 9e9, "live": {"lost_s": -0.5}},
        {"state_bytes": 9e9, "live": {}},
    ]
    found = cost_of_report({"cases": [none[0], live[0], *none[1:], live[1]]}, "a report")
    assert (found.base_s, found.s_per_gb, found.points) == (pytest.approx(1.0), pytest.approx(2.0), 2)
    assert (found.measured_gb, found.source) == ((1.0, 2.0), "a report")
    assert cost_of_report({"cases": [*live, nothing]}, "a report").points == 3
    for report in ({"cases": none}, {}):
        with pytest.raises(ValueError, match="no handoff was measured"):
            cost_of_report(report, "a report")


def test_the_state_of_a_job_by_hand():
    """Twelve bytes for each parameter: of 12 layers of 4 x 128^2 and 3 x 128 x 512, and two tables of 264 x 128."""
    assert state_bytes(job()) == 12 * (12 * (65_536 + 196_608) + 2 * 33_792) == 38_559_744
