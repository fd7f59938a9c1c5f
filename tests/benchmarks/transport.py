"""Measures the transports between real processes: set-up, latency, bandwidth of a strided read, CPU at the source.

Run from the root of the tree: python -m tests.benchmarks.transport [--kinds nixl torch] [--repeats 5]
"""

from __future__ import annotations

import argparse
import os
import resource
import statistics
import time

import torch

from liver_core.transport.protocol import Read
from tests.liver_core.transport.ranks import Rank, Run, run_ranks
from tests.liver_core.transport.test_contract import leave, soon

RUNS, RUN_ELEMENTS = 2000, 6144
"""48 MiB (49 152 000 bytes) in 2000 runs, the size of a small rank's masters and moments."""

REGION = 2 * RUNS * RUN_ELEMENTS


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kinds", nargs="+", default=["nixl", "torch"])
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    print(f"torch {torch.__version__}, {os.cpu_count()} cores; median (least to most) of {options.repeats} runs")
    for kind in options.kinds:
        for size in (2, 4):
            found = [run_ranks(kind, size, measure, limit_s=60) for _ in range(options.repeats)]
            for name in found[0][0]:
                values = sorted(statistics.median(rank[name] for rank in ranks) for ranks in found)
                print(
                    f"{kind:9} {size} processes  {name:28} {values[len(values) // 2]:9.3f} "
                    f"({values[0]:.3f} to {values[-1]:.3f})"
                )


def measure(rank: Rank) -> dict[str, float]:
    torch.set_num_threads(1)
    found: dict[str, float] = {}
    source, target = torch.full((REGION,), float(rank.rank)), torch.zeros(REGION)
    endpoint = rank.endpoint()
    start, used = time.perf_counter(), cpu_seconds()
    endpoint.register(sources={"master": source}, targets={"master": target})
    address = endpoint.address()
    endpoint.start_progress()
    found["make and register, ms"] = (time.perf_counter() - start) * 1e3
    found["make and register, ms CPU"] = (cpu_seconds() - used) * 1e3
    addresses = rank.exchange(address)
    peers = [peer for peer in range(rank.size) if peer != rank.rank]
    start = time.perf_counter()
    for peer in peers:
        endpoint.connect(peer, addresses[peer] or b"", soon())
    found["connect to one peer, ms"] = (time.perf_counter() - start) * 1e3 / len(peers)
    rank.exchange()
    small = []
    for _ in range(200):
        start = time.perf_counter()
        endpoint.read([Read(peers[0], "master", (Run(0, 0, 16),))], soon())
        small.append(time.perf_counter() - start)
    found["64 bytes, us"] = statistics.median(small) * 1e6
    rank.exchange()
    for name, everybody in (("alone", False), ("all at once", True)):
        wall, cpu = bulk(rank, endpoint, peers, everybody)
        found[f"48 MB {name}, GB/s"] = wall
        found[f"48 MB {name}, GB/s CPU"] = cpu
    used, start = cpu_seconds(), time.perf_counter()
    rank.hub.poll(1.0)
    found["CPU of idle progress, %"] = (cpu_seconds() - used) / (time.perf_counter() - start) * 100
    leave(rank, endpoint)
    return found


def bulk(rank: Rank, endpoint, peers: list[int], everybody: bool) -> tuple[float, float]:
    """GB for a second, and for a second of the reading thread's CPU, runs shared out over all peers; best of three."""
    step = 2 * RUN_ELEMENTS
    reads = [
        Read(peer, "master", tuple(Run(i * step, i * step, RUN_ELEMENTS) for i in range(at, RUNS, len(peers))))
        for at, peer in enumerate(peers)
    ]
    rates, cpu_rates = [], []
    for turn in range(1 if everybody else rank.size):
        rank.exchange()
        if everybody or turn == rank.rank:
            for _ in range(3):
                used = time.thread_time()
                report = endpoint.read(reads, soon(30))
                rates.append(report.bytes / report.seconds / 1e9)
                cpu_rates.append(report.bytes / (time.thread_time() - used) / 1e9)
    rank.exchange()
    return max(rates), max(cpu_rates)


def cpu_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


if __name__ == "__main__":
    main()
