"""What a rank tells the relay of its machine of its memory on a GPU: handles of CUDA IPC, and where in them pieces lie.

Without torch. The rank does nothing for it afterwards.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from liver_core.cuda_driver import CudaDriver, CudaRefused


class Exports:
    """Of one endpoint. `allocations`: bus id of the GPU and handle (hex) of each. `load`: gives the driver when the
    first piece comes."""

    def __init__(self, load: Callable[[], CudaDriver]) -> None:
        self._load = load
        self._numbers: dict[int, int] = {}
        self.allocations: list[tuple[str, str]] = []

    def located(self, index: int, pieces: Iterable[tuple[int, int]]) -> list[tuple[int, int, int]]:
        """Offset, bytes and number of the allocation of each piece (address, bytes) on the visible device `index`.

        Raises CudaRefused for memory that no other process can open, with what to change.
        """
        driver = self._load()
        device = driver.device(index)
        driver.enter(device)
        found = []
        for address, size in pieces:
            if not driver.is_exportable(address):
                raise CudaRefused(
                    "no other process can open this memory by CUDA IPC, as that of expandable_segments, of "
                    "cudaMallocAsync and other virtual memory; leave expandable_segments out of "
                    "PYTORCH_CUDA_ALLOC_CONF, or set it to False, and its backend to native"
                )
            base, _ = driver.range_of(address)
            if base not in self._numbers:
                self.allocations.append((driver.bus_id(device), self._exported(driver, base).hex()))
                self._numbers[base] = len(self.allocations) - 1
            found.append((address - base, size, self._numbers[base]))
        return found

    def _exported(self, driver: CudaDriver, base: int) -> bytes:
        try:
            return driver.export(base)
        except CudaRefused as error:
            raise CudaRefused(f"{error}; this machine offers no CUDA IPC, as with MIG and under WSL") from None
