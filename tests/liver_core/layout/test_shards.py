"""ZeRO-1 shards and resident boxes: hand-computed cases, and random ones against the numpy oracle."""

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings

from liver_core.layout import (
    BucketRule,
    Manifest,
    ParallelLayout,
    local_parameters,
    local_to_global_boxes,
    region_numel,
    resident_boxes,
    shard_ranges,
)
from liver_core.layout.layout_error import LayoutError
from liver_core.layout.shards import check_share
from tests.liver_core.layout.models import KINDS, gpt, moe, spec, worlds
from tests.liver_core.layout.oracle import element_ids, rank_region

BOUNDED = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])


@BOUNDED
@given(world=worlds(1))
def test_resident_boxes_say_exactly_what_every_place_of_the_region_holds(world):
    manifest, layout = world
    ids = element_ids(manifest)
    for rank in range(layout.world_size):
        expected = rank_region(manifest, layout, rank)
        region = np.full(region_numel(manifest, layout, rank), -1)
        for resident in resident_boxes(manifest, layout, rank):
            box = resident.box
            values = ids[resident.parameter][tuple(map(slice, box.start, box.stop))].reshape(-1)
            assert (region[resident.offset : resident.offset + box.numel] == -1).all()
            region[resident.offset : resident.offset + box.numel] = values
        assert np.array_equal(region, expected)


@BOUNDED
@given(world=worlds(1))
def test_the_shards_of_a_world_hold_every_element_once_for_every_replica(world):
    manifest, layout = world
    shards = [shard_ranges(manifest, layout, rank) for rank in range(layout.world_size)]
    owned = sum(parameter.numel for each in shards for parameter in each.parameters)
    copies = sum(
        spec.numel * (1 if spec.tp_dim is not None else layout.expert_tp if spec.is_expert else layout.tp)
        for spec in manifest.parameters
        if not (spec.tied_to and layout.pp == 1)
    )
    assert owned == copies


def test_a_layout_in_which_a_rank_owns_nothing_is_refused_for_that_rank():
    manifest = Manifest((spec("a", (40,), layer=0), spec("b", (500,), place="last")), 1, KINDS)
    layout = ParallelLayout.parse("DP3")
    check_share(manifest, layout, 1)
    with pytest.raises(LayoutError, match=r"^layout: rank 2 of TP1xPP1xDP3 owns no element of its stage"):
        check_share(Manifest(manifest.parameters[:1], 1, KINDS), layout, 2)


def test_two_matrices_and_a_vector_lie_in_reverse_order_aligned_and_padded():
    # Reverse order: c (10) at 0, b (100) at 64, a (3 x 50) at 192; end 342, padded to 384 = 3 x 128.
    manifest = Manifest(
        (
            spec("a", (3, 50), layer=0, order=0),
            spec("b", (100,), layer=0, order=1),
            spec("c", (10,), layer=0, order=2),
        ),
        1,
        KINDS,
    )
    layout = ParallelLayout(dp=2)
    first, second = shard_ranges(manifest, layout, 0), shard_ranges(manifest, layout, 1)
    assert [(p.name, p.param_start, p.param_stop, p.region_offset) for p in first.parameters] == [
        ("c", 0, 10, 0),
        ("b", 0, 100, 64),
    ]
    assert [(p.name, p.param_start, p.param_stop, p.region_offset) for p in second.parameters] == [("a", 0, 150, 0)]
    (bucket,) = second.buckets
    assert (bucket.numel, bucket.padded_numel, bucket.start, bucket.stop) == (342, 384, 192, 384)
    assert region_numel(manifest, layout, 0) == 192


def test_three_data_parallel_ranks_pad_the_end_to_a_multiple_of_384():
    manifest = Manifest((spec("a", (385,), layer=0),), 1, KINDS)
    shards = [shard_ranges(manifest, ParallelLayout(dp=3), rank) for rank in range(3)]
    assert [each.region_numel for each in shards] == [256, 256, 256]
    assert [[(p.param_start, p.param_stop) for p in each.parameters] for each in shards] == [
        [(0, 256)],
        [(256, 385)],
        [],
    ]


def test_context_parallel_ranks_share_the_shards_with_data_parallel_ranks():
    manifest = Manifest((spec("a", (512,), layer=0),), 1, KINDS)
    layout = ParallelLayout(dp=2, cp=2)
    starts = [shard_ranges(manifest, layout, layout.rank_of(cp=cp, dp=dp)).parameters[0].param_start
              for dp in range(2) for cp in range(2)]  # fmt: skip
    assert starts == [0, 128, 256, 384]


