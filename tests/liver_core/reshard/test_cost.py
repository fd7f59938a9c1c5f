"""Bounds and cost estimates, hand-computed."""

import pytest

from liver_core.layout import BucketRule, Manifest
from liver_core.reshard import LinkSpeeds, PlanError, estimate_cost, lower_bound_elements, missing_elements
from tests.liver_core.layout.models import KINDS, roster, spec
from tests.liver_core.reshard.execute import all_plans

# 1200 elements of 12 bytes each.
MANIFEST = Manifest((spec("w", (1200,), 0, layer=0),), 1, KINDS, BucketRule(1, 1))
SPEEDS = LinkSpeeds(own_process_bytes_per_s=1e4, same_node_bytes_per_s=1e3, node_network_bytes_per_s=1e2)


def test_the_bound_counts_what_each_target_lacks():
    # Source halves: rank 0 has 0..599, rank 1 has 600..1199. Target rank 1, 400..799, is the process of source rank 0.
    source, target = roster("DP2"), roster("DP3", generation=1, order=[5, 0, 1])
    assert [missing_elements(MANIFEST, source, target, rank) for rank in range(3)] == [400, 200, 0]
    assert lower_bound_elements(MANIFEST, source, target) == 600


def test_each_replica_that_must_be_made_is_counted():
    norm = Manifest((spec("norm", (64,), layer=0),), 1, KINDS)
    assert lower_bound_elements(norm, roster("TP1"), roster("TP4", generation=1)) == 3 * 64


def test_the_busiest_link_is_named_and_decides():
    source, target = roster("DP2", slots=2), roster("DP3", generation=1, slots=2, order=[0, 1, 2])
    # Rank 0 keeps 400. Rank 1 wants 400..799: 200 its own, 200 from its node. Rank 2, on n1: 400 over the network.
    cost = estimate_cost(MANIFEST, source, target, all_plans(MANIFEST, source, target), SPEEDS)
    assert (cost.own_process_bytes, cost.same_node_bytes, cost.network_bytes) == (600 * 12, 200 * 12, 400 * 12)
    assert cost.seconds == pytest.approx(48)
    assert cost.reason == "network into n1 is busy for 48 s"


def test_no_transfers_cost_nothing_and_a_speed_of_zero_is_refused():
    source, target = roster("DP2"), roster("DP2", generation=1)
    assert estimate_cost(MANIFEST, source, target, [], SPEEDS).seconds == 0
    with pytest.raises(PlanError, match="must be positive"):
        LinkSpeeds(1, 0, 1)
