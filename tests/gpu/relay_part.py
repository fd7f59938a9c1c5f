"""Part 9: a relay reads the device's memory for another process while that memory is rewritten under a guard; how fast,
how much longer steps take beside it, and what its context takes."""

from __future__ import annotations

import statistics
import time
from functools import partial
from typing import Any

import torch

from liver_core.streaming.counters import HostCounters
from liver_core.streaming.ring import COUNTER
from liver_core.transport.protocol import Guard, Read, Transport
from tests.gpu.check import Finding, Verdict
from tests.liver_core.transport.ranks import Rank, Run, run_ranks

ELEMENTS = {"cuda": 1 << 26, "cpu": 1 << 20}
TILE_ELEMENTS = 1 << 18
TILES_AT_ONCE = 16
STEPS = {"cuda": 40, "cpu": 12}
STEP_S = 0.2
SIDE = {"cuda": 8192, "cpu": 256}
REPEATS = 3
REST_S = 0.001
LIMIT_S = 50.0


def run(device: str) -> Finding:
    source, reader = run_ranks("relay", 2, partial(part_of, device=device), limit_s=LIMIT_S)
    found: dict[str, Any] = {**source, **reader}
    ratio = statistics.median(found["beside_s"]) / statistics.median(found["alone_s"])
    found |= {"ratio": ratio}
    text = (
        f"{found['whole']} tiles came whole, {found['mixed']} of two versions, {found['overtaken']} were overtaken; "
        f"{found['gb_s']:.2f} GB/s over loopback, steps {ratio:.2f} times as long (medians of "
        f"{len(found['beside_s'])}), the relay takes {found['context_bytes'] / 1e6:.0f} MB of the device"
    )
    passed = found["whole"] and not found["mixed"] and found["equal"]
    return Finding(Verdict.PASSED if passed else Verdict.FAILED, text, found)


def part_of(rank: Rank, *, device: str) -> dict[str, Any]:
    """Rank 0 is read, rank 1 reads."""
    torch.set_num_threads(1)
    region = torch.zeros(ELEMENTS[device], device=device)
    endpoint = rank.endpoint()
    part = source if rank.rank == 0 else reader
    found = part(rank, endpoint, region, device)
    rank.exchange()
    return found


def source(rank: Rank, endpoint: Transport, region: torch.Tensor, device: str) -> dict[str, Any]:
    """Counters: of the state, and 1 once it is rewritten no more."""
    counters = HostCounters(2, 0)
    endpoint.register(sources={"master": region, COUNTER: counters.memory})
    free = free_bytes(device)
    address = endpoint.address()
    context = free - free_bytes(device)
    rank.exchange(address)
    one = torch.ones(SIDE[device], SIDE[device], device=device)
    products = calibrated(one, device)
    alone = [step(one, products, region, counters, version, device) for version in range(1, STEPS[device] + 1)]
    rank.exchange()
    first = STEPS[device] + 1
    beside = [step(one, products, region, counters, first + at, device) for at in range(STEPS[device])]
    counters.put(1, 1)
    rank.exchange()
    rank.exchange()
    return {"alone_s": alone, "beside_s": beside, "context_bytes": context}


def calibrated(one: torch.Tensor, device: str) -> int:
    """How many products of matrices take the time of a step."""
    torch.mm(one, one)
    settle(device)
    began, count = time.monotonic(), 0
    while time.monotonic() - began < STEP_S:
        torch.mm(one, one)
        settle(device)
        count += 1
    return count


def step(
    one: torch.Tensor, products: int, region: torch.Tensor, counters: HostCounters, version: int, device: str
) -> float:
    """Seconds of it. The counter is odd before anything is rewritten, and even once the device has done it."""
    began = time.monotonic()
    for _ in range(products):
        torch.mm(one, one)
    settle(device)
    counters.put(0, 2 * version - 1)
    region.fill_(float(version))
    settle(device)
    counters.put(0, 2 * version)
    return time.monotonic() - began


def reader(rank: Rank, endpoint: Transport, region: torch.Tensor, device: str) -> dict[str, Any]:
    """A tile is `whole` if its guard held and all of it is of the guard's version, `mixed` if only the first is so."""
    looked = torch.zeros(2, dtype=torch.int64)
    endpoint.register(targets={"master": region, COUNTER: looked})
    endpoint.connect(0, rank.exchange()[0] or b"", time.monotonic() + LIMIT_S / 2)
    rank.exchange()
    found: dict[str, Any] = {"whole": 0, "mixed": 0, "overtaken": 0}
    tiles, at = range(0, len(region), TILE_ELEMENTS), 0
    while True:
        endpoint.read([Read(0, COUNTER, (Run(0, 0, 2),))], soon())
        version, over = looked.tolist()
        if over:
            break
        if version % 2 or not version:
            rank.hub.poll(REST_S)
            continue
        starts = [tiles[(at + number) % len(tiles)] for number in range(min(TILES_AT_ONCE, len(tiles)))]
        at += len(starts)
        guard = Guard(COUNTER, 0, version)
        report = endpoint.read(
            [Read(0, "master", (Run(start, start, TILE_ELEMENTS),), guard) for start in starts], soon()
        )
        for number, outcome in report.guarded.items():
            low, high = torch.aminmax(region[starts[number] : starts[number] + TILE_ELEMENTS])
            is_whole = float(low) == float(high) == version // 2
            found["overtaken" if not outcome.held else "whole" if is_whole else "mixed"] += 1
    rank.exchange()
    seconds = [timed(endpoint, region) for _ in range(REPEATS)]
    found["equal"] = bool((region == 2 * STEPS[device]).all())
    rank.exchange()
    return {**found, "read_s": seconds, "gb_s": 4 * len(region) / min(seconds) / 1e9}


def timed(endpoint: Transport, region: torch.Tensor) -> float:
    region.zero_()
    return endpoint.read([Read(0, "master", (Run(0, 0, len(region)),))], soon()).seconds


def soon() -> float:
    return time.monotonic() + LIMIT_S / 2


def free_bytes(device: str) -> int:
    return torch.cuda.mem_get_info()[0] if device == "cuda" else 0


def settle(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()
