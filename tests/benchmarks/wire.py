"""Measures handoffs between machines that have nothing but TCP: network and pid namespaces joined by shaped links.

Run from the root of the tree, as root: python -m tests.benchmarks.wire [--gbps 1,10,25] [--sizes 64MB,256MB,1GB]
[--forms move,pipeline,data_parallel] [--ways 0,2,2/0.001/0.01] [--repeats N] [--host-time] [--report FILE]. Each world
is handed over live and, in the same run, back by stop-and-copy; iperf3 measures the same links right before. The host
is idle for most of each step unless --host-time is given. A way is the delay of a packet in ms and, each after a slash,
the share of packets that is lost and of those that are not late, and so overtake others; other ways than 0 go through a
carrier in Python, so only links of 1 Gb/s and moves have them. Without --sizes, 1 GB is left out where it takes longest
and says least: over a carrier, at 25 Gb/s, and with data parallel at 1 Gb/s. A case that fails is in the report with
its reason, and the status is then 1.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import math
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import psutil

from liver_core.handoff.messages import Rung
from tests.benchmarks import wire_report as report
from tests.benchmarks.circumstances import circumstances, end_when_told
from tests.benchmarks.device_time import LABEL, device_s
from tests.benchmarks.handoff import build_corpus
from tests.benchmarks.handoff_cluster import StampedCluster, limit_s, measure_handoff, rank_setup
from tests.benchmarks.handoff_model import Change, Model, extra_bytes_budget, model_of, parse_bytes
from tests.cluster.net_islands import Islands, address_of, enter, why_not
from tests.cluster.real_ranks_process import RankSetup
from tests.cluster.slow_islands import DEVICE, SlowIslands
from tests.debian import install
from tests.liver_core.transport.relays import RelayProcess

NAMES = ("a", "b", "c", "d")
FORMS = {
    "move": Change("move", "TP1", "a", "TP1", "b"),
    "pipeline": Change("pipeline", "PP2", "ab", "PP2", "cd"),
    "data_parallel": Change("data_parallel", "DP2", "ab", "DP2", "cd"),
}
"""All state goes to other machines. move: the link carries nothing else; pipeline: activations; data_parallel: the
gradients of each step."""
GBPS = "1,10,25"
LARGE = "1GB"
SIZES = ("64MB", "256MB", LARGE)
WAYS = "0,2,2/0.001/0.01"
FORMS_AT_MOST_AT = {25.0: ("move",)}
CARRIED_GBPS_MOST, CARRIED_FORMS = 1.0, ("move",)
"""What the carrier of late packets can carry."""
SEQ_LENGTH, GLOBAL_BATCH, MICRO_BATCH = 16, 2, 1
IPERF_S, IPERF_TRIES, SAMPLE_S = 3, 50, 0.05
STEPS_TO_MEASURE = 5
_FAILURES = (AssertionError, OSError, EOFError, RuntimeError, ValueError, subprocess.SubprocessError)


@dataclass(frozen=True, slots=True)
class Way:
    """What happens to a packet between two machines: it is late by so many ms, such a share of all is lost, and such a
    share is not late."""

    delay_ms: float = 0.0
    loss: float = 0.0
    overtaking: float = 0.0

    @classmethod
    def parse(cls, text: str) -> Way:
        """Of "2/0.001/0.01". Raises ValueError."""
        numbers = [float(part) for part in text.split("/")]
        way = cls(*numbers[:3])
        if len(numbers) > 3 or not (
            0 <= way.delay_ms <= 1_000 and max(numbers[1:], default=0) < 0.5 and min(numbers) >= 0
        ):
            raise ValueError(f"{text!r} must be a delay of at most 1000 ms, and up to two shares below 0.5")
        return way

    @property
    def is_carried(self) -> bool:
        return self != Way()


@dataclass(frozen=True, slots=True)
class Options:
    """What to measure."""

    gbps: tuple[float, ...]
    sizes: tuple[str, ...] | None
    forms: tuple[str, ...]
    ways: tuple[Way, ...]
    repeats: int
    device_time: bool
    report: Path


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, write the report after every case, print it. 1 where a case failed, 2 where nothing can be measured."""
    options = parse(arguments)
    install("iperf3")
    if why := why_not():
        print(why, file=sys.stderr)
        return 2
    found: dict[str, Any] = {"cases": [], **circumstances("tests.benchmarks.wire")}
    if options.device_time:
        found["device_time"] = LABEL
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="liver-bench-") as folder:
        prefix = build_corpus(Path(folder))
        sleeping: dict[tuple[str, str], dict[str, float]] = {}
        for gbps, way, form, size in worlds(options):
            found["cases"] += cases(gbps, way, form, size, prefix, sleeping, device_time=options.device_time)
            found["targets"] = report.targets(found["cases"])
            found["seconds"] = time.monotonic() - started
            options.report.parent.mkdir(parents=True, exist_ok=True)
            options.report.write_text(json.dumps(found, indent=1))
    print("\n".join(report.verdicts(found["targets"])))
    print(f"{options.report}: {found['seconds']:.0f} s, load average {found['load_average_at_start']} at start")
    return 1 if any("failed" in case for case in found["cases"]) else 0


