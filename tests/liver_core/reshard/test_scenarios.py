"""Layout changes worked out by hand, and the tables of Megatron's own tests as planner checks."""

from itertools import pairwise

import numpy as np
import pytest

from liver_core.layout import BucketRule, Manifest
from liver_core.reshard import CopyRuns, plan_rank
from tests.liver_core.layout.models import KINDS, gpt, roster, spec
from tests.liver_core.reshard.execute import all_plans, move, regions_of

# The sizes of `tests/unit_tests/resharding/test_model_swap.py`: (TP, PP) before and after, on any number of nodes.
WEIGHT_REFIT = "TP2>TP1 TP1>TP2 TP2>TP4 PP2>TP1 TP1>PP2 TP2xPP2>TP1 TP1>TP2xPP2 TP2>PP2 PP2>TP2 PP2>TP2xPP4"
# `tests/unit_tests/dist_checkpointing/models/test_gpt_model.py`, `test_mlp_glu.py` and `test_optimizer.py`.
MODEL_SPACE = "TP2xPP4>TP4xPP2 PP8>TP8 TP2>PP8 TP1>TP2xPP2 TP1>TP2xPP4 TP2xPP4>TP2xPP4 TP8>PP2 TP2xPP4>TP2xPP2"
DATA_PARALLEL = (
    "PP2xDP4>PP2xDP4 TP2xPP4>TP2xPP4 TP4xPP2>TP4xDP2 TP2xPP4>TP2xPP2xDP2 PP4xDP2>PP2xDP4 PP8>PP4xDP2 PP8>PP2xDP4"
)
VIRTUAL_STAGES = "PP4xVPP2>PP2 PP4xVPP2>TP2xPP1 TP4>PP2xVPP2 PP2>PP4xVPP2 PP2xVPP4>PP4xVPP2"
# What this project promises first.
OURS = "TP2xPP2>PP4 PP4>TP2xDP2 TP2xDP2>DP4 DP4>TP2 TP1>TP2xPP2 TP2xPP2>PP2xDP3 DP2>DP3 DP3>DP2 CP2xTP2>DP2xCP3"
CASES = sorted(
    {case for table in (WEIGHT_REFIT, MODEL_SPACE, DATA_PARALLEL, VIRTUAL_STAGES, OURS) for case in table.split()}
)


def model(case: str, **changes) -> Manifest:
    layers = 8 if "PP8" in case or "VPP" in case else 4
    return gpt(layers=layers, heads=8, groups=8, **changes)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("slots", [1, 4])
def test_a_layout_change_from_the_tables_gives_every_target_its_state(case, slots):
    before, _, after = case.partition(">")
    manifest = model(case)
    source = roster(before, slots=slots)
    move(manifest, source, roster(after, generation=1, slots=slots), regions_of(manifest, source))


@pytest.mark.parametrize("case", [case for case in CASES if "VPP" not in case])
def test_a_tied_embedding_and_several_buckets_move_as_well(case):
    before, _, after = case.partition(">")
    manifest = model(case, tied=True, rule=BucketRule(elements_max=3000))
    source = roster(before)
    move(manifest, source, roster(after, generation=1), regions_of(manifest, source))


@pytest.mark.parametrize(
    ("chain", "places"),
    [
        ("DP2 DP3 DP2", ([0, 1], [0, 1, 2], [0, 2])),
        ("TP2xPP2 PP3 TP2xPP2", ([0, 1, 2, 3], [3, 0, 2], [0, 2, 3, 4])),
        ("TP2 TP2xPP2 TP4xPP2 TP2xPP2 TP2", ([0, 1], [0, 1, 2, 3], range(8), [4, 5, 6, 7], [7, 4])),
        ("TP2xDP2 TP2xDP2", ([0, 1, 2, 3], [3, 2, 1, 0])),
        ("TP2xPP2 TP1xPP2xDP3", ([0, 1, 2, 3], [10, 11, 12, 13, 14, 15])),
        ("PP4 TP4", ([0, 1, 2, 3], [2, 0, 3, 1])),
        ("PP6xDP3 TP2xPP3xDP3 TP4xPP2", (range(18), [*range(5, 18), 30, 31, 32, 33, 34], range(20, 28))),
    ],
)
def test_members_may_join_leave_and_change_ranks_along_a_chain(chain, places):
    manifest = gpt(layers=12)
    rosters = [
        roster(layout, generation=number, order=list(order))
        for number, (layout, order) in enumerate(zip(chain.split(), places, strict=True))
    ]
    held = regions_of(manifest, rosters[0])
    for source, target in pairwise(rosters):
        held = move(manifest, source, target, held)
    back = move(manifest, rosters[-1], rosters[0], held)
    assert all(np.array_equal(a, b) for a, b in zip(back, regions_of(manifest, rosters[0]), strict=True))


