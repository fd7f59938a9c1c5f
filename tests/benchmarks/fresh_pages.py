"""What a page of fresh memory costs when it is first written, by how much memory is in use at a time.

Where a virtual machine's memory is mapped by its host on demand, this differs by much, and every allocation shows it.

Run from the root of the tree: python -m tests.benchmarks.fresh_pages [--sizes 512MB,4GB,16GB] [--rounds 3]
"""

from __future__ import annotations

import argparse
import mmap
import os
import time

import numpy as np

from tests.benchmarks.handoff import memory_available
from tests.benchmarks.handoff_model import parse_bytes

CHUNK_PAGES = 64
SLOW_US = 5.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", default="512MB,4GB,16GB", help="bytes to write at a time, smallest first")
    parser.add_argument("--rounds", type=int, default=3, help="how often each")
    given = parser.parse_args()
    room = memory_available()
    if given.rounds < 1:
        parser.error(f"--rounds: {given.rounds} is less than 1")
    for size in given.sizes.split(","):
        try:
            wanted = parse_bytes(size)
        except ValueError as error:
            parser.error(f"--sizes: {error}")
        if wanted > room:
            parser.error(f"--sizes: {size} is more than the {room / 1e9:.1f} GB that are free")
        for _ in range(given.rounds):
            print(f"{size:>6}: {told(first_writes_us(wanted))}", flush=True)
    print(f"load {os.getloadavg()[0]:.1f}")


def first_writes_us(size: int) -> np.ndarray:
    """Microseconds a page, a mean for each 64 pages [chunks], of writing `size` bytes of a fresh mapping once."""
    chunk = CHUNK_PAGES * mmap.PAGESIZE
    with mmap.mmap(-1, max(size // chunk, 1) * chunk, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory:
        memory.madvise(mmap.MADV_NOHUGEPAGE)
        # Nothing may look at a mapping that is closed, so no array of it is kept here.
        return _timed(np.frombuffer(memory, np.uint8).reshape(-1, CHUNK_PAGES, mmap.PAGESIZE)[:, :, 0])


def _timed(pages: np.ndarray) -> np.ndarray:
    spent = np.empty(len(pages))
    for number, each in enumerate(pages):
        started = time.perf_counter_ns()
        each[:] = 1
        spent[number] = time.perf_counter_ns() - started
    return spent / 1000 / CHUNK_PAGES


def told(spent: np.ndarray) -> str:
    """Mean and median, and which part of the chunks was slow."""
    mean, median, slow = spent.mean(), np.median(spent), (spent > SLOW_US).mean()
    return f"{mean:5.1f} us a page, median {median:4.1f}; {slow:4.0%} of runs of {CHUNK_PAGES} over {SLOW_US:.0f} us"


if __name__ == "__main__":
    main()
