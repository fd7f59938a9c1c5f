"""Measures streaming between two processes on one device: a GPU where there is one, host memory elsewhere.

Run from the root of the tree: python -m tests.benchmarks.device_stream [--device cuda|cpu] [--sizes 1GB,4GB,10GB]
[--report FILE]. One process steps AdamW on flat regions, as a rank does on its part of a world; the other follows it
over NIXL with the streaming library itself, then takes the last gradients as at a cutover. Sizes are bytes of masters
and two moments in fp32, which is what streams.

Printed and reported for each size: share of what a plain copy on the device reaches, pause, step time while streaming
over the usual step, and whether every bit is equal. Before that, counter edges: a region is rewritten again and again,
its counter in host memory, and a reader that believes only what lies between two equal even counters must never
see two versions in one look.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.distributed import TCPStore

from liver_core.device.threads import background
from liver_core.reshard import CopyRuns, RankPlan, Transfer
from liver_core.streaming.counters import HostCounters
from liver_core.streaming.follow import Follower
from liver_core.streaming.reader import Following, StreamEnd, TargetStream
from liver_core.streaming.ring import COUNTER, SourceRing
from liver_core.streaming.tiles import cut_tiles
from liver_core.streaming.window_step import GroupSpan, Replayer
from liver_core.transport.nixl import NixlTransport
from liver_core.transport.protocol import Read
from liver_core.transport.ucx import Ucx
from tests.benchmarks.handoff_model import parse_bytes
from tests.liver_core.streaming.optimizers import Whole
from tests.liver_core.transport.ranks import Rank, Run, run_ranks

SIZES = {"cuda": "1GB,4GB,10GB", "cpu": "64MB"}
STATE_KINDS = ("master", "exp_avg", "exp_avg_sq")
PARAMETERS = 48
DEPTH = 3
TILE_ELEMENTS = {"cuda": 1 << 25, "cpu": 1 << 20}
STEPS_USUAL = STEPS_STREAMING = 8
STEP_S = 0.25
"""Seconds of work that stand for forward and backward."""
EDGE_ELEMENTS = {"cuda": 1 << 26, "cpu": 1 << 20}
EDGE_LOOKS, EDGE_S = 300, 20.0
REST_S = 0.002
"""Between two bursts of rewriting, so that some looks of the reader succeed."""
SETTLE_S = 0.0005
LIMIT_S = 60.0
NORM = 3.0


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit status: 0, 1 where a bit differed or a reader saw two versions at once."""
    options = parse(arguments)
    device = options.device
    report: dict[str, Any] = {
        "device": device,
        "hardware": hardware(device),
        "torch": torch.__version__,
        "edges": run_ranks("nixl", 2, partial(edges, device=device), limit_s=LIMIT_S)[1],
        "cases": [],
    }
    print(f"{report['hardware']}, torch {torch.__version__}\nedges: {report['edges']}", flush=True)
    for size in options.sizes:
        elements = size // (4 * len(STATE_KINDS))
        source, target = run_ranks("nixl", 2, partial(case, device=device, elements=elements), limit_s=LIMIT_S)
        found = {
            "state_bytes": elements * 4 * len(STATE_KINDS),
            "equal": source.pop("digest") == target.pop("digest"),
            "pause_ms": (target.pop("held_at") - source.pop("reduced_at")) * 1e3,
            "share_of_copy": target["stream_gb_s"] / target["copy_gb_s"],
            **source,
            **target,
        }
        report["cases"].append(found)
        print(json.dumps(found), flush=True)
    if options.report is not None:
        options.report.parent.mkdir(parents=True, exist_ok=True)
        options.report.write_text(json.dumps(report, indent=2) + "\n")
    return int(report["edges"]["mixed"] > 0 or not all(case["equal"] for case in report["cases"]))


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Device and sizes. Ends the program with a sentence about what is wrong."""
    # The other check would make a context, and a process that has one cannot fork.
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=sorted(SIZES), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--sizes", help="bytes of state, for example 1GB,4GB")
    parser.add_argument("--report", type=Path)
    options = parser.parse_args(arguments)
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: torch finds no GPU here")
    try:
        options.sizes = [parse_bytes(text) for text in (options.sizes or SIZES[options.device]).split(",")]
    except ValueError as error:
        parser.error(f"--sizes: {error}")
    return options


def hardware(device: str) -> str:
    """What the figures were taken on. Asked in a process of its own on a GPU, since this one forks."""
    if device == "cuda":
        return run_ranks("nixl", 1, lambda rank: torch.cuda.get_device_name(0), limit_s=LIMIT_S)[0]
    return f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores"


# Counter edges.


def edges(rank: Rank, device: str) -> dict[str, int]:
    """Looks of the reader: `whole` lay within one version, `torn` were refused by the counter, `mixed` must be none."""
    torch.set_num_threads(1)
    store, numel = _store(rank), EDGE_ELEMENTS[device]
    region = torch.zeros(numel, device=device)
    counter = HostCounters(1, 0)
    endpoint = _endpoint(rank, device)
    if rank.rank == 0:
        endpoint.register(sources={"master": region, COUNTER: counter.memory})
        endpoint.start_progress()
        rank.exchange(endpoint.address())
        version, deadline = 0, time.monotonic() + LIMIT_S / 2
        while not store.check(["looked"]) and time.monotonic() < deadline:
            for _ in range(4):  # As the ring does: odd before anything is launched, even after the device has done it.
                counter.put(0, 2 * version + 1)
                version += 1
                region.fill_(float(version % 1024))
                settle(device)
                counter.put(0, 2 * version)
            rank.hub.poll(REST_S)
        rank.exchange()
        return {}
    landing = torch.zeros(1, dtype=torch.int64)
    endpoint.register(targets={"master": region, COUNTER: landing})
    endpoint.connect(0, rank.exchange()[0] or b"", time.monotonic() + 20.0)
    found = {"looks": 0, "whole": 0, "torn": 0, "mixed": 0}
    deadline = time.monotonic() + EDGE_S
    for look in range(EDGE_LOOKS):
        if time.monotonic() > deadline:
            break
        found["looks"] += 1
        length = numel if look % 2 else 4096
        before = _counter(endpoint, landing)
        endpoint.read([Read(0, "master", (Run(0, 0, length),))], time.monotonic() + 20.0)
        after = _counter(endpoint, landing)
        if before % 2 or before != after:
            found["torn"] += 1
            continue
        low, high = torch.aminmax(region[:length])
        expected = float(before // 2 % 1024)
        found["whole" if float(low) == float(high) == expected else "mixed"] += 1
    store.set("looked", "1")
    rank.exchange()
    return found


def _counter(endpoint: NixlTransport, landing: torch.Tensor) -> int:
    endpoint.read([Read(0, COUNTER, (Run(0, 0, 1),))], time.monotonic() + 20.0)
    return int(landing)


# One size.


def case(rank: Rank, device: str, elements: int) -> dict[str, Any]:
    """The source's part on rank 0, the target's on rank 1."""
    torch.set_num_threads(1)
    if device == "cuda":
        torch.cuda.set_device(0)
    return _source(rank, device, elements) if rank.rank == 0 else _target(rank, device, elements)


def _source(rank: Rank, device: str, elements: int) -> dict[str, Any]:
    store, sizes = _store(rank), _sizes(elements)
    generator = torch.Generator(device=device).manual_seed(1)
    whole = Whole("adamw foreach", torch.randn(elements, generator=generator, device=device), sizes)
    usual = []
    for _ in range(STEPS_USUAL):
        usual.append(_timed(device, lambda: _step(whole, generator, None, 0)))
    ring = SourceRing(torch.zeros(elements, device=device), DEPTH, version=STEPS_USUAL)
    endpoint = _endpoint(rank, device)
    endpoint.register(sources={**whole.regions, **ring.regions})
    endpoint.start_progress()
    rank.exchange(endpoint.address())
    rank.exchange()
    over = threading.Event()
    settling = background(_settle_counters, name="settle", args=(ring, over))
    settling.start()
    streaming: list[float] = []
    deadline = time.monotonic() + LIMIT_S / 2
    while not (len(streaming) >= STEPS_STREAMING and store.check(["converged"])) and time.monotonic() < deadline:
        version = ring.version
        streaming.append(_timed(device, lambda at=version: _step(whole, generator, ring, at)))
    # The last step of the old world: its gradients are reduced, and it waits.
    _work(device)
    whole.regions["grad"].normal_(generator=generator)
    settle(device)
    reduced = time.monotonic()
    store.set("boundary", str(ring.version))
    rank.exchange()
    over.set()
    settling.join()
    usual_s = statistics.median(usual[2:])
    return {
        "step_s": usual_s,
        "steps_streaming": len(streaming),
        "step_ratio_streaming": statistics.median(streaming) / usual_s,
        "reduced_at": reduced,
        "digest": [_digest(whole.regions[kind]) for kind in (*STATE_KINDS, "grad")],
    }


def _settle_counters(ring: SourceRing, over: threading.Event) -> None:
    """As a rank does beside training: write each counter once the device has got there."""
    while not over.wait(SETTLE_S):
        while ring.settle_next():
            pass


def _target(rank: Rank, device: str, elements: int) -> dict[str, Any]:
    store, sizes = _store(rank), _sizes(elements)
    copy_gb_s = _copy_gb_s(device, elements)
    regions = {kind: torch.zeros(elements, device=device) for kind in (*STATE_KINDS, "grad")}
    bounds = [(sum(sizes[:at]), sum(sizes[: at + 1])) for at in range(len(sizes))]
    plan = RankPlan(0, None, (Transfer(0, (CopyRuns(0, 0, elements),), elements),), "one source")
    tiles = cut_tiles(plan, bounds, TILE_ELEMENTS[device])
    following = Following(tiles, {0: DEPTH}, regions, STATE_KINDS)
    endpoint = _endpoint(rank, device)
    endpoint.register(targets={**regions, **following.targets()})
    rule = Whole("adamw foreach", torch.zeros(len(sizes), device=device), [1] * len(sizes)).rule
    places = [GroupSpan(start, stop, at % 2) for at, (start, stop) in enumerate(bounds)]
    replayer = Replayer(rule, regions, places, window_elements=TILE_ELEMENTS[device])
    converged, results = threading.Event(), []
    stream = TargetStream(
        endpoint,
        following,
        Follower(tiles, depth=DEPTH),
        replayer.replay,
        on_converged=lambda version: converged.set(),
        read_s=20.0,
    )
    endpoint.connect(0, rank.exchange()[0] or b"", time.monotonic() + 20.0)
    rank.exchange()
    began = time.monotonic()
    thread = threading.Thread(target=lambda: results.append(stream.run(began + LIMIT_S)))
    thread.start()
    arrived = converged.wait(LIMIT_S / 2)
    converge_s = time.monotonic() - began
    store.set("converged", "1")
    store.wait(["boundary"], timedelta(seconds=LIMIT_S / 2))
    stream.finish(int(store.get("boundary")))
    thread.join(LIMIT_S)
    endpoint.read([Read(0, "grad", (Run(0, 0, elements),))], time.monotonic() + 20.0)
    settle(device)
    held = time.monotonic()
    digest = [_digest(regions[kind]) for kind in (*STATE_KINDS, "grad")]
    rank.exchange()
    (result,) = results
    counts = result.counts
    if result.end is not StreamEnd.DONE or not arrived:
        raise RuntimeError(f"the stream ended {result.end} at version {result.version}: {result.reason}")
    return {
        "copy_gb_s": copy_gb_s,
        "stream_gb_s": counts.read_bytes / converge_s / 1e9,
        "converge_s": converge_s,
        "replays": counts.replays,
        "torn_reads": counts.torn,
        "gradient_bytes": 4 * elements,
        "held_at": held,
        "digest": digest,
    }


def _step(whole: Whole, generator: torch.Generator, ring: SourceRing | None, version: int) -> None:
    """Work that stands for forward and backward, gradients, then the optimizer step as a rank makes it."""
    device = whole.regions["grad"].device.type
    _work(device)
    whole.regions["grad"].normal_(generator=generator)
    header = whole.header(version + 1, NORM)
    if ring is not None:
        ring.publish(whole.regions["grad"], header)
        ring.stepping(version)
    whole.step(NORM)
    if ring is not None:
        ring.stepped(version + 1)


def _work(device: str) -> None:
    side = 8192 if device == "cuda" else 512
    one = torch.ones(side, side, device=device)
    ends = time.monotonic() + STEP_S
    while time.monotonic() < ends:
        torch.mm(one, one)
        settle(device)


def _timed(device: str, action: Callable[[], object]) -> float:
    settle(device)
    began = time.monotonic()
    action()
    settle(device)
    return time.monotonic() - began


def _copy_gb_s(device: str, elements: int) -> float:
    """GB a second that one copy within the device's memory moves, each byte counted once; best of five."""
    one, other = (torch.zeros(elements, device=device) for _ in range(2))
    return max(4 * elements / _timed(device, lambda: other.copy_(one)) / 1e9 for _ in range(5))


