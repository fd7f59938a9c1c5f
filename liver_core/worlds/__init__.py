"""Worlds: two generations of one job living side by side in one process.

`groups` is the only place that touches private torch.distributed names, `megatron` the only one here that imports
Megatron-Core, `released` builds structure without memory, `cpu_compat` lets Megatron run without CUDA and is never
imported on a machine that has it.
"""
