"""Whether a model can be cut into a layout at all. Pure."""

from liver_core.layout.layout_error import LayoutError
from liver_core.layout.manifest import Manifest
from liver_core.layout.parallel import ParallelLayout

AXES_THAT_RUN = "this version runs TP, PP, DP, EP and ETP only"


def further_axes(layout: ParallelLayout) -> str:
    """What of a layout no job of this version can run on: of Megatron's axes CP and VPP. Empty if nothing."""
    return ", ".join(f"{axis}{size}" for axis, size in (("CP", layout.cp), ("VPP", layout.vpp)) if size > 1)


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
        axis, size = "etp" if spec.is_expert else "tp", spec.shape[spec.tp_dim]
        parts = layout.cut(expert=spec.is_expert)
        if size % (spec.blocks * parts * spec.unit):
            raise LayoutError(
                axis,
                f"{parts} does not cut dim {spec.tp_dim} of {spec.name}: {size} indices are not a multiple of "
                f"blocks*{axis}*unit = {spec.blocks}*{parts}*{spec.unit}",
            )


EXPERTS_RUN = (
    "A model with experts (MoE) runs in layouts of TP, PP, DP, EP and ETP where EP divides the experts of a layer, ETP "
    "is at most TP and with EP1 as TP, and TP above 1 comes with sequence parallelism."
)
"""What may have experts and what may not: said alike of a job file, by a trial, and in docs/port.md."""


def check_experts(layout: ParallelLayout, num_experts: int) -> None:
    """Raise LayoutError unless a model with so many experts in a layer, 0 for none, trains right in this layout."""
    if not num_experts:
        if layout.ep > 1 or layout.etp is not None:
            raise LayoutError("ep", f"{layout} splits experts, and the model has none")
        return
    if num_experts % layout.ep:
        raise LayoutError("ep", f"EP{layout.ep} does not divide the {num_experts} experts of a layer")
    if layout.expert_tp > layout.tp:
        raise LayoutError("etp", f"ETP{layout.expert_tp} is more than TP{layout.tp}, which was never tried")
    if layout.ep == 1 and layout.expert_tp != layout.tp:
        raise LayoutError(
            "etp",
            f"ETP{layout.expert_tp} with TP{layout.tp} needs EP above 1: without it Megatron does not sum the "
            "gradients of experts over TP; use EP > 1 or ETP = TP",
        )
