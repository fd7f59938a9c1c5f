"""Whether a model can be cut into a layout at all. Pure."""

from liver_core.layout.layout_error import LayoutError
from liver_core.layout.manifest import Manifest
from liver_core.layout.parallel import ParallelLayout


def check_fits(manifest: Manifest, layout: ParallelLayout) -> None:
    """Raise LayoutError naming the field and the numbers unless every cut of `layout` comes out even."""
    chunks = layout.pp * layout.vpp
    if manifest.num_layers % chunks:
        raise LayoutError(
            "num_layers", f"{manifest.num_layers} layers do not divide into pp*vpp = {layout.pp}*{layout.vpp} chunks"
        )
    if layout.pp > 1 and manifest.num_layers == 0:
        raise LayoutError("pp", f"{layout.pp} stages need layers, the manifest has none")
    check_experts(layout, manifest.num_experts)
    for spec in manifest.forms:
        if spec.tp_dim is None:
            continue
        axis, parts, size = (
            "etp" if spec.is_expert else "tp",
            layout.cut(expert=spec.is_expert),
            spec.shape[spec.tp_dim],
        )
        if size % (spec.blocks * parts * spec.unit):
            raise LayoutError(
                axis,
                f"{parts} does not cut dim {spec.tp_dim} of {spec.name}: {size} indices are not a multiple of "
                f"blocks*{axis}*unit = {spec.blocks}*{parts}*{spec.unit}",
            )


def check_experts(layout: ParallelLayout, num_experts: int) -> None:
    """Raise LayoutError unless a model with so many experts in a layer, 0 for none, trains right in this layout."""
    if not num_experts:
        if layout.ep > 1 or layout.etp is not None:
            raise LayoutError("ep", f"{layout} splits experts, and the model has none")
        return
    if num_experts % layout.ep:
        raise LayoutError("ep", f"{layout.ep} does not divide the {num_experts} experts of a layer")
    if layout.expert_tp > layout.tp:
        raise LayoutError("etp", f"ETP{layout.expert_tp} is more than TP{layout.tp}, which was never tried")
    if layout.ep == 1 and layout.expert_tp != layout.tp:
        raise LayoutError(
            "etp",
            f"ETP{layout.expert_tp} with TP{layout.tp} needs EP above 1: without it Megatron does not sum the gradients "
            "of experts over TP; use EP > 1 or ETP = TP",
        )
