"""Which ranks hold the same elements: of what TP does not split, and of embeddings tied over a pipeline. Pure."""

from liver_core.layout.local_parameters import stages_of
from liver_core.layout.manifest import Manifest
from liver_core.layout.parallel import ParallelLayout


def copies_of(manifest: Manifest, layout: ParallelLayout, rank: int, tensor: str) -> tuple[int, ...]:
    """The ranks whose share of a tensor is the one that `rank` has, or would have on another stage; ascending.

    ZeRO-1 leaves no others: within a DP x CP group every element has one owner. Both copies of a tied embedding are in
    buckets of their own, so they are shared out alike.
    """
    at, spec = layout.coordinates(rank), manifest.parameter(tensor)
    tensor_parallel = range(layout.tp) if spec.tp_dim is None else (at.tp,)
    stages = stages_of(manifest, layout, spec)
    return tuple(layout.rank_of(tp=tp, cp=at.cp, dp=at.dp, pp=stage) for stage in stages for tp in tensor_parallel)


def copy_counts(manifest: Manifest, layout: ParallelLayout) -> dict[str, int]:
    """How many ranks hold each element, by parameter name; those of a tied copy are counted with its embedding."""
    return {spec.name: len(copies_of(manifest, layout, 0, spec.tensor)) for spec in manifest.parameters}
