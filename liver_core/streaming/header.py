"""The header of a slot: what a step did besides its gradient, as JSON in a fixed number of bytes. Pure.

A target applies exactly these numbers; it computes none of its own.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

HEADER_BYTES = 16384


class HeaderError(ValueError):
    """The bytes are not a header, or the header does not fit; the text has the numbers."""


@dataclass(frozen=True, slots=True)
class StepHeader:
    """The step from `version - 1` to `version`.

    norm: total gradient norm of the world. clip: the limit it is clipped to, 0 for none.
    groups: {"key", "lr", "weight_decay"} of each parameter group, keyed by content (`tensors.step.hyper_parameters`).
    scalars: per-element optimizer state that is no moment, before the step (`tensors.megatron.element_scalars`).
    stepped: whether moments existed before the step (`tensors.megatron.has_stepped`).
    step_s: seconds of the step before; usual_step_s: of an undisturbed one. For the estimate and the throttle.
    """

    version: int
    plan_revision: int
    norm: float
    clip: float
    groups: tuple[Mapping[str, Any], ...]
    scalars: Mapping[str, Any]
    stepped: bool
    step_s: float = 0.0
    usual_step_s: float = 0.0

    def encode(self) -> bytes:
        """HEADER_BYTES bytes, padded with blanks. Floats survive bit for bit (shortest round-trip representation)."""
        data = json.dumps(asdict(self)).encode()
        if len(data) > HEADER_BYTES:
            raise HeaderError(f"the header of version {self.version} has {len(data)} bytes, at most {HEADER_BYTES} fit")
        return data.ljust(HEADER_BYTES)

    @staticmethod
    def decode(data: bytes) -> StepHeader:
        """Raises HeaderError. Bytes that were overwritten while they were read can be anything."""
        try:
            value = json.loads(data)
            return StepHeader(
                version=int(value["version"]),
                plan_revision=int(value["plan_revision"]),
                norm=float(value["norm"]),
                clip=float(value["clip"]),
                groups=tuple(value["groups"]),
                scalars=dict(value["scalars"]),
                stepped=bool(value["stepped"]),
                step_s=float(value["step_s"]),
                usual_step_s=float(value["usual_step_s"]),
            )
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise HeaderError(f"not a header: {error!r}") from None

    def same_step(self, other: StepHeader) -> bool:
        """Whether two sources say the same of one step; their step times may differ."""
        return replace(self, step_s=0.0, usual_step_s=0.0) == replace(other, step_s=0.0, usual_step_s=0.0)
