"""What NIXL reads between two processes when nothing else is asked of it: the raw bandwidth of a report.

One block, one run, into memory that was touched before. Prints one JSON object:
python -m tests.benchmarks.handoff_raw [--repeats 7]
"""

from __future__ import annotations

import argparse
import functools
import json
import statistics
import subprocess
import sys

import torch

from liver_core.transport.protocol import Read
from tests.liver_core.transport.ranks import Rank, Run, run_ranks
from tests.liver_core.transport.test_contract import leave, soon

BLOCK_BYTES = 64 << 20
LIMIT_S = 120.0


def raw_bandwidth(repeats: int = 7) -> dict[str, float]:
    """Bytes a second, measured in processes that end with the measurement. Raises RuntimeError."""
    command = [sys.executable, "-m", "tests.benchmarks.handoff_raw", "--repeats", str(repeats)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=2 * LIMIT_S, check=False)
    if done.returncode:
        raise RuntimeError(f"raw bandwidth: {done.stderr.strip()[-400:]}")
    return json.loads(done.stdout.strip().splitlines()[-1])


def measure(rank: Rank, *, repeats: int) -> list[float]:
    """Seconds of each read of one block; rank 1 reads from rank 0."""
    torch.set_num_threads(1)
    numel = BLOCK_BYTES // 4
    source, target = torch.full((numel,), float(rank.rank)), torch.zeros(numel)
    endpoint = rank.endpoint()
    endpoint.register(sources={"master": source}, targets={"master": target})
    address = endpoint.address()
    endpoint.start_progress()
    addresses = rank.exchange(address)
    peer = 1 - rank.rank
    endpoint.connect(peer, addresses[peer] or b"", soon())
    rank.exchange()
    seconds = []
    if rank.rank == 1:
        whole = [Read(peer, "master", (Run(0, 0, numel),))]
        seconds = [endpoint.read(whole, soon()).seconds for _ in range(repeats + 1)]
    leave(rank, endpoint)
    return seconds[1:]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=7)
    scenario = functools.partial(measure, repeats=parser.parse_args().repeats)
    rates = [BLOCK_BYTES / seconds for seconds in run_ranks("nixl", 2, scenario, limit_s=LIMIT_S)[1]]
    found = {"bytes_per_s": statistics.median(rates), "least": min(rates), "most": max(rates)}
    print(json.dumps(found | {"block_bytes": BLOCK_BYTES, "repeats": len(rates)}))


if __name__ == "__main__":
    main()