def worlds(options: Options) -> Iterator[tuple[float, Way, str, str]]:
    """Gb/s, way, form and size of each that is handed over."""
    for gbps, way, form in itertools.product(options.gbps, options.ways, options.forms):
        if form not in FORMS_AT_MOST_AT.get(gbps, FORMS) or (
            way.is_carried and (gbps > CARRIED_GBPS_MOST or form not in CARRIED_FORMS)
        ):
            continue
        is_long = way.is_carried or gbps > report.JUDGED_GBPS_MOST or (form == "data_parallel" and gbps <= 1)
        few = tuple(size for size in SIZES if size != LARGE or not is_long)
        for size in few if options.sizes is None else options.sizes:
            for _ in range(options.repeats):
                yield gbps, way, form, size


def parse(arguments: Sequence[str] | None) -> Options:
    """Options of a command line. Exits where one of them means nothing."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gbps", default=GBPS)
    parser.add_argument("--sizes")
    parser.add_argument("--forms", default=",".join(FORMS))
    parser.add_argument("--ways", default=WAYS)
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--host-time", action="store_true", help="steps are the host's work alone")
    parser.add_argument("--report", type=Path, default=Path("build/reports/wire.json"))
    given = parser.parse_args(arguments)
    forms, sizes = tuple(given.forms.split(",")), given.sizes and tuple(given.sizes.split(","))
    if unknown := sorted({*forms} - {*FORMS}):
        parser.error(f"--forms: {unknown[0]!r} is none of {', '.join(FORMS)}")
    try:
        gbps = tuple(float(each) for each in given.gbps.split(","))
        ways = tuple(Way.parse(each) for each in given.ways.split(","))
        for size in sizes or ():
            model_of(parse_bytes(size))
    except ValueError as error:
        parser.error(f"--gbps, --sizes and --ways: {error}")
    if min(gbps) <= 0 or given.repeats < 1:
        parser.error("--gbps and --repeats: must be above 0")
    return Options(gbps, sizes, forms, ways, given.repeats, not given.host_time, given.report)


def cases(
    gbps: float,
    way: Way,
    form: str,
    size: str,
    prefix: str,
    sleeping: dict[tuple[str, str], dict[str, float]],
    *,
    device_time: bool,
) -> list[dict[str, Any]]:
    """One world handed over live, and back by stop-and-copy. `sleeping`: what is known of each job's own step."""
    change, model = FORMS[form], model_of(parse_bytes(size))
    back = Change(f"{form} back", change.target, change.target_nodes, change.source, change.source_nodes)
    named = {"gbps": gbps, **asdict(way), "change": form, "size": size, "state_bytes": model.state_bytes}
    made = []
    with contextlib.ExitStack() as stack:
        try:
            if device_time:
                if (form, size) not in sleeping:
                    sleeping[form, size] = device_s({change.source: own_step_s(model, prefix, change)})
                model = replace(model, device_s=tuple(sleeping[form, size].items()))
            wires = stack.enter_context(Wires(gbps, way))
            named |= wires.iperf(change)
            cluster = stack.enter_context(StampedCluster(wires.setup(model, prefix)))
            cluster.launch(change.source, change.source_nodes, timeout_s=limit_s(model))
            for each, rung in ((change, Rung.LIVE), (back, Rung.STOP_AND_COPY)):
                with wires.handoff(each, cluster) as seen:
                    measured = measure_handoff(cluster, model, each, rung)
                made.append(report.case(named, str(rung), measured, seen))
                print(report.line(made[-1]), flush=True)
        except _FAILURES as error:
            reason = f"{type(error).__name__}: {str(error).strip()[-600:]}"
            print(f"{gbps:g} Gb/s {form} {size}: FAILED {reason}", flush=True)
            made.append(named | {"rung": None, "failed": reason})
    return made


