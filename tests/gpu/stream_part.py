"""Part 2: one-sided reads between two processes that share a device, while the memory that is read changes."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.gpu.check import Finding, Verdict

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


@contextlib.contextmanager
def mps() -> Iterator[str]:
    """Have CUDA's server of several processes in this block, where it can be had without touching the GPU's settings.
    Yields what came of it."""
    control = shutil.which("nvidia-cuda-mps-control")
    if control is None:
        yield "not installed; kernels of two processes take turns"
        return
    with tempfile.TemporaryDirectory() as folder:
        os.environ |= {"CUDA_MPS_PIPE_DIRECTORY": folder, "CUDA_MPS_LOG_DIRECTORY": folder}
        try:
            subprocess.run([control, "-d"], check=True, timeout=10, capture_output=True)
        except (OSError, subprocess.SubprocessError) as error:
            for name in ("CUDA_MPS_PIPE_DIRECTORY", "CUDA_MPS_LOG_DIRECTORY"):
                del os.environ[name]
            yield f"did not start: {error}"
            return
        try:
            yield "runs"
        finally:
            with contextlib.suppress(OSError, subprocess.SubprocessError):
                subprocess.run([control], input=b"quit\n", timeout=10, capture_output=True, check=False)
