"""The manifest: every parameter of a job described once, in coordinates that no parallel layout changes. Pure.

The source of the coordinates is Megatron-Core's `sharded_state_dict`; layer parameters are not stacked here, each
layer has its own entry under its global number. State kinds (masters, moments, gradients) share the coordinates.
"""

from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from functools import lru_cache
from itertools import groupby
from math import prod
from typing import Annotated, Any

from liver_core.layout.canonical import digest_of
from liver_core.layout.codec import to_json
from liver_core.layout.layout_error import LayoutError
from liver_core.layout.limits import COUNT_MAX, STRICT, Bound, Count, Name, ShortText

DIMS_MAX = 8
PARAMETERS_MAX = 1_000_000
KINDS_MAX = 64

FLOAT32, BFLOAT16 = "float32", "bfloat16"
DTYPE_BYTES = {FLOAT32: 4, BFLOAT16: 2}
OF_PARAMETER = "parameter"
GRAD = "grad"
"""The kind of the reduced gradients: its dtype decides how Megatron cuts its buffers."""


class Place(StrEnum):
    """Which pipeline stage holds a parameter."""

    FIRST = "first"
    LAYER = "layer"
    LAST = "last"


_PLACE_ORDER = {place.value: index for index, place in enumerate(Place)}
_DTYPES, _PLACES = ", ".join(DTYPE_BYTES), ", ".join(_PLACE_ORDER)


