"""Megatron's live state as regions: masters, moments and reduced gradients of one rank's ZeRO-1 shard.

Megatron's `sharded_state_dict` gives the coordinates. The pure layout function says what each rank holds; this module
checks that against the live optimizers. One of the few places that import Megatron-Core. Supported: distributed
optimizers over one DDP chunk, parameters in fp32 and bf16 with fp32 masters, gradients in fp32 or as their parameters.
"""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import Annotated, Any

import torch
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

from liver_core.device.region import Region, dtype_name
from liver_core.layout import (
    BucketRule,
    Manifest,
    ParallelLayout,
    ParameterSpec,
    RankShards,
    StateKind,
    WholeSpec,
    local_parameters,
    shard_ranges,
    stage_of_layer,
)
from liver_core.layout.limits import STRICT, Bound
from liver_core.layout.manifest import DTYPE_BYTES, FLOAT32, GRAD, PARAMETERS_MAX
from liver_core.memory.memory_placement import MASTER
from liver_core.same_value import same_value
from liver_core.state.buckets import owned_parts
from liver_core.state.described import check_cut
from liver_core.state.expert_names import expert_name
from liver_core.state.live_state import LiveState, OwnedParameter
from liver_core.state.optimizer_chain import OptimizerChain, optimizer_chain
from liver_core.state.step_counts import UnsupportedState, as_kept
from liver_core.state.step_tensors import StepTensors, step_buffers
from liver_core.worlds.megatron import MegatronWorld, building

_DTYPES = {getattr(torch, name): name for name in DTYPE_BYTES}


class StateMismatch(RuntimeError):
    """The live state of a rank differs from the pure layout function. The text names parameter and numbers."""


@dataclass(frozen=True, slots=True)
class Description:
    """What one rank says of its part of the model: its parameters, and what a step changes beside them."""

    __pydantic_config__ = STRICT

    parameters: Annotated[tuple[ParameterSpec, ...], Bound(max_length=PARAMETERS_MAX)]
    whole: Annotated[tuple[WholeSpec, ...], Bound(max_length=PARAMETERS_MAX)] = ()


def describe(model: Any, world: MegatronWorld) -> Description:
    """This rank's stage, and its share of the experts, in global coordinates, from Megatron's own sharded state dict.

    Each spec is complete: unsharded shape, the dim split by tensor parallelism, gated blocks, global layer number.
    """
    module = unwrapped(model)
    with building(world):  # Without a default group Megatron takes every group for one of a single rank.
        sharded = module.sharded_state_dict(metadata={"dp_cp_group": world.collection.dp_cp})
    by_storage = {
        id(entry.data): entry for entry in sharded.values() if isinstance(entry, ShardedTensor | ShardedTensorFactory)
    }
    by_key = {name: entry for name, entry in sharded.items() if isinstance(entry, ShardedTensor | ShardedTensorFactory)}
    specs = []
    numbers = [found.number for name, _ in module.named_parameters() if (found := expert_name(name))]
    experts = max(numbers, default=-1) + 1
    for order, (name, parameter) in enumerate(module.named_parameters()):
        entry = by_key.get(name) or by_storage.get(id(parameter)) or by_storage.get(id(parameter.data))
        if entry is None:
            raise UnsupportedState(f"parameter {name} is not in sharded_state_dict: its place in the model is unknown")
        specs.append(_spec(name, parameter, entry, order, world, experts))
    names = dict(zip((name for name, _ in module.named_parameters()), specs, strict=True))
    whole = [
        WholeSpec(name, tuple(tensor.shape), _DTYPES[tensor.dtype], layer)
        for name, (tensor, layer) in _step_buffers(module, names).items()
    ]
    return Description(tuple(specs), tuple(whole))


def _step_buffers(module: Any, specs: Mapping[str, ParameterSpec]) -> dict[str, tuple[torch.Tensor, int]]:
    """What a step changes beside parameters, by its name with the global number of its layer, and that number.
    `specs`: of each parameter by its name on this rank."""
    layers = {_layer_path(name): spec.layer for name, spec in specs.items() if spec.layer >= 0}
    return {
        _global_name(name, layer): (tensor, layer)
        for name, tensor in step_buffers(module)
        for layer in [layers[_layer_path(name)]]
    }


