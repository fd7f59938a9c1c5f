"""A model by its sizes: each parameter with its place, and the activations of a rank, worked out by hand."""

from dataclasses import replace

import pytest

from liver_core.layout import BucketRule, Manifest, ParallelLayout, ParameterSpec, StateKind
from liver_core.layout.experts import ExpertShape
from liver_core.memory.memory_placement import areas
from liver_core.memory.transformer_shape import TransformerShape, activation_bytes, counted_in, manifest_of

# Four heads of three channels; two layers.
SHAPE = TransformerShape(2, 12, 4, 1, 20, 64, 16)
# Sixteen positions, eight channels, two layers a stage.
ACTIVE = TransformerShape(4, 8, 4, 4, 16, 32, 16)
SPARSE = replace(ACTIVE, experts=ExpertShape(4, 5, 2, (False, False, True, True), shared_ffn=7))
TP2_PP2 = ParallelLayout(tp=2, pp=2)


def test_every_parameter_of_a_small_model_by_hand():
    def layer(number: int) -> tuple[ParameterSpec, ...]:
        name = f"decoder.layers.{number}."
        return (
            ParameterSpec(f"{name}input_layernorm.weight", (12,), "bfloat16", None, 1, "layer", number, 0),
            ParameterSpec(f"{name}self_attention.linear_proj.weight", (12, 12), "bfloat16", 1, 1, "layer", number, 1),
            # Four heads of queries, and one group of keys and one of values, of three channels each: 6 x 3.
            ParameterSpec(f"{name}self_attention.linear_qkv.weight", (18, 12), "bfloat16", 0, 1, "layer", number, 2),
            ParameterSpec(f"{name}pre_mlp_layernorm.weight", (12,), "bfloat16", None, 1, "layer", number, 3),
            # The gate above the unit that it gates, of twenty rows each.
            ParameterSpec(f"{name}mlp.linear_fc1.weight", (40, 12), "bfloat16", 0, 2, "layer", number, 4),
            ParameterSpec(f"{name}mlp.linear_fc2.weight", (12, 20), "bfloat16", 1, 1, "layer", number, 5),
        )

    kinds = tuple(StateKind(name, "float32") for name in ("master", "exp_avg", "exp_avg_sq", "grad"))
    first = ParameterSpec("embedding.word_embeddings.weight", (64, 12), "bfloat16", 0, 1, "first", -1, 0)
    norm = ParameterSpec("decoder.final_layernorm.weight", (12,), "bfloat16", None, 1, "last", -1, 0)
    head = ParameterSpec("output_layer.weight", (64, 12), "bfloat16", 0, 1, "last", -1, 1)
    # Compared as text too, in which 18 is not 18.0.
    whole = Manifest((first, *layer(0), *layer(1), norm, head), 2, kinds, BucketRule())
    assert manifest_of(SHAPE) == whole and repr(manifest_of(SHAPE)) == repr(whole)
    tied = manifest_of(replace(SHAPE, is_tied=True))
    assert tied.parameters == (first, *layer(0), *layer(1), norm)
    rule = BucketRule(elements_max=300)
    other = manifest_of(replace(SHAPE, dtype="float32", buckets=rule))
    assert other.bucket_rule == rule and {spec.dtype for spec in other.parameters} == {"float32"}


def test_a_layer_with_experts_has_a_router_the_experts_and_then_the_shared_ones():
    sparse = manifest_of(replace(SHAPE, experts=ExpertShape(2, 8, 1, (False, True), shared_ffn=6)))
    dense = manifest_of(SHAPE)
    assert [spec for spec in sparse.parameters if spec.layer != 1] == [
        spec for spec in dense.parameters if spec.layer != 1
    ]

    def expert(number: int) -> tuple[ParameterSpec, ...]:
        at = f"decoder.layers.1.mlp.experts.local_experts.{number}."
        fc1 = ParameterSpec(f"{at}linear_fc1.weight", (16, 12), "bfloat16", 0, 2, "layer", 1, 0, expert=number, slot=5)
        fc2 = ParameterSpec(f"{at}linear_fc2.weight", (12, 8), "bfloat16", 1, 1, "layer", 1, 1, expert=number, slot=5)
        return fc1, fc2

    mlp = "decoder.layers.1.mlp."
    assert [spec for spec in sparse.in_layer(1, range(2)) if "mlp." in spec.name and "norm" not in spec.name] == [
        ParameterSpec(f"{mlp}router.weight", (2, 12), "bfloat16", None, 1, "layer", 1, 4),
        *expert(0),
        *expert(1),
        ParameterSpec(f"{mlp}shared_experts.linear_fc1.weight", (12, 12), "bfloat16", 0, 2, "layer", 1, 6),
        ParameterSpec(f"{mlp}shared_experts.linear_fc2.weight", (12, 6), "bfloat16", 1, 1, "layer", 1, 7),
    ]


