"""Which ranks hold the same elements: what TP or ETP does not split, and embeddings tied over a pipeline. Pure."""

from liver_core.layout.local_parameters import holder_ep, stages_of
from liver_core.layout.manifest import Manifest
from liver_core.layout.parallel import ParallelLayout


def copies_of(manifest: Manifest, layout: ParallelLayout, rank: int, tensor: str) -> tuple[int, ...]:
    """The ranks whose share of a tensor is the one that `rank` has, or would have on another stage; ascending.

    ZeRO-1 leaves no others: within a DP x CP group every element has one owner. Both copies of a tied embedding are in
    buckets of their own, so they are shared out alike.
    """
    at, spec = layout.coordinates(rank), manifest.parameter(tensor)
    of = layout.buffer_class(expert=spec.is_expert)
    whole, own = layout.cut(expert=spec.is_expert), layout.part(at, expert=spec.is_expert)
    cuts = range(whole) if spec.tp_dim is None else (own,)
    stages = stages_of(manifest, layout, spec)
    shard, ep = layout.shard(of, at), holder_ep(manifest, layout, spec)
    return tuple(layout.owner(of, cut=cut, shard=shard, ep=ep, pp=stage) for stage in stages for cut in cuts)


def copy_counts(manifest: Manifest, layout: ParallelLayout) -> dict[str, int]:
    """How many ranks hold each element, by parameter name; those of a tied copy are counted with its embedding."""
    return {
        spec.name: len(stages_of(manifest, layout, tensor)) * (1 if tensor.tp_dim is not None else cut)
        for spec in manifest.parameters
        for tensor in [manifest.parameter(spec.tensor)]
        for cut in [layout.cut(expert=spec.is_expert)]
    }