def own_step_s(model: Model, prefix: str, change: Change) -> float:
    """Seconds of a step when no device is played and no link is slow: the mean of a few."""
    with Wires(math.inf, Way()) as wires, StampedCluster(wires.setup(model, prefix)) as cluster:
        cluster.launch(change.source, change.source_nodes, timeout_s=limit_s(model))
        cluster.await_step(cluster.clock, STEPS_TO_MEASURE + 2, limit_s(model))
        ends = [end for end, _, _ in cluster.step_ends[cluster.clock]][-STEPS_TO_MEASURE - 1 :]
        return (ends[-1] - ends[0]) / (len(ends) - 1)


@dataclass
class Seen:
    """While a handoff ran. `sent`: (seconds since 1970, bytes that the node had sent by then) of each of its sources.
    `cpu_s`: (the same, processor seconds that they had taken) of its relays, sources and targets."""

    sent: dict[str, list[tuple[float, int]]]
    cpu_s: dict[str, list[tuple[float, float]]] = field(
        default_factory=lambda: {"relays": [], "sources": [], "targets": []}
    )
    load_average: float = 0.0


class Wires(contextlib.ExitStack):
    """Machines that each send at most `gbps`, infinity: as fast as they can. `locals`: what the relay of each is
    called, while there is one."""

    def __init__(self, gbps: float, way: Way) -> None:
        super().__init__()
        self.gbps, self.way = gbps, way
        self.locals = {name: f"liver-bench-relay-{os.getpid()}-{name}" for name in NAMES}

    def __enter__(self) -> Wires:
        with contextlib.ExitStack() as stack:
            self.islands = stack.enter_context(SlowIslands(NAMES) if self.way.is_carried else Islands(NAMES))
            for name in NAMES:
                if isinstance(self.islands, SlowIslands):
                    self.islands.late(name, self.way.delay_ms / 1e3, self.way.loss, self.way.overtaking)
                if self.gbps == math.inf:
                    continue
                shape = ("rate", f"{self.gbps:g}gbit", "burst", f"{max(1.0, self.gbps / 4):g}mb", "latency", "20ms")
                command = [*self.islands.inside(name), "tc", "qdisc", "add", "dev", self.device, "root", "tbf", *shape]
                subprocess.run(command, check=True, capture_output=True, timeout=10)
            self.push(stack.pop_all())
        return self

    @property
    def device(self) -> str:
        """Each machine's own network device."""
        return DEVICE if self.way.is_carried else "eth0"

    def setup(self, model: Model, prefix: str) -> RankSetup:
        """Of ranks on these machines."""
        extra = extra_bytes_budget(model, FORMS.values())
        batch = {"global_batch": GLOBAL_BATCH, "micro_batch": MICRO_BATCH}
        setup = rank_setup(model, prefix, extra_bytes_max=extra, **batch)
        return replace(
            setup,
            job_arguments=setup.job_arguments | {"seq_length": SEQ_LENGTH},
            islands=(self.islands.prefix, NAMES),
            relays=self.locals,
        )

    def iperf(self, change: Change) -> dict[str, float]:
        """Gb/s of the slowest of all links over which state will go, all at once, and the longest round trip in ms
        while they are full."""
        pairs = tuple(zip(change.source_nodes, change.target_nodes, strict=True))
        with ThreadPoolExecutor(len(pairs)) as pool:
            ends = tuple(pool.map(lambda pair: self._iperf(*pair), pairs))
        rtt_us = max(stream["sender"]["mean_rtt"] for end in ends for stream in end["streams"])
        slowest = min(end["sum_received"]["bits_per_second"] for end in ends)
        return {"iperf_gbps": slowest / 1e9, "rtt_ms": rtt_us / 1e3}

    def _iperf(self, source: str, target: str) -> dict[str, Any]:
        """What it says of two connections from node to node."""
        address = address_of(target, NAMES)
        serve = [*self.islands.inside(target), "iperf3", "-s", "-1", "-B", address]
        ask = [*self.islands.inside(source), "iperf3", "-c", address, "-t", str(IPERF_S), "-P", "2", "-J"]
        said = ""
        with subprocess.Popen(serve, stdout=subprocess.DEVNULL) as server:
            try:
                for _ in range(IPERF_TRIES):
                    done = subprocess.run(ask, capture_output=True, text=True, check=False, timeout=IPERF_S + 20)
                    said = done.stdout
                    end = json.loads(said or "{}").get("end", {})
                    if "streams" in end:
                        return end
                    with contextlib.suppress(subprocess.TimeoutExpired):
                        server.wait(0.1)  # It does not listen yet.
                raise RuntimeError(f"iperf3: {said.strip()[-200:]}")
            finally:
                server.kill()

    @contextlib.contextmanager
    def handoff(self, change: Change, cluster: StampedCluster) -> Iterator[Seen]:
        """Relays for one handoff, as agents start them. What its sources send and what its processes take."""
        seen, ended = Seen({name: [] for name in change.source_nodes}), threading.Event()

        def look() -> None:
            families = {"relays": Family(relay.process.pid for relay in relays)}
            while not ended.wait(SAMPLE_S):
                if len(families) == 1 and (pids := _pids_of(cluster, change)):
                    families |= {who: Family(each) for who, each in pids.items()}
                for name, samples in seen.sent.items():
                    enter(self.islands.prefix, name)  # Of this thread alone.
                    samples.append((time.time(), sent_bytes(self.device)))
                for who, family in families.items():
                    seen.cpu_s[who].append((time.time(), family.cpu_s()))

        with contextlib.ExitStack() as stack:
            relays: list[RelayProcess] = [
                stack.enter_context(
                    RelayProcess(address_of(name, NAMES), local=self.locals[name], enter=self.islands.inside(name))
                )
                for name in sorted({*change.source_nodes, *change.target_nodes})
            ]
            watcher = threading.Thread(target=look, daemon=True)
            watcher.start()
            try:
                yield seen
            finally:
                ended.set()
                watcher.join()
                seen.load_average = os.getloadavg()[0]


