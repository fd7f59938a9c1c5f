"""State of a whole world in global coordinates, put together from what its ranks recorded.

Uses the layout's boxes, as the handoff does; the tests that must not share our mapping use Megatron's loader instead.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from liver_core.layout import Manifest, ParallelLayout, local_parameters, resident_boxes


def assemble(ranks: Mapping[int, Mapping[str, np.ndarray]], manifest: Manifest, layout: str) -> dict[str, Any]:
    """{"kind/parameter": raw bits of the unsharded tensor} from rank -> kind -> region.

    Asserts that every element is held, and that ranks which hold the same element (replicas) hold the same bits.
    """
    shapes = {spec.name: spec.shape for spec in manifest.parameters}
    whole: dict[str, np.ndarray] = {}
    seen: dict[str, np.ndarray] = {}
    parallel = ParallelLayout.parse(layout)
    assert set(ranks) == set(range(parallel.world_size))
    for rank, regions in ranks.items():
        for resident in resident_boxes(manifest, parallel, rank):
            where = tuple(slice(a, b) for a, b in zip(resident.box.start, resident.box.stop, strict=True))
            for kind, region in regions.items():
                key = f"{kind}/{resident.parameter}"
                shape = shapes[resident.parameter]
                target = whole.setdefault(key, np.zeros(shape, np.uint32))
                held = seen.setdefault(key, np.zeros(shape, bool))
                size = resident.box.numel
                bits = region[resident.offset : resident.offset + size].view(np.uint32).reshape(target[where].shape)
                both = held[where]
                assert (target[where][both] == bits[both]).all(), f"replicas of {key} differ on rank {rank} of {layout}"
                target[where], held[where] = bits, True
    for key, held in seen.items():
        assert held.all(), f"{key}: {int((~held).sum())} elements are held by no rank of {layout}"
    assert len(seen) == len(shapes) * len(next(iter(ranks.values())))
    return whole


def assemble_weights(ranks: Mapping[int, Mapping[str, np.ndarray]], manifest: Manifest, layout: str) -> dict[str, Any]:
    """{parameter: raw bits of the unsharded weight} from rank -> local name -> raw bits of the local weight."""
    whole: dict[str, np.ndarray] = {}
    parallel = ParallelLayout.parse(layout)
    for rank, weights in ranks.items():
        at = parallel.coordinates(rank)
        locals_ = local_parameters(manifest, parallel, rank)
        for local, bits in zip(locals_, weights.values(), strict=True):
            spec = local.spec
            size, part_of = parallel.cut(expert=spec.is_expert), at.etp if spec.is_expert else at.tp
            parts = [bits] if spec.tp_dim is None else np.split(bits, spec.blocks, axis=spec.tp_dim)
            target = whole.setdefault(spec.name, np.zeros(spec.shape, bits.dtype))
            blocks = [target] if spec.tp_dim is None else np.split(target, spec.blocks, axis=spec.tp_dim)
            for part, block in zip(parts, blocks, strict=True):
                window = block if spec.tp_dim is None else np.split(block, size, axis=spec.tp_dim)[part_of]
                assert not window.any() or (window == part).all(), f"replicas of {spec.name} differ on rank {rank}"
                window[...] = part
    return whole


def differences(left: Mapping[str, np.ndarray], right: Mapping[str, np.ndarray]) -> list[str]:
    """Names of tensors that are not bit for bit the same, with the number of differing elements."""
    assert left.keys() == right.keys(), left.keys() ^ right.keys()
    return [
        f"{name}: {int((left[name] != right[name]).sum())} of {left[name].size} elements"
        for name in left
        if left[name].shape != right[name].shape or (left[name] != right[name]).any()
    ]
