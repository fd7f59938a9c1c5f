"""Which parameters a rank holds, in the order in which Megatron registers them. Pure.

Registration order is that of `GPTModel.named_parameters()`: what comes before the layers, the layers of the stage,
what comes after; with virtual stages the model chunks one after another. It decides where a parameter lies in the
gradient buffer, and so which ZeRO-1 rank owns it.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from math import prod

from liver_core.layout.fit import check_fits
from liver_core.layout.manifest import Manifest, ParameterSpec, Place
from liver_core.layout.parallel import ParallelLayout


@dataclass(frozen=True, slots=True)
class LocalParameter:
    """One parameter as one rank holds it: `shape` is that of its TP (or ETP) part, `chunk` the model chunk (VPP), else
    0."""

    spec: ParameterSpec
    shape: tuple[int, ...]
    chunk: int

    @property
    def name(self) -> str:
        """Logical name, with the global layer number."""
        return self.spec.name

    @property
    def numel(self) -> int:
        """Elements of the local shard."""
        return prod(self.shape)


def local_parameters(manifest: Manifest, layout: ParallelLayout, rank: int) -> tuple[LocalParameter, ...]:
    """The parameters of `rank` in registration order. Raises LayoutError when the model does not fit the layout."""
    at = layout.coordinates(rank)
    return stage_parameters(manifest, layout, at.pp, at.ep)


def stage_parameters(manifest: Manifest, layout: ParallelLayout, stage: int, ep: int = 0) -> tuple[LocalParameter, ...]:
    """The parameters of any rank of a pipeline stage with that share of the experts: all have the same local shapes,
    whatever the share."""
    return _stage_parameters(manifest, layout, stage, ep if manifest.num_experts else 0)


@lru_cache(maxsize=512)
def _stage_parameters(manifest: Manifest, layout: ParallelLayout, stage: int, ep: int) -> tuple[LocalParameter, ...]:
    _check_once(manifest, layout)
    held = range(ep * (share := experts_each(manifest, layout)), (ep + 1) * share)
    return tuple(
        LocalParameter(spec=spec, shape=spec.local_shape(layout.cut(expert=spec.is_expert)), chunk=chunk)
        for chunk in range(layout.vpp)
        for spec in _chunk_specs(manifest, layout, stage, chunk, held)
    )


_check_once = lru_cache(maxsize=512)(check_fits)


def experts_each(manifest: Manifest, layout: ParallelLayout) -> int:
    """How many experts of a layer a rank has; 0 where the model has none."""
    return manifest.num_experts // layout.ep


def stages_of(manifest: Manifest, layout: ParallelLayout, spec: ParameterSpec) -> tuple[int, ...]:
    """The pipeline stages that hold the elements of a parameter; several only for a tied embedding."""
    last = layout.pp - 1
    if spec.tied_to:
        return (0, last) if last else (0,)
    match Place(spec.place):
        case Place.FIRST:
            return (0, last) if last and manifest.has_copy(spec.name) else (0,)
        case Place.LAST:
            return (last,)
        case Place.LAYER:
            return (stage_of_layer(manifest, layout, spec.layer),)


def stage_of_layer(manifest: Manifest, layout: ParallelLayout, layer: int) -> int:
    """The pipeline stage that has a layer. Chunk v of stage p starts at layer (v * PP + p) * layers per chunk
    (Megatron's transformer_block.get_num_layers_to_build and transformer_layer.get_transformer_layer_offset)."""
    return layer // (manifest.num_layers // (layout.pp * layout.vpp)) % layout.pp


def holder_ep(manifest: Manifest, layout: ParallelLayout, spec: ParameterSpec) -> int:
    """The position on EP of the ranks that hold a parameter; 0 for one that is of no expert."""
    return spec.expert // experts_each(manifest, layout) if spec.is_expert else 0


def _chunk_specs(
    manifest: Manifest, layout: ParallelLayout, stage: int, chunk: int, experts: range
) -> Iterator[ParameterSpec]:
    layers = manifest.num_layers // (layout.pp * layout.vpp)
    first_layer = (chunk * layout.pp + stage) * layers
    if stage == 0 and chunk == 0:
        yield from manifest.at(Place.FIRST)
    for layer in range(first_layer, first_layer + layers):
        yield from manifest.in_layer(layer, experts)
    if stage == layout.pp - 1 and chunk == layout.vpp - 1:
        yield from (spec for spec in manifest.at(Place.LAST) if layout.pp > 1 or not spec.tied_to)
