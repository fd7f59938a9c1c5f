"""Planning stays rank-local: one rank's share of a large change takes well under a second, whatever the world's size.

The bounds are on processor time, so that a busy machine fails nothing, and wide; the figures that people quote come
from a benchmark.
"""

import pytest

from liver_core.layout import Manifest, Roster
from liver_core.layout.limits import RANKS_MAX
from liver_core.reshard import (
    boxes_given,
    boxes_kept,
    missing_bytes,
    place,
    plan_after_rescue,
    plan_rank,
    plan_rescue,
)
from liver_core.reshard.seating import NodeSlots
from tests.liver_core.layout.expert_models import deepseek_671b
from tests.liver_core.layout.models import KINDS, roster, spec
from tests.liver_core.own_time import at_most
from tests.liver_core.reshard.checker import check_rank_plan

SECONDS_MAX = 1.0
CHANGES = ["TP8xPP8xDP16>TP4xPP16xDP16", "TP8xPP8xDP16>TP8xPP4xDP32", "DP1024>TP8xPP8xDP16", "TP8xPP8xDP16>DP1024",
           "TP2xPP32xDP16>TP16xDP64", "TP8xPP8xDP15>TP4xPP16xDP15"]  # fmt: skip


def large_model() -> Manifest:
    """1026 parameters in 64 layers, 14 billion elements."""
    hidden, ffn, vocab = 4096, 14336, 131072
    found = [spec("embedding", (vocab, hidden), 0, place="first")]
    for layer in range(64):
        rows = [
            ((3 * hidden, hidden), 0, 1),
            ((hidden, hidden), 1, 1),
            ((2 * ffn, hidden), 0, 2),
            ((hidden, ffn), 1, 1),
        ]
        rows += [((3 * hidden,), 0, 1), ((2 * ffn,), 0, 2)] + [((hidden,), None, 1)] * 10
        for order, (shape, dim, blocks) in enumerate(rows):
            found.append(spec(f"layers.{layer}.p{order}", shape, dim, blocks=blocks, layer=layer, order=order))
    found.append(spec("output", (vocab, hidden), 0, place="last"))
    return Manifest(tuple(found), 64, KINDS)


@pytest.fixture(scope="module")
def model() -> Manifest:
    return large_model()


def plan_and_check(manifest: Manifest, source: Roster, target: Roster, rank: int) -> None:
    with at_most(SECONDS_MAX):
        plan = plan_rank(manifest, source, target, rank)
    check_rank_plan(manifest, source, target, plan)
    assert plan.remote_elements == missing_bytes(manifest, source, target, rank, kinds=("master",)) // 4


@pytest.mark.parametrize("case", CHANGES)
def test_one_share_of_a_thousand_ranks_and_a_thousand_parameters_is_planned_within_a_second(case, model):
    before, _, after = case.partition(">")
    source, target = roster(before, slots=8), roster(after, generation=1, slots=8, first=8)
    assert len(model.parameters) >= 1000
    assert source.layout.world_size >= 960
    plan_and_check(model, source, target, target.layout.world_size // 3)


def test_a_hundred_times_the_world_does_not_make_a_share_dearer(model):
    source = roster("TP8xPP16xDP1024", slots=8)
    target = roster("TP8xPP8xDP2048", generation=1, slots=8, first=8)
    assert source.layout.world_size == RANKS_MAX
    plan_and_check(model, source, target, 5000)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("TP2xPP16xDP4096xEP64xETP1", "TP2xPP16xDP4064xEP64xETP1"),
        ("TP1xPP16xDP128xEP64", "TP1xPP16xDP96xEP32"),
        ("TP2xPP8xDP64xEP32xVPP4xETP1", "TP1xPP4xDP192xEP64xVPP4"),
    ],
)
def test_a_share_of_a_model_with_thirty_thousand_parameters_is_planned_within_a_second(before, after):
    experts = deepseek_671b()
    source, target = roster(before, slots=8), roster(after, generation=1, slots=8, first=8)
    assert len(experts.parameters) == 32_000
    plan_and_check(experts, source, target, target.layout.world_size // 3)


def test_one_rank_that_takes_everything_from_a_thousand_is_planned_within_seconds(model):
    # The worst share there is: 14 billion elements from 1024 ranks.
    source, target = roster("TP8xPP8xDP16", slots=8), roster("TP1", generation=1, slots=8)
    with at_most(5 * SECONDS_MAX):
        plan = plan_rank(model, source, target, 0)
    assert len(plan.remote) == 1023
    assert sum(len(transfer.runs) for transfer in plan.transfers) < 10_000


def test_a_column_split_of_a_large_model_stays_compressed(model):
    source, target = roster("TP1xPP64", slots=8), roster("TP8xPP64", generation=1, slots=8, first=600)
    plan = plan_rank(model, source, target, 100)
    assert sum(len(transfer.runs) for transfer in plan.transfers) <= 2 * 16


def test_a_thousand_ranks_are_placed_within_seconds(model):
    source = roster("TP8xPP8xDP16", slots=8)
    nodes = [NodeSlots(f"n{number}", 8) for number in range(120)]
    with at_most(5 * SECONDS_MAX):
        target = place(model, source, nodes, type(source.layout)(tp=8, pp=8, dp=15))
    assert target.layout.world_size == 960


@pytest.mark.parametrize(("after", "gone"), [("TP8xPP8xDP15", 64), ("TP8xPP8xDP8", 512)])
def test_what_leaves_a_thousand_ranks_is_shared_out_and_found_again_within_a_second(model, after, gone):
    size = roster(after).layout.world_size
    source = roster("TP8xPP8xDP16", slots=8)
    target = roster(after, generation=1, slots=8, order=list(range(gone, gone + size)))
    with at_most(SECONDS_MAX):
        rescue = plan_rescue(model, source, target)
        boxes_kept(model, source, rescue.kept_by(rescue.survivors[0]))
        boxes_given(model, source, rescue.given_by(rescue.leavers[0]))
        plan_after_rescue(model, source, target, size // 3, rescue)
    assert (len(rescue.leavers), len(rescue.survivors)) == (gone, 1024 - gone)
