"""Regions in several pieces of memory, for tests: whatever is true of one piece must be true of any cut."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch

from liver_core.device.region import Region


def cut_region(whole: torch.Tensor, cuts: Sequence[int]) -> Region:
    """A copy of a flat tensor in memory of its own, one piece for each part between `cuts`."""
    edges = sorted({0, len(whole), *(cut for cut in cuts if 0 < cut < len(whole))})
    return Region(whole[start:stop].clone() for start, stop in pairwise(edges))


def joined(region: Region) -> torch.Tensor:
    """A copy of all elements, which must be of one dtype."""
    return torch.cat(region.tensors)
