"""Rank order, groups and text form of parallel layouts; hand-computed. Megatron's own account is in another file."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from liver_core.layout import Coordinates, LayoutError, MessageError, ParallelLayout, from_json, to_json
from liver_core.layout.parallel import BufferClass

sizes = st.integers(1, 4)


@given(tp=sizes, cp=sizes, dp=sizes, pp=sizes)
def test_rank_and_coordinates_are_inverse(tp, cp, dp, pp):
    layout = ParallelLayout(tp=tp, cp=cp, dp=dp, pp=pp)
    for rank in range(layout.world_size):
        at = layout.coordinates(rank)
        assert layout.rank_of(tp=at.tp, cp=at.cp, dp=at.dp, pp=at.pp) == rank


def test_tensor_parallel_ranks_are_neighbours_and_pipeline_stages_are_far_apart():
    layout = ParallelLayout(tp=2, pp=3, dp=2)
    assert layout.coordinates(0) == Coordinates(tp=0, cp=0, dp=0, pp=0)
    assert layout.coordinates(1) == Coordinates(tp=1, cp=0, dp=0, pp=0, etp=1)
    assert layout.coordinates(2) == Coordinates(tp=0, cp=0, dp=1, pp=0, edp=1)
    assert layout.coordinates(11) == Coordinates(tp=1, cp=0, dp=1, pp=2, etp=1, edp=1)
    assert layout.groups("tp") == ((0, 1), (2, 3), (4, 5), (6, 7), (8, 9), (10, 11))
    assert layout.groups("pp") == ((0, 4, 8), (1, 5, 9), (2, 6, 10), (3, 7, 11))
    assert layout.groups("dp") == ((0, 2), (1, 3), (4, 6), (5, 7), (8, 10), (9, 11))
    assert layout.groups("tp-pp") == ((0, 1, 4, 5, 8, 9), (2, 3, 6, 7, 10, 11))


def test_the_order_of_names_in_a_group_token_does_not_matter():
    layout = ParallelLayout(tp=2, cp=3, dp=2, pp=2)
    assert layout.groups("dp-cp") == layout.groups("cp-dp")


def test_a_layout_is_written_with_its_three_main_axes_and_whatever_else_is_used():
    assert str(ParallelLayout(tp=2, pp=2)) == "TP2xPP2xDP1"
    assert str(ParallelLayout(tp=2, pp=2, cp=2, vpp=2, ep=2)) == "TP2xPP2xDP1xCP2xEP2xVPP2"
    assert str(ParallelLayout(tp=2, ep=2, etp=1)) == "TP2xPP1xDP1xEP2xETP1"


def test_etp_is_as_tp_unless_it_is_said_to_be_another_with_ep():
    assert ParallelLayout(tp=2, dp=2, ep=2).expert_tp == 2
    assert ParallelLayout(tp=2, dp=2, ep=2, etp=2) == ParallelLayout(tp=2, dp=2, ep=2)
    # What every record of a dense job says, and what was never meant.
    assert from_json(ParallelLayout, {"tp": 2, "ep": 1, "etp": 1}) == ParallelLayout(tp=2)
    with pytest.raises(LayoutError, match=r"^etp: ETP1 needs EP above 1: without it experts are cut as TP cuts"):
        ParallelLayout.parse("TP2xETP1")


def test_experts_have_a_grid_of_their_own_over_the_ranks_of_a_stage():
    layout = ParallelLayout(tp=2, cp=2, dp=2, pp=2, ep=2, etp=1)
    assert (layout.stage_size, layout.expert_dp) == (8, 4)
    at = layout.coordinates(13)
    assert (at.pp, at.etp, at.ep, at.edp) == (1, 0, 1, 2)
    assert layout.owner(BufferClass.EXPERT, cut=0, ep=1, shard=2, pp=1) == 13
    assert layout.owner(BufferClass.DENSE, cut=at.tp, shard=layout.shard(BufferClass.DENSE, at), pp=1) == 13


@given(tp=sizes, cp=sizes, dp=sizes, pp=sizes)
def test_text_and_json_come_back_as_the_same_layout(tp, cp, dp, pp):
    layout = ParallelLayout(tp=tp, cp=cp, dp=dp, pp=pp)
    assert ParallelLayout.parse(str(layout)) == layout
    assert from_json(ParallelLayout, to_json(layout)) == layout


def test_a_layout_may_have_as_many_ranks_as_there_can_be_and_not_one_more():
    assert ParallelLayout(tp=8, dp=16_384).world_size == 131_072
    with pytest.raises(LayoutError, match=r"world_size: .* 131073 exceeds 131072 ranks"):
        ParallelLayout(pp=3, dp=43_691)


@pytest.mark.parametrize("text", ["TP2xPP2", "tp2 pp2", "TP=2,PP=2,DP=1", "PP2xTP2"])
def test_people_may_write_a_layout_in_several_ways(text):
    assert ParallelLayout.parse(text) == ParallelLayout(tp=2, pp=2)


@pytest.mark.parametrize(
    ("make", "field", "rule"),
    [
        (lambda: ParallelLayout(tp=0), "tp", "at least 1"),
        (lambda: ParallelLayout(dp=True), "dp", "an integer"),
        (lambda: ParallelLayout(tp=400, dp=400), "world_size", "160000"),
        (lambda: ParallelLayout(vpp=2), "vpp", "more than one pipeline stage"),
        (lambda: ParallelLayout(tp=2, dp=3, ep=4), "ep", "6 ranks of a stage"),
        (lambda: ParallelLayout(pp="2"), "pp", "an integer"),  # type: ignore[arg-type]
        (lambda: ParallelLayout(tp=2, dp=3, ep=2, etp=4), "ep", "6 ranks of a stage"),
        (lambda: ParallelLayout().coordinates(1), "rank", "1 is not in 0..0"),
        (lambda: ParallelLayout(tp=2).coordinates(-1), "rank", "-1 is not in 0..1"),
        (lambda: ParallelLayout(tp=2).rank_of(tp=2), "tp", "position 2 is not in 0..1 of TP2xPP1xDP1"),
        (lambda: ParallelLayout(dp=2).rank_of(dp=-1), "dp", "position -1"),
        (lambda: ParallelLayout().groups("zz"), "axes", "zz"),
        (lambda: ParallelLayout.parse("TP2xQQ3"), "layout", "QQ3"),
        (lambda: ParallelLayout.parse(""), "layout", "TP2xPP2xDP1"),
        (lambda: ParallelLayout.parse("TP2xTP2"), "layout", "twice"),
        (lambda: from_json(ParallelLayout, {"tp": "2"}), "tp", "must be a valid integer, is '2'"),
        (lambda: from_json(ParallelLayout, {"tpp": 2}), "tpp", "is not a field"),
        (lambda: from_json(ParallelLayout, {"tp": 2, "dp": 3, "ep": 4}), "ep", "6 ranks of a stage"),
        (lambda: from_json(ParallelLayout, []), "message", "list"),
    ],
)
def test_a_bad_layout_is_refused_naming_field_and_rule(make, field, rule):
    with pytest.raises((LayoutError, MessageError)) as error:
        make()
    assert error.value.field == field
    assert rule in error.value.rule
