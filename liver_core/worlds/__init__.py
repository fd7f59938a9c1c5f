"""Worlds: two generations of one job side by side in one process.

Only `groups` touches private torch.distributed names. Only `megatron` and `cpu_compat` import Megatron-Core. `released`
builds structure without memory. `cpu_compat` lets Megatron run without CUDA; a machine with CUDA never imports it.
"""
