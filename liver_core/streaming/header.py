"""The header of a slot: what a step did besides its gradient, in a fixed number of bytes. Pure.

A target applies exactly these numbers; it computes none of its own.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from liver_core.memory.memory_budget import HEADER_BYTES
from liver_core.same_value import same_value

_TIMES = struct.Struct("<2d")
"""Before the JSON: step_s and usual_step_s, which each source measures for itself."""


class HeaderError(ValueError):
    """The bytes are not a header, or the header does not fit; the text has the numbers."""


@dataclass(frozen=True, slots=True)
class StepHeader:
    """The step from `version - 1` to `version`.

    norm: total gradient norm of the world. clip: the limit it is clipped to, 0 for none.
    groups: {"key", "lr", "weight_decay"} of each parameter group, keyed by content; of a class that counts in its
        groups also {"counts"}, of those of which the source owns an element.
    scalars: per-element optimizer state that is no moment, before the step.
    stepped: whether moments existed before the step.
    step_s: seconds of the step before; usual_step_s: of an undisturbed one. For the estimate and the throttle.
    """

    version: int
    norm: float
    clip: float
    groups: tuple[Mapping[str, Any], ...]
    scalars: Mapping[str, Any]
    stepped: bool
    step_s: float = 0.0
    usual_step_s: float = 0.0

    def encode(self) -> bytes:
        """HEADER_BYTES bytes, padded with blanks. Floats survive bit for bit (shortest round-trip representation)."""
        same = asdict(self)
        data = _TIMES.pack(same.pop("step_s"), same.pop("usual_step_s")) + json.dumps(same).encode()
        if len(data) > HEADER_BYTES:
            raise HeaderError(f"the header of version {self.version} has {len(data)} bytes, at most {HEADER_BYTES} fit")
        return data.ljust(HEADER_BYTES)

    @staticmethod
    def decode(data: bytes) -> StepHeader:
        """Raises HeaderError. Bytes that were overwritten while they were read can be anything."""
        try:
            step_s, usual_step_s = _TIMES.unpack_from(data)
            value = json.loads(data[_TIMES.size :])
            return StepHeader(
                version=int(value["version"]),
                norm=float(value["norm"]),
                clip=float(value["clip"]),
                groups=tuple(value["groups"]),
                scalars=dict(value["scalars"]),
                stepped=bool(value["stepped"]),
                step_s=step_s,
                usual_step_s=usual_step_s,
            )
        except (ValueError, KeyError, TypeError, RecursionError, struct.error) as error:
            raise HeaderError(f"not a header: {error!r}") from None


def merged(headers: Sequence[StepHeader]) -> StepHeader:
    """What several sources of one world say together of one step; the step times are the first one's.

    Each knows the counts of the groups of which it owns an element. Raises HeaderError naming what two of them say
    differently. A group of which nobody knows the counts has none.
    """
    said: dict[str, Any] = {}
    groups: dict[str, dict[str, Any]] = {}
    for header in headers:
        for name in ("version", "norm", "clip", "scalars", "stepped"):
            _agree(said, name, getattr(header, name), "")
        for group in header.groups:
            known = groups.setdefault(group["key"], {})
            for name, value in group.items():
                _agree(known, name, value, f" of parameter group {group['key']}")
    return replace(headers[0], groups=tuple(groups[key] for key in sorted(groups)))


def _agree(known: dict[str, Any], name: str, value: Any, of: str) -> None:
    if not same_value(known.setdefault(name, value), value):
        raise HeaderError(f"sources differ on {name}{of}: {known[name]!r} and {value!r}")
