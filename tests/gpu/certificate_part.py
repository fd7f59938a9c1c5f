"""Part 5: the certificate of a region on the device: bit for bit what numpy finds, and how fast."""

from __future__ import annotations

import statistics
import time
from typing import Any

import torch

from liver_core.certificate.batches import batches_of
from liver_core.certificate.on_device import device_totals
from liver_core.certificate.on_host import host_totals
from liver_core.certificate.slabs import Slab, in_pairs
from liver_core.device import DeviceWait, settle
from tests.gpu.check import Finding, Verdict

ELEMENTS = {"cuda": 1 << 28, "cpu": 1 << 20}
REPEATS = 5
COMPARED = 1 << 20
"""Elements that numpy looks at too."""


def run(device: str) -> Finding:
    on = torch.device(device, 0) if device == "cuda" else torch.device("cpu")
    unequal = [name for name, slab in slabs(COMPARED).items() if not equal(on, slab)]
    if unequal:
        return Finding(Verdict.FAILED, f"other sums than numpy's for {', '.join(unequal)}")
    found: dict[str, Any] = {}
    region = torch.randn(ELEMENTS[device], device=on)
    for name, slab in slabs(ELEMENTS[device]).items():
        device_totals([region], batches_of([slab]), (1,))
        taken = [seconds(region, slab) for _ in range(REPEATS)]
        found[name] = {
            "bytes": 4 * region.numel(),
            "s": statistics.median(taken),
            "least_s": min(taken),
            "most_s": max(taken),
        }
    whole = found["pairs of a whole matrix"]
    text = f"numpy's bits; {whole['bytes'] / 1e9:.3g} GB of pairs in {whole['s'] * 1e3:.1f} ms"
    return Finding(Verdict.PASSED, text, found)


def slabs(elements: int) -> dict[str, Slab]:
    whole = Slab(0, False, 0, 0, elements // 1024, 1024, 1024)
    rows = Slab(0, False, 0, 0, elements // 64, 64, 128)
    return {
        "a whole matrix": whole,
        "short rows": rows,
        "pairs of a whole matrix": in_pairs(whole),
        "pairs of short rows": in_pairs(rows),
    }


def equal(on: torch.device, slab: Slab) -> bool:
    region = torch.randn(COMPARED, generator=torch.Generator().manual_seed(1))
    return device_totals([region.to(on)], batches_of([slab]), (7,)) == host_totals([region], [slab], (7,))


def seconds(region: torch.Tensor, slab: Slab) -> float:
    settle(DeviceWait.READ, region.device)
    began = time.monotonic()
    device_totals([region], batches_of([slab]), (1,))
    return time.monotonic() - began
