"""Source choice: own process, own node, then evenly over the replicas; no hot spots where naive choices have them."""

from collections import Counter

import pytest

from liver_core.layout import BucketRule, Manifest
from liver_core.reshard import plan_rank
from tests.liver_core.layout.models import KINDS, gpt, roster, spec
from tests.liver_core.reshard.execute import all_plans

# Where a choice by index or by data-parallel group makes hot spots (measured on Megatron's weight refit): one source
# gives everything, or a whole replica idles. Targets share no process with the sources.
HOT_SPOTS = ["DP4>DP8", "DP8>TP2xDP4", "TP2xDP4>TP4xDP4", "TP8xDP2>DP4", "TP2xDP4>TP2xDP8", "TP4xDP2>TP2xDP4"]


def given_by_source(manifest: Manifest, before: str, after: str) -> Counter:
    source = roster(before)
    target = roster(after, generation=1, first=source.layout.world_size)
    given = Counter(dict.fromkeys(range(source.layout.world_size), 0))
    for plan in all_plans(manifest, source, target):
        assert plan.local is None
        for transfer in plan.remote:
            given[transfer.source_rank] += transfer.elements
    return given


@pytest.mark.parametrize("case", HOT_SPOTS)
def test_matrices_are_taken_evenly_from_all_their_owners(case):
    before, _, after = case.partition(">")
    # One matrix of 512 rows, as in the measurement; no padding, so that an even share is possible.
    manifest = Manifest((spec("w", (512, 16), 0, layer=0),), 1, KINDS, BucketRule(1, 1))
    given = given_by_source(manifest, before, after)
    assert len(set(given.values())) == 1, given


@pytest.mark.parametrize("case", HOT_SPOTS)
def test_what_tensor_parallel_ranks_replicate_is_taken_evenly_from_the_replicas(case):
    before, _, after = case.partition(">")
    vectors = tuple(spec(f"norm{order}", (64,), layer=0, order=order) for order in range(256))
    given = given_by_source(Manifest(vectors, 1, KINDS, BucketRule(1, 1)), before, after)
    assert max(given.values()) <= 1.05 * sum(given.values()) / len(given), given


@pytest.mark.parametrize("case", HOT_SPOTS)
def test_a_whole_model_is_taken_nearly_evenly(case):
    before, _, after = case.partition(">")
    given = given_by_source(gpt(hidden=64, heads=8, groups=8, ffn=128), before, after)
    assert max(given.values()) <= 1.1 * sum(given.values()) / len(given), given


def test_the_own_process_is_preferred_to_any_replica():
    # Every source rank of the TP group holds the norm. Rank 1 of the target lives where source rank 3 does.
    manifest = Manifest((spec("norm", (64,), layer=0),), 1, KINDS)
    plan = plan_rank(manifest, roster("TP4"), roster("TP2", generation=1, order=[9, 3]), 1)
    assert plan.remote == ()
    assert plan.local and plan.local.source_rank == 3
    assert plan.reason == "elements: 64 from the own process; 1 source ranks"


def test_a_replica_on_the_own_node_is_preferred_to_one_elsewhere():
    # Two ranks a node: source ranks 0, 1 on n0 and 2, 3 on n1. The target is a new process on n1 (slots are bounded
    # by nothing here), so it reads rank 2 or 3.
    manifest = Manifest((spec("norm", (64,), layer=0),), 1, KINDS)
    source = roster("TP4", slots=4, order=[0, 1, 4, 5])
    target = roster("TP1", generation=1, slots=4, order=[6])
    plan = plan_rank(manifest, source, target, 0)
    assert [transfer.source_rank for transfer in plan.remote] == [2]
    assert "64 from the own node" in plan.reason


def test_a_plan_says_how_much_comes_from_where_and_leaves_out_what_gives_nothing():
    # Two ranks a node: source ranks 0, 1 on n0 and 2, 3 on n1; each holds a quarter. The target lives with rank 0.
    manifest = Manifest((spec("w", (400,), layer=0),), 1, KINDS, BucketRule(1, 1))
    plan = plan_rank(manifest, roster("DP4", slots=2), roster("TP1", generation=1, slots=2), 0)
    where = "100 from the own process, 100 from the own node, 200 from other nodes"
    assert plan.reason == f"elements: {where}; 4 source ranks"
    alone = plan_rank(manifest, roster("DP4", slots=2), roster("TP1", generation=1, slots=2, first=9), 0)
    assert alone.reason == "elements: 400 from other nodes; 4 source ranks"
    empty = plan_rank(manifest, roster("DP4", slots=2), roster("DP401", generation=1), 400)
    assert (empty.transfers, empty.reason) == ((), "elements: none; 0 source ranks")


def test_targets_that_want_the_same_box_share_its_replicas_out():
    # 2 replicas, 4 targets: two targets each. 4 replicas, 2 targets: disjoint halves.
    manifest = Manifest((spec("norm", (64,), layer=0),), 1, KINDS)
    target = roster("TP4", generation=1, first=10)
    sources = [plan_rank(manifest, roster("TP2"), target, rank).remote[0].source_rank for rank in range(4)]
    assert sources == [0, 0, 1, 1]
    target = roster("TP2", generation=1, first=10)
    sources = [plan_rank(manifest, roster("TP4"), target, rank).remote[0].source_rank for rank in range(2)]
    assert sources == [0, 3]


def test_a_tied_embedding_may_come_from_either_end_of_the_pipeline():
    manifest = gpt(tied=True)
    # Source rank 1 is the last stage; the target that lives in its process takes the embedding from there.
    plan = plan_rank(manifest, roster("PP2"), roster("TP1", generation=1, order=[1]), 0)
    embedding = manifest.parameter("embedding.word_embeddings.weight").numel
    assert plan.local and plan.local.source_rank == 1
    assert plan.local.elements >= embedding
    assert plan.remote_elements < sum(each.numel for each in manifest.parameters if not each.tied_to) / 2