def _layer_path(name: str) -> str:
    """'decoder.layers.0' of 'decoder.layers.0.mlp.router.weight'."""
    head, found, tail = name.partition(".layers.")
    return f"{head}{found}{tail.partition('.')[0]}"


def _spec(
    name: str, parameter: torch.nn.Parameter, entry: Any, order: int, world: MegatronWorld, experts: int
) -> ParameterSpec:
    """`experts`: how many of a layer this rank has."""
    pieces, of_expert = _pieces(entry), expert_name(name)
    split = getattr(parameter, "tensor_model_parallel", False)
    tp_dim = getattr(parameter, "partition_dim", None) if split else None
    shape, cut = list(parameter.shape), world.layout.cut(expert=of_expert is not None)
    if tp_dim is not None:
        shape[tp_dim] *= cut
    if parameter.dtype not in _DTYPES:
        raise UnsupportedState(f"parameter {name}: is {parameter.dtype}; known are {', '.join(_DTYPES.values())}")
    check_cut(name, tuple(parameter.shape), pieces, tp_dim, cut)
    layer = _layer_of(pieces[0])
    place = "layer" if layer >= 0 else ("first" if world.coordinates.pp == 0 and "embedding" in name else "last")
    expert = -1
    if of_expert is not None:
        expert = of_expert.number + world.coordinates.ep * experts
        name = of_expert.name(expert)
    return ParameterSpec(
        name=_global_name(name, layer),
        shape=tuple(shape),
        dtype=_DTYPES[parameter.dtype],
        tp_dim=tp_dim,
        blocks=len(pieces),
        place=place,
        layer=layer,
        order=order,
        expert=expert,
    )


def _layer_of(piece: ShardedTensor) -> int:
    """The global number of the decoder's layer; -1 outside. Where layers differ in form Megatron does not stack them:
    the number is in the key then, and not in the offset."""
    stands = re.match(r"decoder\.layers\.(\d+)\.", piece.key)
    if stands is not None:
        return int(stands[1])
    return piece.global_offset[0] if piece.prepend_axis_num else -1


def _pieces(entry: Any) -> list[ShardedTensor]:
    built = entry.build() if isinstance(entry, ShardedTensorFactory) else entry
    pieces = list(built.values()) if isinstance(built, dict) else built if isinstance(built, list) else [built]
    return [piece for piece in pieces if isinstance(piece, ShardedTensor)]


def _global_name(name: str, layer: int) -> str:
    """'decoder.layers.0.x' of stage 1 -> 'decoder.layers.3.x': replaces the local layer number by the global one."""
    if layer < 0:
        return name
    head, _, tail = name.partition(".layers.")
    return f"{head}.layers.{layer}.{tail.partition('.')[2]}"


def unwrapped(model: Any) -> Any:
    """The Megatron module inside DDP and precision wrappers. Its names and its state dict have no prefix."""
    while hasattr(model, "module"):
        model = model.module
    return model


