"""Part 2: one-sided reads between two processes that share a device, while the memory that is read changes."""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
from pathlib import Path
from typing import Any

from tests.gpu.check import Finding, Verdict
from tests.gpu.mps import mps

SIZES = {"cuda": "1GB,4GB", "cpu": "8MB"}


def run(device: str) -> Finding:
    # Without emulation a read that ends well was one-sided.
    os.environ |= {"UCX_PROTO_EMULATION_ENABLE": "n", "UCX_CUDA_IPC_ENABLE_GET_ZCOPY": "on"}
    with mps() if device == "cuda" else contextlib.nullcontext("not asked for on a CPU") as served:
        return measure(device, {"mps": served})


def measure(device: str, found: dict[str, Any]) -> Finding:
    from tests.benchmarks import device_stream

    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "stream.json"
        status = device_stream.main(["--device", device, "--sizes", SIZES[device], "--report", str(report)])
        found |= json.loads(report.read_text())
    edges = found["edges"]
    if status:
        unequal = [case["state_bytes"] for case in found["cases"] if not case["equal"]]
        text = f"{edges['mixed']} of {edges['looks']} looks saw two versions; states that differ: {unequal or 'none'}"
        return Finding(Verdict.FAILED, text, found)
    last = found["cases"][-1]
    text = (
        f"{edges['looks']} looks, none saw two versions; {last['state_bytes'] / 1e9:.3g} GB streamed at "
        f"{last['stream_gb_s']:.1f} GB/s ({last['share_of_copy']:.0%} of a copy), pause {last['pause_ms']:.0f} ms, "
        f"steps {last['step_ratio_streaming']:.2f} times as long; MPS: {found['mps']}"
    )
    return Finding(Verdict.PASSED, text, found)