@pytest.mark.parametrize("text", ["DP2", "DP4xEP2", "TP2xPP2xDP2xEP4xETP1", "TP2xDP2xEP2", "PP2xDP4xEP4"])
def test_counting_the_experts_of_a_rank_as_one_gives_as_many_bytes(text):
    # Sizes as of real models, which Megatron's alignment leaves alone.
    shape = TransformerShape(2, 64, 4, 4, 128, 256, 16, experts=ExpertShape(8, 64, 2, (False, True), shared_ffn=64))
    layout = ParallelLayout.parse(text)
    few, every = counted_in(shape, layout), manifest_of(shape)
    assert len(few.parameters) < len(every.parameters)
    for stage in range(layout.pp):
        assert areas(few, layout, stage) == areas(every, layout, stage)


@pytest.mark.parametrize(
    ("shape", "layout", "stage", "micro_batches", "expected"),
    [
        # 48 positions of 8 channels, 34 bytes each, split over two ranks: 6528 bytes a layer; two layers, held twice.
        (ACTIVE, TP2_PP2, 0, 5, 2 * 2 * 6528),
        (ACTIVE, TP2_PP2, 0, 1, 2 * 1 * 6528),
        # Held once by the last stage, with 8 bytes for each of 48 x 32 / 2 logits.
        (ACTIVE, TP2_PP2, 1, 5, 2 * 1 * 6528 + 6144),
        # Without sequence parallelism 10 of the 34 bytes are on both ranks: 48 x 8 x (24 / 2 + 10).
        (replace(ACTIVE, is_sequence_parallel=False), TP2_PP2, 0, 5, 2 * 2 * 8448),
        # Scores: five bytes for each of 4 heads x 16 x 48, split over two ranks: 7680 a layer.
        (replace(ACTIVE, keeps_scores=True), TP2_PP2, 0, 5, 2 * 2 * (6528 + 7680)),
        # Four bytes an element instead of two; the logits are of fp32 already.
        (replace(ACTIVE, dtype="float32"), TP2_PP2, 1, 5, 2 * 2 * 6528 + 6144),
        # The sequence split over three ranks: a third of everything, 13056 / 3 and 12288 / 3 and 15360 / 3; one stage.
        (replace(ACTIVE, keeps_scores=True), ParallelLayout(cp=3), 0, 5, 4 * (4352 + 5120) + 4096),
        # Four stages of one layer: each holds as many micro-batches as there are stages from it on.
        *((ACTIVE, ParallelLayout(pp=4), stage, 9, (4 - stage) * 13056) for stage in range(3)),
        (ACTIVE, ParallelLayout(pp=4), 3, 9, 13056 + 12288),
        # Experts in the second stage's layers only. For each of 48 positions 8 channels x (34 - 16) = 144 bytes, of two
        # experts' and the shared unit of 5 and 7: 6 x (2 x 5 + 7) = 102, and 2 x 2 x 8 = 32 of inputs on each of ETP.
        (SPARSE, TP2_PP2, 0, 5, 2 * 2 * 6528),
        (SPARSE, TP2_PP2, 1, 5, 2 * 48 * (144 + 102 + 2 * 32) // 2 + 6144),
        (SPARSE, ParallelLayout(tp=2, pp=2, ep=2, etp=1), 1, 5, 2 * 48 * (144 + 102 + 32) // 2 + 6144),
        (SPARSE, ParallelLayout(pp=2, dp=2, ep=2), 1, 5, 2 * 48 * (144 + 102 + 32) + 12288),
    ],
)
def test_the_activations_of_a_rank_by_hand(shape, layout, stage, micro_batches, expected):
    found = activation_bytes(shape, layout, stage=stage, micro_batch=3, micro_batches=micro_batches)
    assert found == expected and isinstance(found, int)
