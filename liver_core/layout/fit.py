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
    if layout.ep > 1 or layout.etp > 1:
        raise LayoutError("ep", f"{layout} splits experts, and a manifest describes dense parameters only")
    for spec in manifest.parameters:
        if spec.tp_dim is None:
            continue
        size = spec.shape[spec.tp_dim]
        if size % (spec.blocks * layout.tp * spec.unit):
            raise LayoutError(
                "tp",
                f"{layout.tp} does not cut dim {spec.tp_dim} of {spec.name}: {size} indices are not a multiple of "
                f"blocks*tp*unit = {spec.blocks}*{layout.tp}*{spec.unit}",
            )
