"""What one agent sync costs the service: CPU of its event loop, its workers and PostgreSQL, and SQL statements.

Four nodes train each job. Each sync carries three steps, a log chunk and a rank's status, every tenth a handoff's
mirror too. One node of each job syncs at a time, all jobs at once. The service is a process of its own on an embedded
PostgreSQL, without reconcilers; the agents are this process.
PostgreSQL does not wait for the disk: cores that sleep between two syncs make each of them dearer, and by chance.

Run from the root of the tree: python -m tests.benchmarks.sync [--repeats 7] [--syncs 200] [--jobs 16]
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Any

import httpx
import uvicorn
from sqlalchemy import event, text

from agent.protocol.sync import HandoffMirror, LogChunk
from agent.protocol.values import HandoffState
from liver_core.handoff import RankStage
from liver_core.layout import ParallelLayout
from service.app import create_app
from service.context import Context
from service.reconcilers import jobs
from service.server import bind
from service.settings import ServiceSettings
from tests.service.fake_agent import JOB, FakeAgent, mirror, roster, step_row

NODES = "abcd"
MIRROR_EVERY = 10
WORKERS = "AnyIO worker thread"
"""How anyio names the threads that requests run in."""


@dataclass
class Load:
    """The four agents of a job and how far it is."""

    agents: list[FakeAgent]
    step: int = 0
    syncs: int = 0
    handoff: HandoffMirror | None = None
    text: str = "step 1 loss 5.5 of this rank, as a training loop prints it\n" * 4
    offsets: dict[str, int] = field(default_factory=dict)

    def sync(self) -> None:
        """The next node's sync."""
        agent = self.agents[self.syncs % len(self.agents)]
        if self.syncs % len(self.agents) == 0:
            self.step += 3
        self.syncs += 1
        order = agent.job_order()
        rank = agent.rank(order, stage=RankStage.TRAINING, step=self.step, loss=5.5, seconds=0.3)
        steps = range(self.step - 2, self.step + 1)
        offset = self.offsets.get(agent.node_id, 0)
        self.offsets[agent.node_id] = offset + len(self.text)
        chunk = LogChunk(job_id=order.job_id, generation=rank.generation, rank=rank.rank, offset=offset, text=self.text)
        agent.sync(
            ranks=(rank,),
            steps=tuple(step_row(order.job_id, rank.generation, step, utc_now(), loss=5.5) for step in steps),
            logs=(chunk,),
            handoffs=(self.mirrored(),) if self.syncs % MIRROR_EVERY == 0 else (),
        )

    def mirrored(self) -> HandoffMirror:
        """The next mirror of a handoff that streams."""
        if self.handoff is None:
            source = self.agents[0].roster()
            names = [agent.node_id for agent in self.agents[:3]]
            target = roster(source.job_id, source.generation + 1, ParallelLayout(pp=3), *names)
            self.handoff = mirror(source, target, utc_now(), state=HandoffState.STREAMING)
        changed = {"mirror_seq": self.handoff.mirror_seq + 1, "changed_utc": utc_now()}
        self.handoff = self.handoff.model_copy(update=changed)
        return self.handoff


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--syncs", type=int, default=200)
    parser.add_argument("--jobs", type=int, default=1)
    options = parser.parse_args()
    found: dict[str, list[float]] = {}
    with service() as (client, ask, tokens), ThreadPoolExecutor(options.jobs) as senders:
        loads = []
        for number in range(options.jobs):
            # No node is the spare of another job.
            pool, names = f"pool-{number}", [f"{letter}{number}" for letter in NODES]
            job = {**JOB, "pools": [pool], "checkpoint": {"path": f"/checkpoints/{number}"}}
            client.post("/api/v1/jobs", json=job, headers=tokens["operator"]).raise_for_status()
            loads.append(Load([FakeAgent(name, client, tokens["join"], utc_now, pool=pool) for name in names]))
            begin(loads[-1], ask)
        rounds = options.syncs // options.jobs
        for _ in range(options.repeats):
            before = ask("read")
            for _ in range(rounds):
                list(senders.map(Load.sync, loads))
            after = ask("read")
            for name, value in after.items():
                found.setdefault(name, []).append((value - before[name]) / (rounds * options.jobs))
    print(f"for one sync, median (least to most) of {options.repeats} x {options.syncs}; load {os.getloadavg()[0]:.1f}")
    for name, values in found.items():
        print(f"{name:30} {median(values):7.2f} ({min(values):.2f} to {max(values):.2f})")


