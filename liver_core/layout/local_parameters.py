"""Which parameters a rank holds, in the order in which Megatron registers them. Pure.

Registration order is that of `GPTModel.named_parameters()`: what comes before the layers, the layers of the stage,
what comes after; with virtual stages the model chunks one after another. It decides where a parameter lies in the
gradient buffer, and so which ZeRO-1 rank owns it.
"""

from dataclasses import dataclass
from functools import lru_cache
from math import prod

from liver_core.layout.fit import check_fits
from liver_core.layout.manifest import Manifest, ParameterSpec, Place
from liver_core.layout.parallel import ParallelLayout


@dataclass(frozen=True, slots=True)
class LocalParameter:
    """One parameter as one rank holds it: `shape` is the TP-local shape, `chunk` the model chunk (VPP), else 0."""

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
    return stage_parameters(manifest, layout, layout.coordinates(rank).pp)


@lru_cache(maxsize=512)
def stage_parameters(manifest: Manifest, layout: ParallelLayout, stage: int) -> tuple[LocalParameter, ...]:
    """The parameters of any rank of a pipeline stage: all its ranks hold the same local shapes."""
    check_fits(manifest, layout)
    return tuple(
        LocalParameter(spec=spec, shape=spec.local_shape(layout.tp), chunk=chunk)
        for chunk in range(layout.vpp)
        for spec in _chunk_specs(manifest, layout, stage, chunk)
    )


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
            # Chunk v of stage p starts at layer (v * PP + p) * layers per chunk (Megatron's
            # transformer_block.get_num_layers_to_build and transformer_layer.get_transformer_layer_offset).
            return (spec.layer // (manifest.num_layers // (layout.pp * layout.vpp)) % layout.pp,)


def _chunk_specs(manifest: Manifest, layout: ParallelLayout, stage: int, chunk: int) -> list[ParameterSpec]:
    is_first = stage == 0 and chunk == 0
    is_last = stage == layout.pp - 1 and chunk == layout.vpp - 1
    layers = manifest.num_layers // (layout.pp * layout.vpp)
    first_layer = (chunk * layout.pp + stage) * layers
    found = []
    for spec in manifest.parameters:
        match Place(spec.place):
            case Place.FIRST:
                held = is_first
            case Place.LAYER:
                held = first_layer <= spec.layer < first_layer + layers
            case Place.LAST:
                held = is_last and not (spec.tied_to and layout.pp == 1)
        if held:
            found.append(spec)
    return found