@dataclass(frozen=True, slots=True)
class ParameterSpec:
    """One parameter of the whole model.

    name: logical name with the global layer number, "decoder.layers.3.mlp.linear_fc1.weight".
    shape: unsharded, vocabulary padded (the padding is fixed for the job's life).
    dtype: of the model parameter, a name of `DTYPE_BYTES`; the state kinds have their own.
    tp_dim: the dim that tensor parallelism splits, None where every TP rank holds the whole; of an expert, that ETP
        splits.
    blocks: 1, or 2 for gated units: tp_dim, which must be 0 then, is `blocks` equal parts (gate, up), each split over
        TP on its own.
    place, layer: `layer` is the global number where place is "layer", and -1 elsewhere.
    order: registration order inside its place (inside its layer), where a list of experts counts as one; of an
        expert's parameter, the order inside that expert.
    tied_to: this is the copy, on the last of several stages, of that embedding of the first stage. With one stage
        it does not exist. Its elements are the embedding's elements.
    unit: a TP part must be a multiple of this many indices of tp_dim (a query group of packed attention weights).
    expert: global number of the expert that it belongs to, -1 where it is of none.
    slot: of an expert's parameter, the order in the layer of the list of experts.
    """

    __pydantic_config__ = STRICT

    name: Name
    shape: Annotated[tuple[Count, ...], Bound(max_length=DIMS_MAX)]
    dtype: Name
    tp_dim: Count | None
    blocks: Count
    place: Name
    layer: Annotated[int, Bound(ge=-1, le=COUNT_MAX)]
    order: Count
    tied_to: ShortText = ""
    unit: Count = 1
    expert: Annotated[int, Bound(ge=-1, le=COUNT_MAX)] = -1
    slot: Count = 0

    def __post_init__(self) -> None:
        def need(holds: bool, what: str, rule: str, *values: object) -> None:
            # The text is made only where it is needed: a large manifest has tens of thousands of parameters.
            if not holds:
                raise LayoutError(f"parameter {self.name or '(unnamed)'}: {what}", rule.format(self, *values))

        need(bool(self.name), "name", "must not be empty")
        need(1 <= len(self.shape) <= DIMS_MAX, "shape", "must have 1 to {1} dims, is {0.shape}", DIMS_MAX)
        need(min(self.shape) >= 1, "shape", "every dim must be at least 1, is {0.shape}")
        need(self.dtype in DTYPE_BYTES, "dtype", "must be one of {1}, is {0.dtype!r}", _DTYPES)
        need(self.blocks >= 1, "blocks", "must be at least 1, is {0.blocks}")
        need(self.unit >= 1, "unit", "must be at least 1, is {0.unit}")
        need(self.place in _PLACE_ORDER, "place", "must be one of {1}, is {0.place!r}", _PLACES)
        in_layer, is_expert = self.place == Place.LAYER, self.expert >= 0
        need(self.layer >= 0 if in_layer else self.layer == -1, "layer", "{0.layer} does not go with {0.place}")
        need(self.order >= 0, "order", "must not be negative, is {0.order}")
        need(not self.tied_to or self.place == Place.LAST, "tied_to", "needs place last, is {0.place}")
        need(self.expert >= -1, "expert", "must be -1 or the number of an expert, is {0.expert}")
        need(not is_expert or in_layer, "expert", "{0.expert} must be in a layer, is {0.place}")
        need(is_expert or not self.slot, "slot", "must be 0 without an expert, is {0.slot}")
        if self.tp_dim is None:
            need(self.blocks == 1, "blocks", "must be 1 where tp_dim is null, is {0.blocks}")
            return
        need(0 <= self.tp_dim < len(self.shape), "tp_dim", "{0.tp_dim} is not a dim of {0.shape}")
        # Blocks of an inner dim would fall into one box for every outer index; Megatron's gated units are on dim 0.
        need(self.blocks == 1 or self.tp_dim == 0, "blocks", "{0.blocks} blocks need tp_dim 0, is {0.tp_dim}")
        split = self.shape[self.tp_dim]
        need(split % self.blocks == 0, "blocks", "{0.blocks} blocks do not divide dim {0.tp_dim} of {1}", split)

    @property
    def numel(self) -> int:
        """Elements of the whole parameter."""
        return prod(self.shape)

    @property
    def tensor(self) -> str:
        """The name under which its elements are known: its own, or that of the embedding it is tied to."""
        return self.tied_to or self.name

    @property
    def is_expert(self) -> bool:
        """Whether it belongs to an expert, of which each rank has some. Routers and shared experts do not."""
        return self.expert >= 0

    def local_shape(self, tp: int) -> tuple[int, ...]:
        """The shape on each of `tp` ranks; the caller has checked that it divides (`check_fits`)."""
        return tuple(size // tp if dim == self.tp_dim else size for dim, size in enumerate(self.shape))

    @property
    def registered(self) -> tuple[int, int, int, int, int]:
        """Where it stands among the parameters of a model: place, layer, position in it, expert, order in that."""
        position = self.slot if self.is_expert else self.order
        return (_PLACE_ORDER[self.place], self.layer, position, self.expert, self.order)


@dataclass(frozen=True, slots=True)
class StateKind:
    """One kind of state that every element has ("master", "exp_avg", "grad", ...): one region per kind and rank.

    dtype: a name of `DTYPE_BYTES`, or OF_PARAMETER where each element has that of its parameter.
    """

    name: Name
    dtype: Name

    def __post_init__(self) -> None:
        if not self.name:
            raise LayoutError("kind.name", "must not be empty")
        if self.dtype != OF_PARAMETER and self.dtype not in DTYPE_BYTES:
            known = ", ".join((*DTYPE_BYTES, OF_PARAMETER))
            raise LayoutError(f"kind {self.name}.dtype", f"must be one of {known}, is {self.dtype!r}")

    def dtype_of(self, spec: ParameterSpec) -> str:
        """Of this kind's elements of a parameter, in every layout."""
        return spec.dtype if self.dtype == OF_PARAMETER else self.dtype


@dataclass(frozen=True, slots=True)
class WholeSpec:
    """A tensor that each rank of a pipeline stage has whole, and that a step changes: a router's bias of experts.

    name: with the global layer number. dtype: a name of `DTYPE_BYTES`. layer: its global number.
    """

    __pydantic_config__ = STRICT

    name: Name
    shape: Annotated[tuple[Count, ...], Bound(max_length=DIMS_MAX)]
    dtype: Name
    layer: Count

    def __post_init__(self) -> None:
        if not self.name:
            raise LayoutError("whole.name", "must not be empty")
        if self.dtype not in DTYPE_BYTES:
            known = ", ".join(DTYPE_BYTES)
            raise LayoutError(f"tensor {self.name}: dtype", f"must be one of {known}, is {self.dtype!r}")

    @property
    def bytes(self) -> int:
        """Of the whole tensor."""
        return prod(self.shape) * DTYPE_BYTES[self.dtype]


@dataclass(frozen=True, slots=True)
class BucketRule:
    """How Megatron's DDP buffer is laid out (`distributed/param_and_grad_buffer.py` of megatron-core 0.16.1).

    align_elements: every parameter starts at a multiple of this, counted from the start of its bucket.
    end_multiple: a bucket's end is padded to a multiple of lcm(end_multiple, DP x CP).
    elements_max: a bucket closes once it holds at least this many elements; None is one bucket. As in Megatron it
        counts only on the first pipeline stage and in the first model chunk: all others have one bucket.
    elements_max_per_dp: with larger DP the limit is this times DP where that is more, as in Megatron's own default
        (40 million, and a million per data-parallel rank).
    high_bandwidth_padding: `pad_buckets_for_high_nccl_busbw`, the end is also a multiple of 2**16.
    """

    align_elements: Count = 64
    end_multiple: Count = 128
    elements_max: Count | None = None
    elements_max_per_dp: Count = 0
    high_bandwidth_padding: bool = False

    def __post_init__(self) -> None:
        if self.align_elements < 1:
            raise LayoutError("bucket_rule.align_elements", f"must be at least 1, is {self.align_elements}")
        if self.end_multiple < 1 or self.end_multiple % self.align_elements:
            raise LayoutError(
                "bucket_rule.end_multiple", f"{self.end_multiple} must be a multiple of {self.align_elements}"
            )
        if self.elements_max is not None and self.elements_max < 1:
            raise LayoutError("bucket_rule.elements_max", f"must be at least 1 or null, is {self.elements_max}")
        if self.elements_max_per_dp < 0 or (self.elements_max_per_dp and self.elements_max is None):
            raise LayoutError(
                "bucket_rule.elements_max_per_dp",
                f"must not be negative, and 0 where elements_max is null, is {self.elements_max_per_dp}",
            )

    def elements_max_at(self, dp: int) -> int | None:
        """The limit of a bucket in a layout of that DP size, None for no limit."""
        return None if self.elements_max is None else max(self.elements_max, self.elements_max_per_dp * dp)


@dataclass(frozen=True, slots=True)
class Manifest:
    """All parameters of a job and the kinds of state each element has. Raises LayoutError naming the parameter.

    `parameters` are kept in model order (first stage, layers, last stage), whatever order they are given in, so that
    equal manifests have equal digests. `whole`: what a step changes beside them, by layer and name.
    """

    __pydantic_config__ = STRICT

    parameters: Annotated[tuple[ParameterSpec, ...], Bound(max_length=PARAMETERS_MAX)]
    num_layers: Count
    kinds: Annotated[tuple[StateKind, ...], Bound(max_length=KINDS_MAX)]
    bucket_rule: BucketRule = BucketRule()
    whole: Annotated[tuple[WholeSpec, ...], Bound(max_length=PARAMETERS_MAX)] = ()
    num_experts: int = field(init=False, repr=False, compare=False)
    """Of each layer that has experts; 0 where none has."""
    forms: tuple[ParameterSpec, ...] = field(init=False, repr=False, compare=False)
    """The first parameter of each shape, split and dtype: a rule about these that holds for them holds for all."""
    _by_name: Mapping[str, ParameterSpec] = field(init=False, repr=False, compare=False)
    _by_stand: Mapping[tuple[int, ...], ParameterSpec] = field(init=False, repr=False, compare=False)
    _by_layer: Mapping[int, list[tuple[ParameterSpec, ...]]] = field(init=False, repr=False, compare=False)
    """In their order, in parts: those of a list of experts, or those between such lists."""
    _copied: frozenset[str] = field(init=False, repr=False, compare=False)
    _hash: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        by_stand = {spec.registered: spec for spec in self.parameters}
        if len(by_stand) < len(self.parameters):
            _refuse_repeats("order", Counter((spec.place, *spec.registered[1:]) for spec in self.parameters))
        by_stand = dict(sorted(by_stand.items()))
        ordered = tuple(by_stand.values())
        by_layer: dict[int, list[tuple[ParameterSpec, ...]]] = {}
        for (layer, _), specs in groupby(ordered, key=lambda spec: (spec.layer, spec.slot if spec.is_expert else -1)):
            by_layer.setdefault(layer, []).append(tuple(specs))
        forms: dict[tuple[object, ...], ParameterSpec] = {}
        for spec in ordered:
            forms.setdefault((spec.is_expert, _form(spec)), spec)
        whole = tuple(sorted(self.whole, key=lambda spec: (spec.layer, spec.name)))
        by_name = {spec.name: spec for spec in ordered}
        object.__setattr__(self, "parameters", ordered)
        object.__setattr__(self, "num_experts", 1 + max((spec.expert for spec in ordered), default=-1))
        object.__setattr__(self, "forms", tuple(forms.values()))
        object.__setattr__(self, "_by_name", by_name)
        object.__setattr__(self, "_by_stand", by_stand)
        object.__setattr__(self, "_by_layer", by_layer)
        object.__setattr__(self, "_copied", frozenset(spec.tied_to for spec in ordered if spec.tied_to))
        object.__setattr__(self, "whole", whole)
        # Of the names alone: two manifests of a process seldom have the same ones and differ.
        object.__setattr__(self, "_hash", hash((tuple(by_name), self.num_layers, self.kinds, self.bucket_rule)))
        _check_manifest(self)

    def __hash__(self) -> int:
        # Kept, because planning looks geometry up by manifest many times and a manifest has thousands of entries.
        return self._hash

    def __reduce__(self) -> tuple[Any, ...]:
        # A copy in another process is built anew: hashes of strings differ between processes.
        return Manifest, (self.parameters, self.num_layers, self.kinds, self.bucket_rule, self.whole)

    def parameter(self, name: str) -> ParameterSpec:
        """The parameter of that name; raises LayoutError when there is none."""
        if name not in self._by_name:
            raise LayoutError("parameter", f"{name!r} is not in the manifest")
        return self._by_name[name]

    def at(self, place: Place) -> tuple[ParameterSpec, ...]:
        """The parameters before the layers, or after them, in their order."""
        return tuple(spec for part in self._by_layer.get(-1, ()) for spec in part if spec.place == place)

    def in_layer(self, layer: int, experts: range) -> Iterator[ParameterSpec]:
        """The parameters of a layer, of its experts those of these numbers, in their order."""
        for part in self._by_layer.get(layer, ()):
            if part[0].is_expert:
                each = len(part) // self.num_experts
                yield from part[experts.start * each : experts.stop * each]
            else:
                yield from part

    def of_expert(self, spec: ParameterSpec, number: int) -> ParameterSpec:
        """The same parameter of another expert of its layer, which has the same shape and dtype."""
        place, layer, slot, _, order = spec.registered
        return self._by_stand[place, layer, slot, number, order]

    def has_copy(self, name: str) -> bool:
        """Whether the last of several stages holds a copy of that (embedding) parameter."""
        return name in self._copied

    def gradient_dtype(self, spec: ParameterSpec) -> str:
        """Of the reduced gradients of a parameter; float32 where the manifest has no such kind."""
        return next((kind.dtype_of(spec) for kind in self.kinds if kind.name == GRAD), FLOAT32)

    def element_bytes(self, spec: ParameterSpec, kinds: Collection[str] | None = None) -> int:
        """Bytes of one element of a parameter over the kinds of these names, by default over all."""
        wanted = (kind for kind in self.kinds if kinds is None or kind.name in kinds)
        return sum(DTYPE_BYTES[kind.dtype_of(spec)] for kind in wanted)

    def digest(self) -> str:
        """sha256 of the canonical JSON."""
        return _digest(self)


@lru_cache(maxsize=16)
def _digest(manifest: Manifest) -> str:
    # Kept, because every handoff of a job asks for it again while the job trains.
    return digest_of(to_json(manifest))


def _check_manifest(manifest: Manifest) -> None:
    specs = manifest.parameters
    if not 1 <= len(specs) <= PARAMETERS_MAX:
        raise LayoutError("parameters", f"must be 1 to {PARAMETERS_MAX}, are {len(specs)}")
    if not manifest.kinds:
        raise LayoutError("kinds", "must name at least one kind of state")
    _refuse_repeats("kinds", Counter(kind.name for kind in manifest.kinds))
    if len(manifest._by_name) < len(specs):
        _refuse_repeats("parameters", Counter(spec.name for spec in specs))
    if manifest.num_layers < 0:
        raise LayoutError("num_layers", f"must not be negative, is {manifest.num_layers}")
    _refuse_repeats("whole", Counter(spec.name for spec in manifest.whole))
    for spec in (*(parts[0][0] for parts in manifest._by_layer.values()), *manifest.whole):
        if spec.layer >= manifest.num_layers:
            raise LayoutError(f"parameter {spec.name}: layer", f"{spec.layer} of only {manifest.num_layers} layers")
    for spec in manifest.at(Place.LAST):
        if spec.tied_to:
            _check_tie(spec, manifest.parameter(spec.tied_to))
    _check_experts(manifest)


def _refuse_repeats(field_name: str, counts: Counter) -> None:
    for value, count in counts.items():
        if count > 1:
            raise LayoutError(field_name, f"{value} appears {count} times")


def _check_experts(manifest: Manifest) -> None:
    """All experts of the model's layers are as many, and alike: a rank's share of them has one size wherever it is."""
    numbers: dict[tuple[int, ...], list[ParameterSpec]] = {}
    dense: set[tuple[int, ...]] = set()
    for (place, layer, position, expert, order), spec in manifest._by_stand.items():
        if expert >= 0:
            numbers.setdefault((layer, position, order), []).append(spec)
        else:
            dense.add((place, layer, position))
    for (layer, slot, _), alike in numbers.items():
        first, at = alike[0], f"parameter {alike[0].name}: expert"
        if [spec.expert for spec in alike] != list(range(manifest.num_experts)):
            raise LayoutError(at, f"layer {layer} must have experts 0 to {manifest.num_experts - 1}, each once")
        if first.registered[:3] in dense:
            raise LayoutError(f"parameter {first.name}: slot", f"{slot} is that of another parameter of layer {layer}")
        form = _form(first)
        for spec in alike:
            if _form(spec) != form:
                raise LayoutError(f"parameter {spec.name}: expert", f"must be cut and shaped as {first.name}")


def _form(spec: ParameterSpec) -> tuple[object, ...]:
    return spec.shape, spec.dtype, spec.tp_dim, spec.blocks, spec.unit


def _check_tie(spec: ParameterSpec, other: ParameterSpec) -> None:
    same = (other.shape, other.tp_dim, other.blocks) == (spec.shape, spec.tp_dim, spec.blocks)
    if other.place != Place.FIRST or not same:
        raise LayoutError(
            f"parameter {spec.name}: tied_to", f"{other.name} must be on the first stage with the same shape and split"
        )
