"""The numbers of experts in the names that Megatron gives to their parameters on one rank. Pure."""

from __future__ import annotations

import re
from typing import NamedTuple

_ONE_BY_ONE = re.compile(r"(?P<experts>.+\.local_experts)\.(?P<number>\d+)\.(?P<rest>.+)")
"""SequentialMLP: each expert is a module."""
_GROUPED = re.compile(r"(?P<experts>.+\.experts\.\w+)\.(?P<rest>weight|bias)(?P<number>\d+)")
"""TEGroupedMLP: a module for one matrix of all of them."""


class ExpertName(NamedTuple):
    """`experts`: what all of one list begin with. `number`: which of a rank's experts, from 0. `name`: with another
    number put in."""

    experts: str
    number: int
    before: str
    after: str

    def name(self, number: int) -> str:
        return f"{self.before}{number}{self.after}"


def expert_name(name: str) -> ExpertName | None:
    """What a parameter's name says, None where it is of no expert: of a router, of shared experts, of anything else."""
    found = _ONE_BY_ONE.fullmatch(name) or _GROUPED.fullmatch(name)
    if found is None:
        return None
    start, stop = found.span("number")
    return ExpertName(found["experts"], int(found["number"]), name[:start], name[stop:])
