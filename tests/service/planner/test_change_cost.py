"""What a change is taken to cost: by the job's own handoffs where there are enough, else by the line through others."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from service.planner.change_cost import OWN_MOST, expected_change, own_changes, shipped_cost, state_bytes
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
    own = expected_change(file, own_changes([3.0, 3.0, 3.0]))
    assert (own.lost_s, own.source, own.handoffs, own.is_extrapolated) == (3.0, "its own handoffs", 3, False)


def test_a_job_whose_own_handoffs_were_dear_is_on_fewer_nodes_of_a_pool_that_loses_some_often():
    markets = (PoolMarket("a", 1.0, 3.0, life_s=900.0, losses=9, watched_h=2.0),)
    benchmarked = replace(priced(1.3 * MARGIN, markets=markets), world=None)
    dear = replace(benchmarked, changes=own_changes([300.0, 280.0, 320.0]))
    counts = [len(decide(inputs).target.node_ids()) for inputs in (benchmarked, dear)]  # type: ignore[union-attr]
    assert counts == [4, 2]
    assert dear.digest() != benchmarked.digest()
