"""Tensors that a step changes and that are in no buffer of gradients: the bias by which routers balance their experts.

Each rank of a pipeline stage has the whole of them, equal bit for bit. Megatron changes them with the reduction of the
gradients, which is before the boundary. So a rank keeps them as they were before the step too: the world that does the
step again needs those, the world that applies it the others.
"""

from __future__ import annotations

import base64
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from hashlib import blake2b
from itertools import accumulate, pairwise
from types import MappingProxyType
from typing import NamedTuple

import torch

from liver_core.certificate import MASK
from liver_core.layout import Manifest, WholeSpec

Encoded = Mapping[str, str]
"""Name -> bytes of the tensor in base64."""


class BothVersions(NamedTuple):
    """As they were before a step, and as they are after it; the same where the step was dropped."""

    before: Encoded
    after: Encoded


class StepTensorsMissing(RuntimeError):
    """What another world gave is not what this one has to have; the text names the tensor."""


def is_step_tensor(module: torch.nn.Module, name: str) -> bool:
    """Whether a persistent buffer of a module is one that Megatron changes in each step: a router's `expert_bias`."""
    return name == "expert_bias" and hasattr(module, "local_tokens_per_expert")


def step_buffers(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Their names in this rank's model. In fp32: Megatron casts them with the model, and back in its first forward
    pass, so that until then they could not take what they are given."""
    for path, module in model.named_modules():
        for name, _ in module.named_buffers(recurse=False):
            if is_step_tensor(module, name):
                module._maintain_float32_expert_bias()  # type: ignore[operator]
                yield f"{path}.{name}", getattr(module, name)


class StepTensors:
    """Those of one rank's world, by name with the global layer number: as they are, and as they were `before` the step
    that began last."""

    def __init__(
        self, model: torch.nn.Module | None = None, named: Mapping[str, torch.Tensor] = MappingProxyType({})
    ) -> None:
        self._modules = () if model is None else tuple(model.modules())
        self._named = dict(named)
        self._before: dict[str, torch.Tensor] = {}

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """The live ones."""
        return tuple(self._named.values())

    def begin(self) -> None:
        """A step begins: keep them as they are now."""
        if not self._before:
            self._before = {name: torch.empty_like(tensor) for name, tensor in self._named.items()}
        _copy(self._named, self._before)

    def put_back(self) -> None:
        """The step is done again from its start: set them as they were there, and forget the tokens counted since."""
        if self._before:
            _copy(self._before, self._named)
        for module in self._modules:
            counted = getattr(module, "local_tokens_per_expert", None)
            if counted is not None:
                counted.zero_()
            if hasattr(module, "reset_global_aux_loss_tracker"):
                module.reset_global_aux_loss_tracker()  # type: ignore[operator]

    @contextmanager
    def as_before(self) -> Iterator[None]:
        """Within this block they are as before the step that began last: for what is due after the one before it."""
        after = {name: tensor.detach().clone() for name, tensor in self._named.items()}
        if self._before:
            _copy(self._before, self._named)
        try:
            yield
        finally:
            _copy(after, self._named)

    def encoded(self) -> BothVersions:
        """As they were before the step that began last, and as they are. Waits for the device once."""
        before = self._before or self._named
        tensors = (*before.values(), *self._named.values())
        if not tensors:
            return BothVersions({}, {})
        whole = torch.cat([tensor.detach().reshape(-1).view(torch.uint8) for tensor in tensors]).cpu().numpy().tobytes()
        stops = list(accumulate(tensor.numel() * tensor.element_size() for tensor in tensors))
        texts = [base64.b64encode(whole[start:stop]).decode() for start, stop in pairwise((0, *stops))]
        count = len(self._named)
        return BothVersions(*(dict(zip(self._named, each, strict=True)) for each in (texts[:count], texts[count:])))

    def install(self, encoded: Encoded) -> None:
        """Set them as a rank of another world had them, which `taken` has looked at."""
        for name, tensor in self._named.items():
            raw = torch.frombuffer(bytearray(base64.b64decode(encoded[name])), dtype=tensor.dtype)
            with torch.no_grad():
                tensor.copy_(raw.reshape(tensor.shape))
        self.begin()


def taken(wanted: Iterable[WholeSpec], given: Encoded) -> Encoded:
    """Those of them that are wanted. Raises StepTensorsMissing where one is not there, or not whole."""
    found = {}
    for spec in wanted:
        held = given.get(spec.name, "")
        if len(base64.b64decode(held)) != spec.bytes:
            there = f"has {len(base64.b64decode(held))} bytes" if held else "is not given"
            raise StepTensorsMissing(f"{spec.name}: {there} by the world before, must have {spec.bytes}")
        found[spec.name] = held
    return found


def version_sums(manifest: Manifest, both: BothVersions, times: int) -> list[int]:
    """Of each tensor of the manifest a number modulo 2^64: a hash of the bytes of both versions, `times` over; 0 of one
    that is not there. Its sums over a world that has each once, and over another that has it `times`, are equal."""
    return [
        (_byte_sum(both.before[spec.name]) + _byte_sum(both.after[spec.name])) * times & MASK
        if spec.name in both.before
        else 0
        for spec in manifest.whole
    ]


def _byte_sum(encoded: str) -> int:
    return int.from_bytes(blake2b(base64.b64decode(encoded), digest_size=8).digest(), "little")


@torch.no_grad()
def _copy(source: Mapping[str, torch.Tensor], target: Mapping[str, torch.Tensor]) -> None:
    if source:
        torch._foreach_copy_([*target.values()], [*source.values()])
