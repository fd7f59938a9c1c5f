"""Imported once by the fork server: torch, Megatron and the reference job, patched for the CPU; no thread is started."""

import os

os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch

from liver_core.worlds import cpu_compat

torch.set_num_threads(1)
if not torch.cuda.is_available():
    cpu_compat.apply()

from liver_core.training import gpt
from liver_core.worlds.megatron import prepare_process

prepare_process()
__all__ = ["gpt"]