def merge_manifest(
    parts: list[Description], num_layers: int, kinds: tuple[StateKind, ...], rule: BucketRule
) -> Manifest:
    """One manifest from the descriptions of all pipeline stages and shares of experts. Raises StateMismatch if two
    ranks disagree.

    `order` becomes the position inside its place (first stage, one layer, last stage), or inside its expert, which is
    equal in every layout; a list of experts has one position, its `slot`.
    """
    seen: dict[str, ParameterSpec] = {}
    whole = {spec.name: spec for part in parts for spec in part.whole}
    for spec in (spec for part in parts for spec in part.parameters):
        known = seen.setdefault(spec.name, spec)
        if (known.shape, known.dtype, known.tp_dim, known.blocks) != (spec.shape, spec.dtype, spec.tp_dim, spec.blocks):
            raise StateMismatch(f"parameter {spec.name}: described as {known} and as {spec}")
    # What stands at one position of a place: one parameter, or all experts of one list.
    positions: dict[tuple[str, int], dict[str, int]] = {}
    within: Counter[tuple[str, int, str, int]] = Counter()
    ordered = []
    for spec in sorted(seen.values(), key=lambda spec: (_PLACES.index(spec.place), spec.layer, spec.order)):
        of_expert = expert_name(spec.name)
        stands = spec.name if of_expert is None else of_expert.experts
        at = positions.setdefault((spec.place, spec.layer), {})
        position = at.setdefault(stands, len(at))
        if of_expert is None:
            ordered.append(replace(spec, order=position))
            continue
        expert = spec.place, spec.layer, stands, spec.expert
        ordered.append(replace(spec, order=within[expert], slot=position))
        within[expert] += 1
    return Manifest(tuple(ordered), num_layers, kinds, rule, tuple(whole.values()))


def describing(layout: ParallelLayout) -> tuple[int, ...]:
    """Ranks that together describe the whole model: of each stage one with each share of the experts."""
    of = layout.buffer_class(expert=True)
    shares = range(layout.ep)
    return tuple(layout.owner(of, cut=0, shard=0, ep=ep, pp=stage) for stage in range(layout.pp) for ep in shares)


_PLACES = ("first", "layer", "last")


def adopt(model: Any, optimizer: Any, manifest: Manifest, world: MegatronWorld) -> LiveState:
    """Check a world's live state against the pure layout function, then lay regions over it.

    Moves moments and the masters of bf16 parameters into memory of their own (content kept). fp32 masters and gradients
    are views of Megatron's buckets. In a world built with released storage the regions have no memory until `allocate`.
    Raises StateMismatch naming the first bucket or parameter that is not where the layout function says.
    """
    chain = optimizer_chain(optimizer)
    shards = shard_ranges(manifest, world.layout, world.rank)
    names = local_names(model, manifest, world)
    _check_buffers(chain, shards, names)
    live = LiveState(manifest, shards, chain, model, {}, world.rank, world.layout)
    live.step_tensors = _step_tensors(model, manifest, world)
    live.regions[GRAD] = Region(owned_parts(chain, "grad_data", shards))
    live.owned = tuple(_owned(live, names))
    live.regions[MASTER] = _adopt_masters(live)
    for kind in live.moments:
        _adopt_moment(live, kind)
    return live


def _step_tensors(model: Any, manifest: Manifest, world: MegatronWorld) -> StepTensors:
    """Raises StateMismatch where the manifest has others for this rank's layers."""
    module = unwrapped(model)
    local = local_parameters(manifest, world.layout, world.rank)
    names = (name for name, _ in module.named_parameters())
    found = _step_buffers(module, {name: each.spec for name, each in zip(names, local, strict=True)})
    stage, layout = world.coordinates.pp, world.layout
    wanted = {each.name for each in manifest.whole if stage_of_layer(manifest, layout, each.layer) == stage}
    if wanted != found.keys():
        raise StateMismatch(f"tensors that a step changes: the model has {sorted(found)}, expected {sorted(wanted)}")
    return StepTensors(module, {name: tensor for name, (tensor, _) in found.items()})


def local_names(model: Any, manifest: Manifest, world: MegatronWorld) -> dict[torch.nn.Parameter, str]:
    """Live parameter -> logical name, by registration order. Raises StateMismatch if a shape is not the layout's."""
    expected = local_parameters(manifest, world.layout, world.rank)
    actual = list(unwrapped(model).named_parameters())
    if len(actual) != len(expected):
        raise StateMismatch(
            f"rank {world.rank} of {world.layout} has {len(actual)} parameters, expected {len(expected)}"
        )
    for local, (name, parameter) in zip(expected, actual, strict=True):
        if tuple(parameter.shape) != tuple(local.shape):
            raise StateMismatch(
                f"{local.spec.name} ({name}): shape {tuple(parameter.shape)}, expected {tuple(local.shape)}"
            )
    return {parameter: local.spec.name for local, (_, parameter) in zip(expected, actual, strict=True)}