def begin(load: Load, ask: Callable[[str], Any]) -> None:
    """All four are known, then told to train; a few syncs more, so that everything has been seen once."""
    for agent in load.agents:
        agent.sync()
    until = time.monotonic() + 30
    while not all(agent.orders and agent.orders.jobs and agent.job_order().generation for agent in load.agents):
        assert time.monotonic() < until, "the job did not start on all four nodes within 30 s"
        ask("tick")
        for agent in load.agents:
            agent.sync()
    for _ in range(2 * len(NODES) * MIRROR_EVERY):
        load.sync()
    # The reconcilers would make standing plans by now; orders carry them.
    ask("tick")
    for _ in range(len(NODES)):
        load.sync()
    assert load.agents[0].job_order().standing_plans, "the orders measured must be whole"


@contextmanager
def service() -> Iterator[tuple[httpx.Client, Callable[[str], Any], dict[str, dict[str, str]]]]:
    """A service process: a client, a way to ask it for figures, the headers of operators and of agents that join."""
    with tempfile.TemporaryDirectory(prefix="liver-bench-") as name:
        # The embedded server does not run as root and needs a path that others may enter.
        Path(name).chmod(0o755)
        listener = bind("127.0.0.1", 0)
        port = listener.getsockname()[1]
        ours, theirs = multiprocessing.Pipe()
        process = multiprocessing.get_context("fork").Process(target=serve, args=(Path(name), listener, theirs))
        process.start()
        try:
            assert ours.poll(60), "the service did not start within 60 s"
            tokens = ours.recv()

            def ask(what: str) -> Any:
                ours.send(what)
                return ours.recv()

            with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=30) as client:
                yield client, ask, tokens
        finally:
            process.terminate()
            process.join(30)
            listener.close()


def serve(folder: Path, listener: socket.socket, pipe: Connection) -> None:
    """The service's process: uvicorn in its first thread, as `liver serve` has it."""
    app = create_app(ServiceSettings(data_dir=folder, reconcilers=False))
    context: Context = app.state.context
    with context.database.engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        connection.execute(text("ALTER SYSTEM SET fsync = off"))
        connection.execute(text("SELECT pg_reload_conf()"))
    statements = Statements(context)
    tokens = {
        role: {"Authorization": f"Bearer {(folder / 'tokens' / f'{role}.token').read_text().strip()}"}
        for role in ("operator", "join")
    }

    def answer() -> None:
        pipe.send(tokens)
        while True:
            match pipe.recv():
                case "tick":
                    pipe.send(jobs.tick(context))
                case _:
                    pipe.send(figures(context, statements))

    threading.Thread(target=answer, daemon=True).start()
    config = uvicorn.Config(app, log_level="warning", access_log=False, timeout_keep_alive=30)
    uvicorn.Server(config).run(sockets=[listener])


class Statements:
    """Counts the statements of one engine."""

    def __init__(self, context: Context) -> None:
        self.count = 0
        event.listen(context.database.engine, "before_cursor_execute", self._count)

    def _count(self, *_: object) -> None:
        self.count += 1


def figures(context: Context, statements: Statements) -> dict[str, float]:
    """What has been spent so far."""
    workers = [thread for thread in threading.enumerate() if thread.name == WORKERS]
    return {
        "workers, ms CPU": sum(map(cpu_s, workers)) * 1e3,
        "event loop, ms CPU": cpu_s(threading.main_thread()) * 1e3,
        "service process, ms CPU": time.process_time() * 1e3,
        "PostgreSQL, ms CPU": postgres_cpu_s(context) * 1e3,
        "statements": float(statements.count),
    }


def cpu_s(thread: threading.Thread) -> float:
    """CPU of one thread that lives."""
    assert thread.ident is not None
    return time.clock_gettime(time.pthread_getcpuclockid(thread.ident))


def postgres_cpu_s(context: Context) -> float:
    """CPU of the embedded server and of its processes, also of those that have ended."""
    server = context.database.embedded
    assert server is not None
    postmaster = int((Path(server.pgdata) / "postmaster.pid").read_text().splitlines()[0])
    ticks = 0
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            # The name in brackets may hold spaces.
            values = stat.read_text().rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            continue
        if postmaster in (int(stat.parent.name), int(values[1])):
            ticks += int(values[11]) + int(values[12])
        if postmaster == int(stat.parent.name):
            ticks += int(values[13]) + int(values[14])
    return ticks / os.sysconf("SC_CLK_TCK")


def utc_now() -> datetime:
    return datetime.now(UTC)


if __name__ == "__main__":
    main()
