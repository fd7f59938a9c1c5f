"""Bytes that a network card wrote into a GPU: when kernels of that GPU may read them.

From Hopper on they may once the CPU has seen that the read is complete. Before, CUDA asks for a flush, and says so by
an attribute of the device. Written after the documentation of CUDA's driver; not run on a GPU.
"""

from __future__ import annotations

from functools import cache

import torch

from liver_core import cuda_driver

# cuda.h of CUDA 13: CUdevice_attribute, CUflushGPUDirectRDMAWritesTarget and -Scope.
_WRITES_ORDERING, _ORDERED_FOR_OWNER = 118, 100
_CURRENT_CONTEXT, _TO_OWNER = 0, 100


def flush_landed(device: torch.device) -> None:
    """Call it on the thread that launches what reads the bytes. Nothing where the device keeps the order by itself.

    Raises RuntimeError if CUDA refuses.
    """
    try:
        if device.type == "cuda" and not _keeps_order(device.index or 0):
            cuda_driver.load().call("cuFlushGPUDirectRDMAWrites", _CURRENT_CONTEXT, _TO_OWNER)
    except cuda_driver.CudaRefused as error:
        raise RuntimeError(str(error)) from error


@cache
def _keeps_order(index: int) -> bool:
    driver = cuda_driver.load()
    return driver.attribute(driver.device(index), _WRITES_ORDERING) >= _ORDERED_FOR_OWNER
