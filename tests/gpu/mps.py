"""CUDA's server for several processes on one GPU: their kernels run side by side, where they would take turns."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator

PIPES, LOGS = "CUDA_MPS_PIPE_DIRECTORY", "CUDA_MPS_LOG_DIRECTORY"


@contextlib.contextmanager
def mps() -> Iterator[str]:
    """Have CUDA's server of several processes in this block, where it can be had without touching the GPU's settings.
    Yields what came of it."""
    if PIPES in os.environ:
        yield "runs, and did before"
        return
    control = shutil.which("nvidia-cuda-mps-control")
    if control is None:
        yield "not installed; kernels of two processes take turns"
        return
    with tempfile.TemporaryDirectory() as folder:
        os.environ |= {PIPES: folder, LOGS: folder}
        try:
            subprocess.run([control, "-d"], check=True, timeout=10, capture_output=True)
        except (OSError, subprocess.SubprocessError) as error:
            _forget()
            yield f"did not start: {error}"
            return
        try:
            yield "runs"
        finally:
            with contextlib.suppress(OSError, subprocess.SubprocessError):
                subprocess.run([control], input=b"quit\n", timeout=10, capture_output=True, check=False)
            _forget()


def _forget() -> None:
    for name in (PIPES, LOGS):
        del os.environ[name]
