"""Imported once by the fork server: torch, Megatron and the reference job, patched for the CPU. Starts no thread."""

import os
import warnings

os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Megatron warns at every import about optional parts that are not here; a failing test must stay readable.
warnings.simplefilter("ignore")

import torch  # noqa: E402  (reads the environment)

from liver_core.worlds import cpu_compat  # noqa: E402

torch.set_num_threads(1)
if not torch.cuda.is_available():
    cpu_compat.apply()

from liver_core.rank import loop  # noqa: E402  (patched before Megatron is imported)
from liver_core.training import gpt  # noqa: E402
from liver_core.transport import nixl  # noqa: E402
from liver_core.worlds.megatron import prepare_process  # noqa: E402

prepare_process()
__all__ = ["gpt", "loop", "nixl"]
