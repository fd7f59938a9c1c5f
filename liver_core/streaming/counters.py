"""Counters in plain host memory that one process writes and others read without asking.

A reader may look at any moment, so a counter changes by single stores of eight aligned bytes and never goes back.
"""

from __future__ import annotations

import platform

import torch

from liver_core.device import host_zeros

_ORDERED_STORES = ("x86_64", "AMD64", "i686")


class CounterOrder(AssertionError):
    """A counter would go back, or leave out a number that a reader must be able to see."""


class UnorderedStores(RuntimeError):
    """This machine's processor may show stores to other processes in another order."""


class HostCounters:
    """`memory` int64[count], all `start` at first. Raises UnorderedStores on a CPU whose stores other processes may see
    in another order: that of x86 alone is the order of the program, others would need a fence after each store."""

    def __init__(self, count: int, start: int) -> None:
        if platform.machine() not in _ORDERED_STORES:
            raise UnorderedStores(
                f"streaming needs stores to host memory in order (x86-64), this is {platform.machine()}: handoffs "
                "here copy state in the pause"
            )
        self.memory = host_zeros(count, torch.int64)
        self._values = self.memory.numpy()
        self._values[:] = start

    def __getitem__(self, at: int) -> int:
        return int(self._values[at])

    def put(self, at: int, value: int) -> None:
        """Odd after even, and even after odd: a reader can always tell that something changed."""
        present = self[at]
        if value <= present or (present >= 0 and value % 2 == present % 2):
            raise CounterOrder(f"counter {at} goes from {present} to {value}")
        self._values[at] = value