def _check_buffers(chain: OptimizerChain, shards: RankShards, names: dict[torch.nn.Parameter, str]) -> None:
    """Every bucket, and every range that this rank owns by Megatron, must equal the layout function's."""
    of_buffers = [buffer for part in chain.parts for buffer in part.gbuf_ranges]
    per_bucket = [bucket for buffer in of_buffers for ranges in buffer.values() for bucket in ranges]
    buckets = [
        (
            bucket.numel_unpadded,
            bucket.grad_data.numel(),
            dtype_name(buffer.param_dtype),
            dtype_name(buffer.grad_dtype),
        )
        for buffer in chain.buffers
        for bucket in buffer.buckets
    ]
    wanted = [
        (bucket.numel, bucket.padded_numel, bucket.buffer.param_dtype, bucket.buffer.grad_dtype)
        for bucket in shards.buckets
    ]
    for number, (have, want) in enumerate(zip_longest(buckets, wanted)):
        if have != want:
            raise StateMismatch(
                f"gradient bucket {number}: Megatron has {have} (elements, padded, dtypes of weights and gradients), "
                f"layout says {want}; parameters of one dtype must be stepped by one optimizer, and buffers follow "
                "each other as the model has their first parameters"
            )
    actual = {
        names[parameter]: (ranges["param"].start, ranges["param"].end, part.region_offset + ranges["gbuf_local"].start)
        for bucket, part in zip(per_bucket, shards.buckets, strict=True)
        for parameter, ranges in bucket["param_map"].items()
    }
    expected = {entry.name: (entry.param_start, entry.param_stop, entry.region_offset) for entry in shards.parameters}
    for name in actual.keys() | expected.keys():
        if actual.get(name) != expected.get(name):
            raise StateMismatch(
                f"{name}: the optimizer owns (start, stop, offset) {actual.get(name)}, layout says {expected.get(name)}"
            )


def _flat(live: LiveState) -> Region:
    """A region with memory of its own."""
    return Region.zeros([(live.shards.region_numel, torch.float32)], live.device)


def _adopt_masters(live: LiveState) -> Region:
    """Masters of fp32 parameters are their weights; all others have one memory of their own."""
    apart = [bucket for bucket in live.shards.buckets if bucket.buffer.param_dtype != FLOAT32]
    own = torch.zeros(sum(bucket.stop - bucket.start for bucket in apart), dtype=torch.float32, device=live.device)
    parts, at = [], 0
    for bucket, weights in zip(
        live.shards.buckets, owned_parts(live.optimizer, "param_data", live.shards), strict=True
    ):
        if bucket.buffer.param_dtype == FLOAT32:
            parts.append(weights)
            continue
        parts.append(own[at : at + weights.numel()])
        at += weights.numel()
    region, memory = Region(parts), own.untyped_storage()._cdata
    for main, window, _ in live.owned:
        if region.piece_at(window.start).tensor.untyped_storage()._cdata == memory:
            _rehome(main, region.window(window.start, window.stop))
    return region


def model_and_main(part: DistributedOptimizer) -> Iterator[tuple[torch.nn.Parameter, torch.nn.Parameter]]:
    """Each parameter of the model of which this rank owns elements, and the optimizer's own parameter of those."""
    of_16_bits = zip(part.model_float16_groups, part.shard_fp32_from_float16_groups, strict=True)
    of_32_bits = zip(part.model_fp32_groups, part.shard_fp32_groups, strict=True)
    for group, mains in (*of_16_bits, *of_32_bits):
        yield from zip(group, mains, strict=True)


def _owned(live: LiveState, names: dict[torch.nn.Parameter, str]) -> Iterator[OwnedParameter]:
    offsets = {entry.name: entry for entry in live.shards.parameters}
    for part in live.optimizer.parts:
        for parameter, main in model_and_main(part):
            entry = offsets[names[parameter]]
            yield OwnedParameter(main, slice(entry.region_offset, entry.region_offset + entry.numel), part)


