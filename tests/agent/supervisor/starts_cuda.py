"""Imported by a zygote: a module after which torch says that CUDA was started there, and nowhere else."""

import sys

import torch

if "agent.supervisor.zygote" in str(sys.modules["__main__"].__spec__):
    torch.cuda.is_initialized = lambda: True
