"""Imported once by the fork server: torch, Megatron and the reference job, patched for the CPU. Starts no thread."""

import os
import warnings

os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Megatron warns at every import about optional parts that are not here; a failing test must stay readable.
warnings.simplefilter("ignore")

import torch  # noqa: E402  (reads the environment)

from liver_core.device.unasked import cuda_unasked  # noqa: E402
from liver_core.worlds import cpu_compat  # noqa: E402

torch.set_num_threads(1)
with cuda_unasked() as gpu_is_here:
    if not gpu_is_here:
        cpu_compat.apply()
    from liver_core.rank import loop  # (patched before Megatron is imported)
    from liver_core.training import gpt
    from liver_core.transport import nixl
    from liver_core.worlds.megatron import prepare_process

    prepare_process()
__all__ = ["gpt", "loop", "nixl"]