def test_a_bucket_closes_when_it_is_full_and_each_is_cut_on_its_own():
    rule = BucketRule(elements_max=150)
    manifest = Manifest(tuple(spec(f"p{i}", (100,), layer=0, order=i) for i in range(5)), 1, KINDS, rule)
    shards = shard_ranges(manifest, ParallelLayout(dp=2), 1)
    # p4 and p3 (0, 128) end at 228 >= 150; p2 and p1 likewise; p0 alone. Padded to 256, 256, 128.
    assert [(b.numel, b.padded_numel, b.region_offset) for b in shards.buckets] == [
        (228, 256, 0),
        (228, 256, 128),
        (100, 128, 256),
    ]
    assert [(p.name, p.param_start, p.region_offset) for p in shards.parameters] == [
        ("p3", 0, 0),
        ("p1", 0, 128),
        ("p0", 64, 256),
    ]


def test_a_bucket_that_holds_exactly_its_maximum_closes():
    manifest = Manifest(
        tuple(spec(f"p{order}", (100,), layer=0, order=order) for order in range(2)),
        1,
        KINDS,
        BucketRule(elements_max=100),
    )
    assert len(shard_ranges(manifest, ParallelLayout(), 0).buckets) == 2


def test_the_default_limit_of_a_bucket_grows_with_dp():
    rule = BucketRule(elements_max=100, elements_max_per_dp=100)
    manifest = Manifest(tuple(spec(f"p{i}", (64,), layer=0, order=i) for i in range(8)), 1, KINDS, rule)
    counts = [len(shard_ranges(manifest, ParallelLayout(dp=dp), 0).buckets) for dp in (1, 2, 4)]
    assert counts == [4, 2, 2], "at least 100, 200 and 400 elements, in parameters of 64"


def test_only_the_first_stage_and_chunk_has_more_than_one_bucket():
    manifest = gpt(layers=4, rule=BucketRule(elements_max=1))
    layout = ParallelLayout(pp=2, vpp=2)
    per_chunk = [[b.buffer.chunk for b in shard_ranges(manifest, layout, rank).buckets] for rank in range(2)]
    assert per_chunk[0].count(0) == 7
    assert per_chunk[0].count(1) == 1
    assert per_chunk[1] == [0, 1]


def test_padding_for_high_bandwidth_makes_every_bucket_a_multiple_of_65536():
    manifest = gpt(rule=BucketRule(high_bandwidth_padding=True))
    assert region_numel(manifest, ParallelLayout(), 0) % 2**16 == 0
    assert region_numel(manifest, ParallelLayout(dp=3), 0) * 3 % (3 * 2**16) == 0


def test_a_tied_embedding_has_a_bucket_of_its_own_on_both_ends_of_the_pipeline_and_none_with_one_stage():
    manifest, layout = gpt(tied=True), ParallelLayout(pp=2)
    first, last = shard_ranges(manifest, layout, 0), shard_ranges(manifest, layout, 1)
    assert len(first.buckets) == len(last.buckets) == 2
    assert last.parameters[0].tensor == "embedding.word_embeddings.weight"
    assert last.parameters[0].name == "output_layer.weight"
    assert first.parameters[-1].name == "embedding.word_embeddings.weight"
    alone = shard_ranges(manifest, ParallelLayout(), 0)
    assert "output_layer.weight" not in [p.name for p in alone.parameters]


def test_local_parameters_come_in_registration_order_with_local_shapes():
    names = [(p.name, p.shape) for p in local_parameters(gpt(), ParallelLayout(tp=2, pp=2), 3)]
    assert names[0] == ("decoder.layers.2.input_layernorm.weight", (32,))
    assert names[4] == ("decoder.layers.2.mlp.linear_fc1.weight", (64, 32))
    assert names[5] == ("decoder.layers.2.mlp.linear_fc2.weight", (32, 32))
    assert names[-2:] == [("decoder.final_layernorm.weight", (32,)), ("output_layer.weight", (64, 32))]


def test_virtual_stages_take_layers_in_turns():
    layout = ParallelLayout(pp=2, vpp=2)
    held = [
        sorted({(p.chunk, p.spec.layer) for p in local_parameters(gpt(), layout, r) if p.spec.layer >= 0})
        for r in (0, 1)
    ]
    assert held == [[(0, 0), (1, 2)], [(0, 1), (1, 3)]]


