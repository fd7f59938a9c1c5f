"""A model by its sizes, before anything is built: its manifest, and what its activations take. Pure.

The manifest is that of Megatron's GPT with gated units and without biases, dense or with experts, which the reference
job is. For other models it is an estimate; a rank that has built one knows better.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import lru_cache

from liver_core.layout import BucketRule, Manifest, ParallelLayout, ParameterSpec, StateKind
from liver_core.layout.experts import ExpertShape
from liver_core.layout.manifest import DTYPE_BYTES, FLOAT32, GRAD, OF_PARAMETER
from liver_core.memory.memory_placement import MASTER

_KEPT = tuple(StateKind(name, FLOAT32) for name in (MASTER, "exp_avg", "exp_avg_sq"))


@dataclass(frozen=True, slots=True)
class TransformerShape:
    """Sizes by Megatron's names. `dtype`: of the weights, "float32" or "bfloat16". `is_tied`: one embedding serves as
    output layer too. `keeps_scores`: attention keeps its scores for the backward pass (no fused attention, no selective
    recompute). `is_sequence_parallel`: what tensor parallelism does not split is split over the sequence.
    `gradients_fp32`: else they have the dtype of the weights. `buckets`: how Megatron cuts its gradient buffers.
    `experts`: None for a dense model."""

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
    experts: ExpertShape | None = None

    def sparse_layers(self, layout: ParallelLayout, stage: int) -> int:
        """How many layers of a pipeline stage have experts."""
        layers = self.num_layers // layout.pp
        return 0 if self.experts is None else sum(self.experts.layers[stage * layers : (stage + 1) * layers])


def manifest_of(shape: TransformerShape) -> Manifest:
    """Every parameter of the model, with Adam's moments."""
    return _manifest(shape, shape.experts.count if shape.experts else 0)


def counted_in(shape: TransformerShape, layout: ParallelLayout) -> Manifest:
    """The same for counting a rank's bytes in a layout: its experts of a layer are one, as large as all. A model may
    have tens of thousands, and a planner asks for thousands of layouts."""
    experts = shape.experts
    if experts is None or experts.count % layout.ep or experts.ffn % layout.expert_tp:
        return manifest_of(shape)
    return _manifest(shape, layout.ep)


@lru_cache(maxsize=64)
def _manifest(shape: TransformerShape, modules: int) -> Manifest:
    """The experts of a layer are in so many modules."""
    hidden, dtype = shape.hidden_size, shape.dtype
    table = shape.padded_vocab_size, hidden
    found = [ParameterSpec("embedding.word_embeddings.weight", table, dtype, 0, 1, "first", -1, 0)]
    for layer in range(shape.num_layers):
        found += _layer(shape, layer, modules)
    found.append(ParameterSpec("decoder.final_layernorm.weight", (hidden,), dtype, None, 1, "last", -1, 0))
    if not shape.is_tied:
        found.append(ParameterSpec("output_layer.weight", table, dtype, 0, 1, "last", -1, 1))
    gradients = StateKind(GRAD, FLOAT32 if shape.gradients_fp32 else OF_PARAMETER)
    return Manifest(tuple(found), shape.num_layers, (*_KEPT, gradients), shape.buckets)


def _layer(shape: TransformerShape, layer: int, modules: int) -> Iterator[ParameterSpec]:
    """In the order in which Megatron registers them: a router, then the experts, then the shared ones."""
    hidden, experts = shape.hidden_size, shape.experts
    qkv = (shape.num_attention_heads + 2 * shape.num_query_groups) * (hidden // shape.num_attention_heads)
    rows: list[_Row] = [
        ("input_layernorm.weight", (hidden,), None, 1),
        ("self_attention.linear_proj.weight", (hidden, hidden), 1, 1),
        ("self_attention.linear_qkv.weight", (qkv, hidden), 0, 1),
        ("pre_mlp_layernorm.weight", (hidden,), None, 1),
    ]
    if experts is None or not experts.layers[layer]:
        yield from _specs(shape, layer, [*rows, *_gated("mlp", hidden, shape.ffn_hidden_size)])
        return
    rows.append(("mlp.router.weight", (experts.count, hidden), None, 1))
    yield from _specs(shape, layer, rows)
    for number in range(modules):
        ffn = experts.ffn * experts.count // modules
        one = _gated(f"mlp.experts.local_experts.{number}", hidden, ffn)
        for spec in _specs(shape, layer, one):
            yield replace(spec, expert=number, slot=len(rows))
    if experts.shared_ffn:
        shared = _gated("mlp.shared_experts", hidden, experts.shared_ffn)
        yield from _specs(shape, layer, shared, first=len(rows) + 1)


_Row = tuple[str, tuple[int, ...], int | None, int]
"""Name inside a layer, shape, the dim that TP (or ETP) splits, blocks."""


def _gated(name: str, hidden: int, ffn: int) -> list[_Row]:
    """The two matrices of a gated unit."""
    return [(f"{name}.linear_fc1.weight", (2 * ffn, hidden), 0, 2), (f"{name}.linear_fc2.weight", (hidden, ffn), 1, 1)]


def _specs(shape: TransformerShape, layer: int, rows: list[_Row], *, first: int = 0) -> Iterator[ParameterSpec]:
    for order, (name, sizes, dim, blocks) in enumerate(rows, start=first):
        whole = f"decoder.layers.{layer}.{name}"
        yield ParameterSpec(whole, sizes, shape.dtype, dim, blocks, "layer", layer, order)


def activation_bytes(
    shape: TransformerShape, layout: ParallelLayout, *, stage: int, micro_batch: int, micro_batches: int
) -> int:
    """What a rank of a stage keeps of its forward passes for the backward ones, at most.

    After Korthikanti and others, "Reducing Activation Recomputation in Large Transformer Models" (2022), equations 2
    and 4, with 1F1B: a stage holds as many micro-batches as there are stages from it on. The last one adds the logits,
    and their gradient, in fp32. A layer with experts keeps, in place of the 16 bytes of a dense one's inner part, for
    each expert of a token that expert's input on each ETP rank, and both halves and the product of its gated unit.
    """
    tokens = shape.seq_length * micro_batch
    split, whole = (34, 0) if shape.is_sequence_parallel else (24, 10)
    layer = tokens * shape.hidden_size * (split / layout.tp + whole) / layout.cp
    if shape.keeps_scores:
        layer += 5 * shape.num_attention_heads * shape.seq_length * tokens / layout.tp / layout.cp
    layers = layer * shape.num_layers / layout.pp
    if shape.experts is not None:
        inner = 6 * (shape.experts.topk * shape.experts.ffn + shape.experts.shared_ffn)
        inputs = 2 * shape.experts.topk * shape.hidden_size * layout.expert_tp
        more = tokens * (inner + inputs - 16 * shape.hidden_size) / layout.tp / layout.cp
        layers += more * shape.sparse_layers(layout, stage)
    # The equations are for two bytes an element.
    layers *= DTYPE_BYTES[shape.dtype] / 2
    held = min(layout.pp - stage, micro_batches)
    logits = 8 * tokens * shape.padded_vocab_size / layout.tp / layout.cp if stage == layout.pp - 1 else 0
    return round(layers * held + logits)
