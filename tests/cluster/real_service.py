"""A service as a process of its own, with an embedded PostgreSQL in a folder that is gone afterwards; and a real job
on nodes of loopback."""

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import httpx

from deploy.local.api import Api, until
from deploy.local.cluster import Cluster
from deploy.local.processes import Processes
from tests.cluster.real_ranks_model import build_corpus

START_S, END_S = 90.0, 60.0
PATIENCE_S = 120.0
WORLD, STEPS_AFTER = 2, 3
"""Nodes of a real job, and the steps after which it counts as training."""


@dataclass(frozen=True, slots=True)
class RealService:
    """A service that runs. `log` has what it wrote."""

    url: str
    folder: Path
    log: Path
    process: subprocess.Popen[bytes]

    def token(self, role: str) -> str:
        """The first token of this role."""
        return (self.folder / "tokens" / f"{role}.token").read_text().strip()


ServiceT = TypeVar("ServiceT", bound=RealService)


@contextlib.contextmanager
def service_folder() -> Iterator[Path]:
    """Not under /root: the embedded server does not run as root, and needs a path that others may enter."""
    folder = Path(tempfile.mkdtemp(prefix="liver-service-"))
    folder.chmod(0o755)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def real_service(
    kind: type[ServiceT], folder: Path, arguments: Sequence[str], settings: Mapping[str, str]
) -> Iterator[ServiceT]:
    """Starts `python ARGUMENTS` and ends it. `settings`: LIVER_SERVICE_* by the rest of the name; without PORT it
    takes a free one."""
    log = folder / "serve.log"
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("LIVER_")}
    given = {f"LIVER_SERVICE_{name}": value for name, value in ({"PORT": "0"} | dict(settings)).items()}
    given |= {"LIVER_SERVICE_DATA_DIR": str(folder), "PYTHONUNBUFFERED": "1"}
    with log.open("wb") as output:
        command = [sys.executable, *arguments]
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=inherited | given)
    try:
        yield kind(_url(process, log), folder, log, process)
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(END_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(10)


@dataclass
class RealJob:
    """A job of two nodes that trains on loopback, once `start` has returned: service, agents, metadata endpoints and
    Megatron ranks are processes of their own. `patience_s`: how long `wait` waits where nothing else is said."""

    cluster: Cluster
    api: Api
    corpus: str
    patience_s: float = PATIENCE_S
    job_id: str = ""

    @property
    def checkpoints(self) -> Path:
        """Where the job writes them."""
        return self.cluster.folder / "checkpoints"

    def start(self, *node_ids: str) -> None:
        """These nodes, and then the job, until it has made its first steps."""
        for node_id in node_ids:
            self.cluster.start_node(node_id)
        self.wait("ready nodes", lambda: self.cluster.ready_nodes(self.api) == set(node_ids))
        self.job_id = self.api.post("/api/v1/jobs", slow_job(self.corpus, self.checkpoints))["job_id"]
        self.wait("the first steps", lambda: self.job()["state"] == "running" and self.last_step() >= STEPS_AFTER)

    def job(self) -> dict[str, Any]:
        """As the service shows it."""
        return self.api.get(f"/api/v1/jobs/{self.job_id}")

    def last_step(self) -> int:
        """That the service knows of."""
        return self.job()["last_step"]

    def wait(self, what: str, condition: Callable[[], Any], timeout_s: float | None = None) -> None:
        """Until the condition holds; fails when a process has ended that should run."""
        until(what, timeout_s or self.patience_s, condition, self.cluster.check)

    def trains_on(self) -> None:
        """Some more steps."""
        before = self.last_step()
        self.wait("more steps", lambda: self.last_step() >= before + STEPS_AFTER)


JobT = TypeVar("JobT", bound=RealJob)


@contextlib.contextmanager
def real_job(
    kind: type[JobT], make: Callable[[Path, Processes], Cluster] = Cluster, *, patience_s: float = PATIENCE_S
) -> Iterator[JobT]:
    """Service and corpus, before there are nodes and a job. Ends every process that came from it."""
    with service_folder() as folder, contextlib.ExitStack() as stack:
        processes = Processes(folder / "logs")
        stack.callback(processes.close)
        cluster = make(folder, processes)
        cluster.start_service()
        corpus = build_corpus(folder)  # Meanwhile the service starts.
        yield kind(cluster, cluster.await_service(), corpus, patience_s)


def slow_job(corpus: str, checkpoints: Path) -> dict[str, Any]:
    """A job file: DP2 on two nodes, 0.2 s a step, until somebody ends it."""
    return {
        "name": "slow",
        "entrypoint": "tests.agent.held_job:SlowJob",
        "model": {
            "num_layers": 2, "hidden_size": 64, "ffn_hidden_size": 128, "num_attention_heads": 4, "seq_length": 32,
            "padded_vocab_size": 264,
        },
        "args": {"data_prefix": corpus, "micro_batch_s": 0.05},
        "global_batch": 8,
        "micro_batch": 1,
        "nodes": {"min": WORLD, "max": WORLD},
        "layouts": {"pinned": [{"nodes": WORLD, "layout": "DP2"}]},
        "checkpoint": {"path": str(checkpoints), "every_steps": 100},
        "stop": {"steps": 100_000},
    }  # fmt: skip


def _url(process: subprocess.Popen[bytes], log: Path) -> str:
    ends_at = time.monotonic() + START_S
    while time.monotonic() < ends_at:
        if process.poll() is not None:
            raise RuntimeError(f"the service ended: {log.read_text()}")
        if found := re.search(r"service: (http://\S+)", log.read_text()):
            with contextlib.suppress(httpx.HTTPError):
                if httpx.get(f"{found[1]}/readyz", timeout=5).is_success:
                    return found[1]
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(0.1)
    raise RuntimeError(f"the service did not start within {START_S:.0f} s: {log.read_text()}")
