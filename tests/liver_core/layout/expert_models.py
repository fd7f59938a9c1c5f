"""Models with experts at the sizes of published ones, by their parameters, for tests and benchmarks. Pure.

Layers have to divide by the stages here, so a model takes their number: the 94 of Qwen3-235B divide by 2 and the 61 of
DeepSeek-V3 by nothing, so 96 and 64 stand in for them where there are more stages. No multi-token prediction.
"""

from collections.abc import Callable
from functools import cache

from liver_core.layout import BucketRule, Manifest, ParameterSpec, StateKind
from liver_core.layout.manifest import FLOAT32, GRAD, OF_PARAMETER

BUCKETS = BucketRule(elements_max=40_000_000, elements_max_per_dp=1_000_000)
"""Megatron's own default."""
_KINDS = (*(StateKind(name, FLOAT32) for name in ("master", "exp_avg", "exp_avg_sq")), StateKind(GRAD, OF_PARAMETER))

Row = tuple[str, tuple[int, ...], int | None, int]
"""Name in its layer, unsharded shape, the dim that is split, and blocks of it. An expert's has {} for its number."""


@cache
def qwen_235b(layers: int = 94) -> Manifest:
    """Qwen3-235B-A22B: 128 experts in each layer, grouped-query attention."""
    hidden, channels, heads, groups = 4_096, 128, 64, 4
    rows: list[Row] = [
        ("input_layernorm.weight", (hidden,), None, 1),
        ("self_attention.linear_proj.weight", (hidden, heads * channels), 1, 1),
        ("self_attention.linear_qkv.weight", ((heads + 2 * groups) * channels, hidden), 0, 1),
        ("self_attention.q_layernorm.weight", (channels,), None, 1),
        ("self_attention.k_layernorm.weight", (channels,), None, 1),
        ("pre_mlp_layernorm.weight", (hidden,), None, 1),
        ("mlp.router.weight", (128, hidden), None, 1),
        *_gated("mlp.experts", hidden, 1_536, number="{}"),
    ]
    return _model(layers, lambda layer: rows, hidden=hidden, vocab=151_936, experts=128)


@cache
def deepseek_671b(layers: int = 64) -> Manifest:
    """DeepSeek-V3: three dense layers, then 256 experts and a shared one in each; compressed keys and queries."""
    hidden, heads, query, key_value, rotary = 7_168, 128, 1_536, 512, 64
    attention: list[Row] = [
        ("input_layernorm.weight", (hidden,), None, 1),
        ("self_attention.linear_proj.weight", (hidden, heads * 128), 1, 1),
        ("self_attention.linear_q_down_proj.weight", (query, hidden), None, 1),
        ("self_attention.linear_q_up_proj.weight", (heads * (128 + rotary), query), 0, 1),
        ("self_attention.linear_kv_down_proj.weight", (key_value + rotary, hidden), None, 1),
        ("self_attention.linear_kv_up_proj.weight", (heads * 256, key_value), 0, 1),
        ("self_attention.q_layernorm.weight", (query,), None, 1),
        ("self_attention.kv_layernorm.weight", (key_value,), None, 1),
        ("pre_mlp_layernorm.weight", (hidden,), None, 1),
    ]
    dense = [*attention, *_gated("mlp", hidden, 18_432)]
    routed = [
        *attention,
        ("mlp.router.weight", (256, hidden), None, 1),
        *_gated("mlp.experts", hidden, 2_048, number="{}"),
        *_gated("mlp.shared_experts", hidden, 2_048),
    ]
    return _model(layers, lambda layer: dense if layer < 3 else routed, hidden=hidden, vocab=129_280, experts=256)


def _gated(module: str, hidden: int, ffn: int, *, number: str = "") -> list[Row]:
    fc1, fc2 = (2 * ffn, hidden), (hidden, ffn)
    return [(f"{module}.linear_fc1.weight{number}", fc1, 0, 2), (f"{module}.linear_fc2.weight{number}", fc2, 1, 1)]


def _model(layers: int, rows_of: Callable[[int], list[Row]], *, hidden: int, vocab: int, experts: int) -> Manifest:
    table, dtype = (vocab, hidden), "bfloat16"
    found = [ParameterSpec("embedding.word_embeddings.weight", table, dtype, 0, 1, "first", -1, 0)]
    for layer in range(layers):
        for position, (name, shape, dim, blocks) in enumerate(rows_of(layer)):
            whole = f"decoder.layers.{layer}.{name}"
            if "{}" not in name:
                found.append(ParameterSpec(whole, shape, dtype, dim, blocks, "layer", layer, position))
                continue
            for expert in range(experts):
                named = whole.format(expert)
                one = ParameterSpec(named, shape, dtype, dim, blocks, "layer", layer, 0, expert=expert, slot=position)
                found.append(one)
    found.append(ParameterSpec("decoder.final_layernorm.weight", (hidden,), dtype, None, 1, "last", -1, 0))
    found.append(ParameterSpec("output_layer.weight", table, dtype, 0, 1, "last", -1, 1))
    return Manifest(tuple(found), layers, _KINDS, BUCKETS)
