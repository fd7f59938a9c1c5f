"""A model by its sizes, before anything is built: its manifest, and what its activations take. Pure.

The manifest is that of Megatron's dense GPT with gated units and without biases, which the reference job is. For other
models it is an estimate; a rank that has built one knows better.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache

from liver_core.layout import BucketRule, Manifest, ParallelLayout, ParameterSpec, StateKind
from liver_core.layout.manifest import DTYPE_BYTES, FLOAT32, GRAD, OF_PARAMETER
from liver_core.memory.memory_placement import MASTER

_KEPT = tuple(StateKind(name, FLOAT32) for name in (MASTER, "exp_avg", "exp_avg_sq"))


@dataclass(frozen=True, slots=True)
class TransformerShape:
    """Sizes by Megatron's names. `dtype`: of the weights, "float32" or "bfloat16". `is_tied`: one embedding serves as
    output layer too. `keeps_scores`: attention keeps its scores for the backward pass (no fused attention, no selective
    recompute). `is_sequence_parallel`: what tensor parallelism does not split is split over the sequence.
    `gradients_fp32`: else they have the dtype of the weights. `buckets`: how Megatron cuts its gradient buffer."""

    num_layers: int
    hidden_size: int
    num_attention_heads: int
    num_query_groups: int
    ffn_hidden_size: int
    padded_vocab_size: int
    seq_length: int
    dtype: str = "bfloat16"
    is_tied: bool = False
    keeps_scores: bool = False
    is_sequence_parallel: bool = True
    gradients_fp32: bool = True
    buckets: BucketRule = field(default=BucketRule())


@lru_cache(maxsize=64)
def manifest_of(shape: TransformerShape) -> Manifest:
    """Every parameter of the model, with Adam's moments."""
    hidden, ffn = shape.hidden_size, shape.ffn_hidden_size
    channels = hidden // shape.num_attention_heads
    qkv = (shape.num_attention_heads + 2 * shape.num_query_groups) * channels
    rows: tuple[tuple[str, tuple[int, ...], int | None, int], ...] = (
        ("input_layernorm.weight", (hidden,), None, 1),
        ("self_attention.linear_proj.weight", (hidden, hidden), 1, 1),
        ("self_attention.linear_qkv.weight", (qkv, hidden), 0, 1),
        ("pre_mlp_layernorm.weight", (hidden,), None, 1),
        ("mlp.linear_fc1.weight", (2 * ffn, hidden), 0, 2),
        ("mlp.linear_fc2.weight", (hidden, ffn), 1, 1),
    )
    dtype, table = shape.dtype, (shape.padded_vocab_size, hidden)
    found = [ParameterSpec("embedding.word_embeddings.weight", table, dtype, 0, 1, "first", -1, 0)]
    for layer in range(shape.num_layers):
        for order, (name, sizes, dim, blocks) in enumerate(rows):
            whole = f"decoder.layers.{layer}.{name}"
            found.append(ParameterSpec(whole, sizes, dtype, dim, blocks, "layer", layer, order))
    found.append(ParameterSpec("decoder.final_layernorm.weight", (hidden,), dtype, None, 1, "last", -1, 0))
    if not shape.is_tied:
        found.append(ParameterSpec("output_layer.weight", table, dtype, 0, 1, "last", -1, 1))
    gradients = StateKind(GRAD, FLOAT32 if shape.gradients_fp32 else OF_PARAMETER)
    return Manifest(tuple(found), shape.num_layers, (*_KEPT, gradients), shape.buckets)


def activation_bytes(
    shape: TransformerShape, layout: ParallelLayout, *, stage: int, micro_batch: int, micro_batches: int
) -> int:
    """What a rank of a stage keeps of its forward passes for the backward ones, at most.

    After Korthikanti and others, "Reducing Activation Recomputation in Large Transformer Models" (2022), equations 2
    and 4, with 1F1B: a stage holds as many micro-batches as there are stages from it on. The last one adds the logits,
    and their gradient, in fp32.
    """
    tokens = shape.seq_length * micro_batch
    split, whole = (34, 0) if shape.is_sequence_parallel else (24, 10)
    layer = tokens * shape.hidden_size * (split / layout.tp + whole) / layout.cp
    if shape.keeps_scores:
        layer += 5 * shape.num_attention_heads * shape.seq_length * tokens / layout.tp / layout.cp
    # The equations are for two bytes an element.
    layer *= DTYPE_BYTES[shape.dtype] / 2
    held = min(layout.pp - stage, micro_batches)
    logits = 8 * tokens * shape.padded_vocab_size / layout.tp / layout.cp if stage == layout.pp - 1 else 0
    return round(layer * shape.num_layers / layout.pp * held + logits)
