"""A second, dumb account of where every element lies, with numpy arrays of element ids; shares no code with ours.

It follows Megatron's steps literally: split the whole parameter over TP, lay the shards into one buffer in reverse
order with absolute offsets, cut every bucket into DP x CP parts. With EP, experts have buffers of their own, behind the
others, which are cut into as many parts as ranks have the same experts. Padding has id -1.
"""

import math
from itertools import product

import numpy as np

from liver_core.layout import Manifest, ParallelLayout, ParameterSpec


def element_ids(manifest: Manifest) -> dict[str, np.ndarray]:
    """Every parameter as an array of ids, no id used twice; a tied copy has the ids of its embedding."""
    ids, base = {}, 0
    for spec in manifest.parameters:
        if spec.tied_to:
            ids[spec.name] = ids[spec.tied_to]
            continue
        ids[spec.name] = np.arange(base, base + spec.numel).reshape(spec.shape)
        base += spec.numel
    return ids


def tensor_parallel_shard(whole: np.ndarray, spec: ParameterSpec, tp_size: int, tp: int) -> np.ndarray:
    """What one TP rank holds: its part of every block, side by side."""
    if spec.tp_dim is None:
        return whole
    blocks = np.split(whole, spec.blocks, axis=spec.tp_dim)
    return np.concatenate([np.split(block, tp_size, axis=spec.tp_dim)[tp] for block in blocks], axis=spec.tp_dim)


def rank_region(manifest: Manifest, layout: ParallelLayout, rank: int) -> np.ndarray:
    """The ids in the region of one rank."""
    tp = rank % layout.tp
    cp = rank // layout.tp % layout.cp
    dp = rank // (layout.tp * layout.cp) % layout.dp
    stage = rank // (layout.tp * layout.cp * layout.dp)
    expert_tp = layout.etp or layout.tp
    inside = rank % (layout.tp * layout.cp * layout.dp)
    etp, ep, edp = inside % expert_tp, inside // expert_tp % layout.ep, inside // expert_tp // layout.ep
    cuts = {False: (layout.tp, tp), True: (expert_tp, etp)}
    grids = {False: (layout.dp * layout.cp, dp * layout.cp + cp)}
    grids[True] = (layout.tp * layout.cp * layout.dp // expert_tp // layout.ep, edp)
    parts = [np.array([], dtype=int)]
    for apart, chunk in product((False, True), range(layout.vpp)):
        shards, shard = grids[apart]
        mine = [
            spec
            for spec in chunk_parameters(manifest, layout, stage, chunk)
            if (spec.expert >= 0 and layout.ep > 1) == apart
            and (spec.expert < 0 or spec.expert * layout.ep // experts_of(manifest) == ep)
        ]
        for held in by_dtypes(manifest, mine):
            buffer, buckets = chunk_buffer(manifest, layout, stage, chunk, cuts=cuts, held=held, shards=shards)
            for start, stop in buckets:
                size = (stop - start) // shards
                first = start + shard * size
                parts.append(buffer[first : first + size])
    return np.concatenate(parts)


def experts_of(manifest: Manifest) -> int:
    """Experts of a layer."""
    return len({spec.expert for spec in manifest.parameters if spec.expert >= 0})


def by_dtypes(manifest: Manifest, specs: list[ParameterSpec]) -> list[list[ParameterSpec]]:
    """What shares a buffer, by the dtypes of weight and gradient, in the order in which these are met first."""
    (grad,) = [kind.dtype for kind in manifest.kinds if kind.name == "grad"] or ["float32"]
    pairs = [(spec.dtype, spec.dtype if grad == "parameter" else grad) for spec in specs]
    order = sorted(set(pairs), key=pairs.index)
    return [[spec for spec, pair in zip(specs, pairs, strict=True) if pair == wanted] for wanted in order]


def chunk_buffer(
    manifest: Manifest,
    layout: ParallelLayout,
    stage: int,
    chunk: int,
    *,
    cuts: dict[bool, tuple[int, int]],
    held: list[ParameterSpec],
    shards: int,
) -> tuple[np.ndarray, list[tuple[int, int]]]:
    """(ids of a whole gradient buffer with the parameters `held`, its buckets as absolute ranges)."""
    rule, ids = manifest.bucket_rule, element_ids(manifest)
    divisor = math.lcm(shards, rule.end_multiple, 2**16 if rule.high_bandwidth_padding else 1)
    elements_max = None
    if stage == 0 and chunk == 0 and rule.elements_max is not None:
        elements_max = max(rule.elements_max, layout.dp * rule.elements_max_per_dp)
    shared = {name for spec in manifest.parameters if spec.tied_to for name in (spec.name, spec.tied_to)}
    placed, buckets, position, bucket_start = [], [], 0, 0
    for spec in reversed(held):
        position = math.ceil(position / rule.align_elements) * rule.align_elements
        alone = spec.name in shared and layout.pp > 1
        if alone and position > bucket_start:
            position = math.ceil(position / divisor) * divisor
            buckets.append((bucket_start, position))
            bucket_start = position
        flat = tensor_parallel_shard(ids[spec.name], spec, *cuts[spec.expert >= 0]).reshape(-1)
        placed.append((position, flat))
        position += flat.size
        if alone or (elements_max is not None and position - bucket_start >= elements_max):
            position = math.ceil(position / divisor) * divisor
            buckets.append((bucket_start, position))
            bucket_start = position
    if position > bucket_start:
        position = math.ceil(position / divisor) * divisor
        buckets.append((bucket_start, position))
    buffer = np.full(position, -1)
    for start, flat in placed:
        buffer[start : start + flat.size] = flat
    return buffer, buckets


def chunk_parameters(manifest: Manifest, layout: ParallelLayout, stage: int, chunk: int) -> list[ParameterSpec]:
    """The parameters of one model chunk in registration order."""
    size = manifest.num_layers // (layout.pp * layout.vpp)
    layers = range((chunk * layout.pp + stage) * size, (chunk * layout.pp + stage + 1) * size)
    found = []
    if stage == 0 and chunk == 0:
        found += [spec for spec in manifest.parameters if spec.place == "first"]
    for layer in layers:
        found += [spec for spec in manifest.parameters if spec.layer == layer]
    if stage == layout.pp - 1 and chunk == layout.vpp - 1:
        found += [s for s in manifest.parameters if s.place == "last" and not (s.tied_to and layout.pp == 1)]
    return found