def test_gate_and_up_of_a_gated_unit_lie_apart_in_global_coordinates():
    # Global rows: gate 0..7, up 8..15. TP rank 1 of 2 holds gate 4..7 and up 12..15 as its local rows 0..7.
    fc1 = spec("fc1", (16, 2), 0, blocks=2, layer=0)
    boxes = local_to_global_boxes(fc1, 2, 1, 0, 16)
    assert [(str(box), offset) for box, offset in boxes] == [("[4:8, 0:2]", 0), ("[12:16, 0:2]", 8)]


def test_a_range_that_begins_inside_the_gate_and_ends_inside_the_up_half_is_cut_at_the_edge():
    fc1 = spec("fc1", (16, 2), 0, blocks=2, layer=0)
    boxes = local_to_global_boxes(fc1, 2, 1, 3, 11)
    assert [(str(box), offset) for box, offset in boxes] == [
        ("[5:6, 1:2]", 0),
        ("[6:8, 0:2]", 1),
        ("[12:13, 0:2]", 5),
        ("[13:14, 0:1]", 7),
    ]


@pytest.mark.parametrize(("tp", "box"), [(0, "[0:4, 0:3]"), (1, "[0:4, 3:6]")])
def test_a_column_split_is_a_narrow_box(tp, box):
    ((found, offset),) = local_to_global_boxes(spec("w", (4, 6), 1, layer=0), 2, tp, 0, 12)
    assert (str(found), offset) == (box, 0)


def test_experts_lie_with_the_others_without_ep_and_apart_behind_them_with_ep():
    manifest = moe(layers=2, dense_layers=1)
    together = shard_ranges(manifest, ParallelLayout(dp=2), 1)
    assert [(bucket.buffer.of, bucket.numel) for bucket in together.buckets] == [("dense", together.buckets[0].numel)]
    apart = shard_ranges(manifest, ParallelLayout(dp=4, ep=2), 3)
    assert [bucket.buffer.of for bucket in apart.buckets] == ["dense", "expert"]
    dense, experts = apart.buckets
    # Four ranks share the dense bucket, and the two with the experts 2 and 3 share theirs: rank 3 has its last half.
    assert (dense.start, dense.stop) == (3 * dense.padded_numel // 4, dense.padded_numel)
    assert (experts.numel, experts.start, experts.stop) == (2 * 3 * 48 * 32, 48 * 96, 2 * 48 * 96)
    held = [part.name.split(".experts.")[1] for part in apart.parameters if part.region_offset >= experts.region_offset]
    assert held == ["local_experts.2.linear_fc2.weight", "local_experts.2.linear_fc1.weight"]


def test_a_stage_without_experts_has_no_buckets_for_them():
    layout = ParallelLayout(pp=2, dp=2, ep=2)
    ends = [shard_ranges(moe(dense_layers=2), layout, rank).buckets for rank in (0, 2)]
    assert [[bucket.buffer.of for bucket in each] for each in ends] == [["dense"], ["dense", "expert"]]


@pytest.mark.parametrize(
    ("layout", "rule"),
    [
        ("DP3xEP3", "ep: EP3 does not divide the 4 experts of a layer"),
        ("TP4xEP2xETP2xDP1", ""),
        ("TP2xDP4xEP2xETP4", "etp: ETP4 is more than TP2, which was never tried"),
        ("TP2xEP2xETP1", ""),
    ],
)
def test_layouts_in_which_experts_cannot_be_cut_are_refused_by_name(layout, rule):
    wanted = ParallelLayout.parse(layout)
    if not rule:
        assert local_parameters(moe(), wanted, 0)
        return
    with pytest.raises(LayoutError, match=rule):
        local_parameters(moe(), wanted, 0)


def test_etp_other_than_tp_needs_ep_and_experts_need_a_model_with_them():
    # Megatron up to 0.18 does not sum the gradients of such experts over TP.
    with pytest.raises(LayoutError, match=r"^etp: ETP2 with TP4 needs EP above 1: .* use EP > 1 or ETP = TP"):
        local_parameters(moe(), ParallelLayout(tp=4, etp=2), 0)
    with pytest.raises(LayoutError, match=r"^ep: TP1xPP1xDP2xEP2 splits experts, and the model has none"):
        local_parameters(gpt(), ParallelLayout(dp=2, ep=2), 0)