def _rehome(tensor: torch.Tensor, window: torch.Tensor) -> None:
    if tensor.untyped_storage().nbytes() and window.untyped_storage().nbytes():
        window.copy_(tensor.detach())
    tensor.data = window


def _adopt_moment(live: LiveState, kind: str) -> None:
    """Move one moment into a flat region. If the optimizer never stepped, the region exists but is not used yet."""
    flat = live.regions[kind] = _flat(live)
    for main, window, part in live.owned:
        kept = part.optimizer.state.get(main, {})
        if kind in kept:
            _rehome(kept[kind], flat.window(window.start, window.stop))


def attach_moments(live: LiveState, scalars: Mapping[str, Any]) -> None:
    """Give an optimizer that never stepped its state: moments as windows of the regions, the rest from `scalars`.

    Each parameter gets its own copy of a scalar tensor. A shared `step` tensor would advance once per parameter.
    """
    live.settled = True
    regions = {kind: live.regions[kind] for kind in live.moments}
    form = live.optimizer.form.scalars
    for owned in live.owned:
        for kind, region in regions.items():
            owned.kept[kind] = region.window(owned.window.start, owned.window.stop)
        for name, value in scalars.items():
            owned.kept[name] = as_kept(form, name, value)


def settle_moments(live: LiveState) -> None:
    """After an optimizer step: move moments that the step created into the regions. Does nothing from then on."""
    if not live.settled:
        readopt_moments(live)


def element_scalars(live: LiveState) -> dict[str, Any]:
    """Optimizer state that is not a moment (step counts). It must be equal for all parameters of the rank.

    Tensors become floats; JSON keeps fp32 counts exactly. Empty before the first step.
    """
    moments = set(live.moments)
    kept: dict[str, list[Any]] = {}
    for state in (kept for inner in live.optimizer.inner for kept in inner.state.values()):
        for name, value in state.items():
            if name not in moments:
                kept.setdefault(name, []).append(value)
    found: dict[str, Any] = {}
    for name, values in kept.items():
        plain = _read(values)
        found[name] = plain[0]
        if other := [value for value in plain if not same_value(value, plain[0])]:
            raise UnsupportedState(f"optimizer state {name}: {plain[0]} and {other[0]} differ between parameters")
    return found


def _read(values: list[Any]) -> list[Any]:
    """Tensors as floats. What lies on a device is read at once, since each read waits for it."""
    if all(torch.is_tensor(value) and value.device.type != "cpu" for value in values):
        return torch.stack([value.reshape(()).to(torch.float64) for value in values]).tolist()
    return [float(value) if torch.is_tensor(value) else value for value in values]


def readopt_moments(live: LiveState) -> None:
    """Move the moments back into the regions after something replaced the optimizer's tensors (content kept)."""
    live.settled = True
    for kind in live.moments:
        region = live.regions[kind]
        for owned in live.owned:
            _rehome(owned.kept[kind], region.window(owned.window.start, owned.window.stop))


def fill_initial(live: LiveState, initial: Callable[[ParameterSpec, torch.Generator], torch.Tensor], seed: int) -> None:
    """Fill the masters (and, for bf16, nothing else) from global coordinates: the same values in every layout.

    Draws each whole parameter from a generator seeded by (seed, name) and cuts out what this rank owns. Only one whole
    parameter is in memory at a time. The gather that starts the world fills the weights from the masters.
    """
    specs = {spec.name: spec for spec in live.manifest.parameters}
    drawn_name, drawn = "", torch.empty(0)
    for resident in sorted(live.resident(), key=lambda resident: resident.parameter):
        if resident.parameter != drawn_name:
            drawn_name = resident.parameter
            digest = hashlib.sha256(f"{seed}/{drawn_name}".encode()).digest()
            generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))
            drawn = initial(specs[drawn_name], generator)
        box = resident.box
        window = drawn[tuple(slice(low, high) for low, high in zip(box.start, box.stop, strict=True))]
        owned = live.regions[MASTER].window(resident.offset, resident.offset + window.numel())
        owned.copy_(window.reshape(-1))
