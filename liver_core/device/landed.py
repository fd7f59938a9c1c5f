"""Bytes that a network card wrote into a GPU: when kernels of that GPU may read them.

From Hopper on they may once the CPU has seen that the read is complete. Before, CUDA asks for a flush, and says so by
an attribute of the device. Written after the documentation of CUDA's driver; not run on a GPU.
"""

from __future__ import annotations

import ctypes
from functools import cache

import torch

# cuda.h of CUDA 13: CUdevice_attribute, CUflushGPUDirectRDMAWritesTarget and -Scope.
_WRITES_ORDERING, _ORDERED_FOR_OWNER = 118, 100
_CURRENT_CONTEXT, _TO_OWNER = 0, 100


def flush_landed(device: torch.device) -> None:
    """Call it on the thread that launches what reads the bytes. Nothing where the device keeps the order by itself.

    Raises RuntimeError if CUDA refuses.
    """
    if device.type != "cuda" or _keeps_order(device.index or 0):
        return
    _check(_driver().cuFlushGPUDirectRDMAWrites(_CURRENT_CONTEXT, _TO_OWNER), "cuFlushGPUDirectRDMAWrites")


@cache
def _keeps_order(index: int) -> bool:
    ordering = ctypes.c_int(0)
    driver = _driver()
    handle = ctypes.c_int(0)
    _check(driver.cuDeviceGet(ctypes.byref(handle), index), "cuDeviceGet")
    _check(driver.cuDeviceGetAttribute(ctypes.byref(ordering), _WRITES_ORDERING, handle), "cuDeviceGetAttribute")
    return ordering.value >= _ORDERED_FOR_OWNER


@cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


def _check(status: int, call: str) -> None:
    if status:
        raise RuntimeError(f"{call}: CUDA driver error {status}")