class Family:
    """Processes with those that they have begun by now. `cpu_s`: seconds that they have taken, 0 once one has ended."""

    def __init__(self, pids: Iterable[int]) -> None:
        self._processes: list[psutil.Process] = []
        for pid in pids:
            with contextlib.suppress(psutil.NoSuchProcess):
                first = psutil.Process(pid)
                self._processes += [first, *first.children(recursive=True)]

    def cpu_s(self) -> float:
        """Of all together, user and system."""
        taken = 0.0
        for process in self._processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                times = process.cpu_times()
                taken += times.user + times.system
        return taken


def _pids_of(cluster: StampedCluster, change: Change) -> dict[str, list[int]]:
    """Of sources and targets, once all are there and each has told something: what a rank is then runs."""
    nodes = {"sources": change.source_nodes, "targets": change.target_nodes}
    by_node = {
        rank.member.node_id: rank for rank in tuple(cluster.ranks.values()) if rank.events and rank.process.is_alive()
    }
    if any(node not in by_node for each in nodes.values() for node in each):
        return {}
    return {who: [by_node[node].process.pid for node in each] for who, each in nodes.items()}


def sent_bytes(device: str) -> int:
    """Of a device in this thread's network namespace, since it exists."""
    lines = Path("/proc/thread-self/net/dev").read_text().splitlines()[2:]
    return next(
        int(numbers.split()[8]) for name, numbers in (line.split(":") for line in lines) if name.strip() == device
    )


if __name__ == "__main__":
    end_when_told()
    sys.exit(main())