def test_twenty_cycles_there_and_back_change_nothing():
    manifest = gpt()
    worlds = [roster("TP2xPP2"), roster("TP1xDP3", generation=1, order=[2, 5, 0])]
    start = held = regions_of(manifest, worlds[0])
    for cycle in range(20):
        held = move(manifest, worlds[cycle % 2], worlds[(cycle + 1) % 2], held)
    assert all(np.array_equal(a, b) for a, b in zip(start, held, strict=True))


def test_the_same_layout_on_the_same_members_is_one_local_copy():
    manifest = gpt()
    for rank in range(4):
        plan = plan_rank(manifest, roster("TP2xPP2"), roster("TP2xPP2", generation=1), rank)
        assert plan.remote == ()
        assert plan.local and plan.local.source_rank == rank
        assert all(run.source_offset == run.target_offset for run in plan.local.runs)


def test_a_column_split_matrix_goes_from_one_rank_to_two_in_one_strided_run_each():
    manifest = Manifest((spec("w", (1000, 64), 1, layer=0),), 1, KINDS)
    for rank in range(2):
        plan = plan_rank(manifest, roster("TP1"), roster("TP2", generation=1, first=5), rank)
        (transfer,) = plan.remote
        assert transfer.runs == (CopyRuns(32 * rank, 0, 32, count=1000, source_stride=64, target_stride=32),)


def test_gate_and_up_rows_are_put_back_in_their_own_halves():
    # TP2 -> TP1 of 8 rows of 2: rank 0 holds gate rows 0, 1 and up rows 4, 5; rank 1 holds 2, 3 and 6, 7.
    manifest = Manifest((spec("fc1", (8, 2), 0, blocks=2, layer=0),), 1, KINDS)
    plan = plan_rank(manifest, roster("TP2"), roster("TP1", generation=1, first=5), 0)
    assert [(transfer.source_rank, transfer.runs) for transfer in plan.remote] == [
        (0, (CopyRuns(0, 0, 4, count=2, source_stride=4, target_stride=8),)),
        (1, (CopyRuns(0, 4, 4, count=2, source_stride=4, target_stride=8),)),
    ]


def test_a_zero_range_that_ends_inside_a_row_is_followed_to_the_element():
    # 10 x 30 = 300 elements; DP2 pads to 384, rank 0 owns 192 = rows 0 to 5 and 12 elements of row 6; DP1 owns all.
    manifest = Manifest((spec("w", (10, 30), 0, layer=0),), 1, KINDS)
    plan = plan_rank(manifest, roster("DP2"), roster("DP1", generation=1, first=9), 0)
    assert [(t.source_rank, t.runs) for t in plan.remote] == [
        (0, (CopyRuns(0, 0, 192),)),
        (1, (CopyRuns(0, 192, 108),)),
    ]


# Sizes of one-dimensional shards before and after, from `test_serialization.py`; zero is a rank that holds nothing.
UNEVEN = [
    ([3] * 8, [1] * 6 + [2, 16]),
    ([1, 5, 7, 3, 6, 2, 5, 4], [14, 3, 6, 3, 1, 1, 2, 3]),
    ([5] * 6 + [0, 0], [5, 0, 5, 0, 5, 5, 3, 7]),
    ([15] + [0] * 7, [0, 0, 0] + [3] * 5),
]


@pytest.mark.parametrize(("before", "after"), UNEVEN)
@pytest.mark.parametrize("change", ["PP8>DP8", "DP8>PP8", "PP4xDP2>PP2xDP4", "DP5>PP4xDP2"])
def test_uneven_vectors_are_cut_wherever_the_shards_fall(before, after, change):
    sizes = [size * 37 for size in (*before, *after) if size]
    layers = 8
    parameters = tuple(
        spec(f"layers.{index % layers}.v{index // layers}", (size,), layer=index % layers, order=index // layers)
        for index, size in enumerate(sizes)
    )
    manifest = Manifest(parameters, layers, KINDS, BucketRule(align_elements=1, end_multiple=1))
    first, _, second = change.partition(">")
    source = roster(first)
    move(manifest, source, roster(second, generation=1), regions_of(manifest, source))


@pytest.mark.parametrize("vocab", [17, 127, 128, 31123])
def test_a_padded_vocabulary_keeps_its_padding_rows(vocab):
    # Fixed for the job's life: the least common multiple of the allowed TP sizes and 1.
    padded = -(-vocab // 8) * 8
    manifest = gpt(hidden=8, heads=8, groups=8, vocab=padded)
    source = roster("PP4xDP2")
    move(manifest, source, roster("TP8", generation=1), regions_of(manifest, source))


def test_plans_depend_on_nothing_but_their_inputs():
    manifest, source, target = gpt(), roster("TP2xPP2xDP2", slots=3), roster("TP4xDP3", generation=1, slots=3, first=2)
    assert all_plans(manifest, source, target) == all_plans(manifest, source, target)