def _digest(region: torch.Tensor) -> int:
    """A position-keyed sum of the bits, on the region's own device, in pieces."""
    total, piece = 0, 1 << 24
    for at in range(0, region.numel(), piece):
        bits = region[at : at + piece].view(torch.int32).to(torch.int64)
        place = torch.arange(at, at + len(bits), device=region.device, dtype=torch.int64)
        total += int(((bits + 0x9E3779B9) * (2 * place + 1) ^ (bits << 17)).sum())
    return total & (2**64 - 1)


def _sizes(elements: int) -> list[int]:
    part = elements // PARAMETERS
    return [part] * (PARAMETERS - 1) + [elements - part * (PARAMETERS - 1)]


def _endpoint(rank: Rank, device: str) -> NixlTransport:
    made = NixlTransport(f"rank{rank.rank}", Ucx("lo", host_memory_only=device == "cpu"))
    rank.endpoints.append(made)
    return made


def _store(rank: Rank) -> TCPStore:
    return TCPStore("127.0.0.1", rank.shared, is_master=False, timeout=timedelta(seconds=LIMIT_S))


def settle(device: str) -> None:
    """Wait for what was queued on the device."""
    if device == "cuda":
        torch.cuda.synchronize()


if __name__ == "__main__":
    raise SystemExit(main())
