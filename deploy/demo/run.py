"""Runs the demo: sets everything up, runs the acts, measures the restart to compare with, reports, ends everything.

Every wait has a deadline. Ctrl-C, SIGTERM and failures end every process that was started.
"""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from agent.gpus import CPU, gpus_of_node
from deploy.demo.acts import Acts
from deploy.demo.compare import WithoutAgents
from deploy.demo.demo_job import DENSE, PRICE_USD_PER_HOUR, DemoJob
from deploy.demo.display import Display, open_display
from deploy.demo.machine import machine, versions
from deploy.demo.report import Measured, broken_bounds, build_report
from deploy.demo.summary import print_summary
from deploy.local.api import Api, until
from deploy.local.cluster import CORPUS_S, POOL, READY_S, Cluster
from deploy.local.processes import DemoFailed, Processes

FIRST_NODES = ("node-a", "node-b", "node-c", "node-d")
EXIT_FAILED = 1
EXIT_BOUND = 3
EXIT_INTERRUPTED = 130
SERVE_ON_S = 90.0
SERVICE_NICE = 15
"""In a fleet the service has its own machine. Here it shares the cores with the ranks, so it runs at low priority."""


def run_demo(*, report: Path | None, keep: bool, plain: bool, device: str = CPU, job: DemoJob = DENSE) -> int:
    """The exit status: 0, 1 when a step failed, 3 when a bound is broken, 130 when interrupted. `device`: as an agent's
    `--device`."""
    display = open_display(plain=plain)
    folder = Path(tempfile.mkdtemp(prefix="liver-demo-"))
    # The embedded PostgreSQL does not run as root: it must be able to enter the folder.
    folder.chmod(0o755)
    processes = Processes(folder / "logs")
    previous = signal.signal(signal.SIGTERM, _interrupted)
    failed = True
    try:
        content = _play(folder, processes, display, device, job)
        broken = broken_bounds(content)
        failed = bool(broken)
        display.close()
        if report is not None:
            report.parent.mkdir(parents=True, exist_ok=True)
            report.write_text(json.dumps(content, indent=2) + "\n")
        print_summary(content, broken=broken, report_path=report)
        if keep:
            sys.stderr.write(serve_on(folder))
        return EXIT_BOUND if broken else 0
    except DemoFailed as error:
        display.close()
        sys.stderr.write(f"error: {error}\n")
        return EXIT_FAILED
    except KeyboardInterrupt:
        display.close()
        sys.stderr.write("interrupted; ending every process that was started\n")
        return EXIT_INTERRUPTED
    finally:
        _take_down(processes, previous)
        _tidy(folder, keep=keep or failed)


@dataclass(frozen=True, slots=True)
class Lived:
    """What the live run left behind: its acts, its ledger, the kinds of device of its nodes."""

    acts: Acts
    data_prefix: str
    ledger: dict[str, Any]
    kinds: list[str]


def live(folder: Path, processes: Processes, display: Display, device: str, job: DemoJob) -> Lived:
    """Set everything up, play all acts, and end every process. Raises DemoFailed."""
    cluster = Cluster(folder, processes, service_nice=SERVICE_NICE, device=device)
    api, data_prefix = _set_up(cluster, processes, display)
    acts = Acts(cluster, api, display)
    acts.start(job.file(data_prefix), job.what)
    acts.lose_a_node()
    acts.gain_a_node()
    acts.lose_two_nodes()
    acts.stop()
    ledger = api.get("/api/v1/ledger", job_id=acts.tracker.job_id)
    kinds = sorted({node["device"] for node in api.get("/api/v1/nodes")})
    api.close()
    # The comparison, like the live run, has the machine to itself.
    processes.close()
    return Lived(acts, data_prefix, ledger, kinds)


def _play(folder: Path, processes: Processes, display: Display, device: str, job: DemoJob) -> dict[str, Any]:
    began = time.monotonic()
    if device != CPU and not gpus_of_node(device, os.environ):
        raise DemoFailed(f"--device {device}: this machine has no GPU (nvidia-smi -L, CUDA_VISIBLE_DEVICES); use cpu")
    lived = live(folder, processes, display, device, job)
    tracker = lived.acts.tracker
    comparison = WithoutAgents(processes, folder / "compare", display, job, lived.data_prefix, device)
    baseline = comparison.restart(lived.acts.layout_after_first_loss)
    references = comparison.undisturbed(tracker.last_step)
    measured = Measured(
        handoffs=tracker.handoffs,
        steps=tracker.steps,
        baseline=baseline,
        references=references,
        ledger=lived.ledger,
        newcomer=lived.acts.newcomer,
        versions=versions(),
        device=machine(lived.kinds),
        took_s=time.monotonic() - began,
        loss_share=job.loss_share,
    )
    return build_report(measured)


def _set_up(cluster: Cluster, processes: Processes, display: Display) -> tuple[Api, str]:
    """Start corpus, service and four nodes in parallel."""
    display.act(f"Start a service with an embedded PostgreSQL, and four nodes with one rank each on {cluster.device}")
    cluster.start_service()
    data_prefix, corpus = cluster.start_corpus()
    api = cluster.await_service()
    display.say(f"service at {cluster.url}, data in {cluster.folder}")
    display.say(f"console: {cluster.url}/ (log in with the token in {_token_file(cluster.folder)})")
    price = {"price_usd_per_hour": PRICE_USD_PER_HOUR}
    api.put(f"/api/v1/pools/{POOL}/price", price)
    for node_id in FIRST_NODES:
        cluster.start_node(node_id)
    if corpus is not None:
        display.note("building the corpus out of the standard library's own sources")
        processes.finish(corpus, CORPUS_S)
    until("four ready nodes", READY_S, lambda: cluster.ready_nodes(api) >= set(FIRST_NODES), cluster.check)
    display.say(f"{len(FIRST_NODES)} agents, each with its own endpoint for AWS's metadata protocol")
    return api, data_prefix


def serve_on(folder: Path) -> str:
    """Leave a service with the demo's data running behind the command. Returns what to say of it."""
    log = folder / "logs" / "served-on.log"
    command = [sys.executable, "-m", "service.cli.main", "serve", "--port", "0", "--data-dir", str(folder)]
    with log.open("wb") as output:
        served = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, start_new_session=True)
    ends_at = time.monotonic() + SERVE_ON_S
    while time.monotonic() < ends_at and served.poll() is None:
        if found := re.search(r"^service: (http://\S+)", log.read_text(), re.MULTILINE):
            return (
                f"console: {found[1]}/ with the demo's data; log in with the token in {_token_file(folder)}\n"
                f"it runs until you end it: kill {served.pid}\n"
            )
        time.sleep(0.1)
    served.terminate()
    return f"the service did not start again, see {log}\n"


def _token_file(folder: Path) -> Path:
    return folder / "tokens" / "admin.token"


def _interrupted(number: int, frame: object) -> NoReturn:
    raise KeyboardInterrupt


def _take_down(processes: Processes, previous: Any) -> None:
    """End everything, even if the user presses Ctrl-C again meanwhile."""
    interrupted = signal.signal(signal.SIGINT, signal.SIG_IGN)
    with suppress(DemoFailed):
        processes.close()
    signal.signal(signal.SIGINT, interrupted)
    signal.signal(signal.SIGTERM, previous)


def _tidy(folder: Path, *, keep: bool) -> None:
    if keep:
        sys.stderr.write(f"kept: {folder} (logs of every process in {folder / 'logs'})\n")
        return
    shutil.rmtree(folder, ignore_errors=True)
