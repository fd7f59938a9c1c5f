"""The least that must move, hand-computed."""

from liver_core.layout import BucketRule, Manifest
from liver_core.reshard import missing_bytes
from tests.liver_core.layout.models import KINDS, roster, spec
from tests.liver_core.reshard.checker import lower_bound_elements

MANIFEST = Manifest((spec("w", (1200,), 0, layer=0),), 1, KINDS, BucketRule(1, 1))


def test_the_bound_counts_what_each_target_lacks():
    # Source halves: rank 0 has 0..599, rank 1 has 600..1199. Target rank 1, 400..799, is the process of source rank 0.
    source, target = roster("DP2"), roster("DP3", generation=1, order=[5, 0, 1])
    assert [missing_bytes(MANIFEST, source, target, rank, kinds=("master",)) // 4 for rank in range(3)] == [400, 200, 0]
    assert lower_bound_elements(MANIFEST, source, target) == 600


def test_each_replica_that_must_be_made_is_counted():
    norm = Manifest((spec("norm", (64,), layer=0),), 1, KINDS)
    assert lower_bound_elements(norm, roster("TP1"), roster("TP4", generation=1)) == 3 * 64
