"""Plays the runs of the notice benchmark on one running job: a real service, agents, ranks and metadata endpoints.

A run takes one node of the job by a notice and kills its processes when the machine goes. A new node takes its place,
and the job grows again before the next run. Every wait has a limit; what is started is ended by its pid.
"""

from __future__ import annotations

import os
import shutil
import statistics
import threading
import time
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any

from agent.protocol.sync import NoticeKind, Provider
from deploy.local.api import Api, interrupt, until
from deploy.local.cluster import CORPUS_S, Cluster
from deploy.local.processes import DemoFailed, Processes
from tests.benchmarks.notice_cases import NODES, Case, gcp_notice_s, job_file

POLL_S = 0.5
"""A query takes processor time from the ranks."""
READY_S, START_S, GROW_S = 120.0, 180.0, 180.0
SERVICE_NICE = 5
"""Below the ranks, but with its share: a run waits for the service before it ends and until the job has grown again."""
RECOVER_S = 240.0
"""How long after its node has gone a job may take to train again: what restarts it waits for half a minute."""
STEPS_BEFORE = 6
STEPS_AFTER = 2
FIRST_PROVIDERS = (Provider.AWS, Provider.GCP, Provider.AWS)
OVER = ("active", "aborted", "broken")


class NoticeCluster:
    """One cluster with one job. `folder` gets everything; `pending` are the cases to come, the next one first."""

    def __init__(self, folder: Path, processes: Processes, job: str, pending: tuple[Case, ...]) -> None:
        self._processes = processes
        self._cluster = Cluster(folder, processes, service_nice=SERVICE_NICE)
        self._kind = job
        self._providers: dict[str, str] = {}
        self._api: Api | None = None
        self._job_id = ""
        self._job: dict[str, Any] = {}
        self._steps: list[dict[str, Any]] = []
        self._pending = pending

    def start(self) -> None:
        """Service, nodes and job, until it trains. Raises DemoFailed."""
        cluster = self._cluster
        cluster.start_service()
        prefix, corpus = cluster.start_corpus()
        self._api = cluster.await_service()
        for skip, provider in enumerate(FIRST_PROVIDERS):
            self._start_node(provider.value, skip=0 if provider is Provider.GCP else skip)
        if corpus is not None:
            self._processes.finish(corpus, CORPUS_S)
        until("ready nodes", READY_S, lambda: len(cluster.ready_nodes(self.api)) == NODES, cluster.check)
        checkpoints = str(cluster.folder / "checkpoints")
        self._job_id = self.api.post("/api/v1/jobs", job_file(self._kind, prefix, checkpoints))["job_id"]
        self._until("the first steps", START_S, self._is_settled)

    @property
    def api(self) -> Api:
        """The service, once it is started."""
        assert self._api is not None
        return self._api

    def close(self) -> None:
        """Let the service's connection go; processes are ended by whoever made them."""
        if self._api is not None:
            self._api.close()

    def play(self, case: Case, pending: tuple[Case, ...]) -> dict[str, Any]:
        """One run, and its record. `pending`: the cases after this one. Raises DemoFailed."""
        self._pending = pending
        self._until(f"{NODES} nodes that train", GROW_S, self._is_settled)
        before, step_s = self._job["lost_steps"], self._step_s()
        births = len(self._job["generations"])
        leaver = self._leaver(case)
        position = self._job["nodes"].index(leaver)
        node = self._cluster.nodes.pop(leaver)  # Nobody minds that its agent ends.
        announced_at = time.time()
        interrupt(node.imds_url, ends_in_s=case.notice_s)
        gone = threading.Timer(announced_at + case.goes_after_s - time.time(), self._processes.kill, (leaver,))
        gone.start()
        try:
            self._until_recovered(case, leaver, announced_at + case.goes_after_s)
        finally:
            gone.join()
        if self._processes.marked(leaver):
            raise DemoFailed(f"processes of {leaver} still run after they were killed")
        shutil.rmtree(self._cluster.folder / "nodes" / leaver, ignore_errors=True)
        made = self._job["generations"][births:]
        return {
            **case.as_json(),
            "job_id": self._job_id,
            "leaver": leaver,
            "position": position,
            "step_s": step_s,
            "announced_at": announced_at,
            "lost_steps": self._job["lost_steps"] - before,
            "restarts": sum(row["source"] != "handoff" for row in made),
            "load_average": os.getloadavg()[0],
            **self._times(leaver, announced_at, restarted=any(row["source"] != "handoff" for row in made)),
        }

    def _until_recovered(self, case: Case, leaver: str, goes_at: float) -> None:
        """Until the machine is gone and the job trains without it; the next node starts as soon as it is wanted."""
        is_replaced = False

        def recovered() -> bool:
            nonlocal is_replaced
            if leaver in self._job["nodes"] or self._job["state"] != "running":
                return False
            if not is_replaced:
                is_replaced = True
                self._start_node(case.provider)
            return time.time() > goes_at and self._steps_since(goes_at) >= STEPS_AFTER

        self._until(f"training without {leaver}", case.goes_after_s + RECOVER_S, recovered)

    def _times(self, leaver: str, announced_at: float, *, restarted: bool) -> dict[str, Any]:
        """What is known of the notice and of the handoffs that answered it."""
        heard = [
            _moment(row["first_seen_at"])
            for row in self.api.get("/api/v1/notices", limit=200)
            if row["node_id"] == leaver and row["kind"] == NoticeKind.INTERRUPTION
        ]
        tried = [item for item in self.api.handoffs(self._job_id) if leaver in item["leaving"]]
        made = next((item for item in tried if item["state"] == "active"), None)
        opened = next((item for item in tried if item["notice_to_decided_s"] is not None), None)
        ordered = next((item for item in tried if item["notice_to_first_order_s"] is not None), None)
        heard_at = min(heard, default=None)
        safe_s = None if made is None else made["notice_to_safe_s"]
        return {
            "announced_to_heard_s": None if heard_at is None else heard_at - announced_at,
            "heard_to_decided_s": None if opened is None else opened["notice_to_decided_s"],
            "heard_to_first_order_s": None if ordered is None else ordered["notice_to_first_order_s"],
            "notice_to_safe_s": None if heard_at is None or safe_s is None else heard_at - announced_at + safe_s,
            "rung": "checkpoint" if restarted or made is None else made["rung"],
            "tried": [
                {name: item[name] for name in ("rung", "state", "reason", "phases_s", "generation")} for item in tried
            ],
        }

    def _leaver(self, case: Case) -> str:
        """A node of the job on the case's cloud, another place among them in each run."""
        there = [name for name in self._job["nodes"] if self._providers[name] == case.provider]
        if not there:
            raise DemoFailed(f"no node of the job is on {case.provider}: {self._job['nodes']}")
        return there[case.number // 2 % len(there)]

    def _start_node(self, provider: str, *, skip: int = 0) -> None:
        node_id = f"n{len(self._providers)}"
        self._providers[node_id] = provider
        notice_s = gcp_notice_s(self._pending, skip)
        self._cluster.start_node(node_id, Provider(provider), gcp_notice_s=notice_s)

    # The job as the service shows it.

    def _is_settled(self) -> bool:
        """Whether the job trains on as many nodes as it may, undisturbed for some steps."""
        if self._job["state"] != "running" or len(self._job["nodes"]) < NODES or self._job["open_handoff"]:
            return False
        if not set(self._job["nodes"]) <= self._cluster.ready_nodes(self.api):
            return False
        return len(self._own_steps()) >= STEPS_BEFORE

    def _own_steps(self) -> list[dict[str, Any]]:
        return [row for row in self._steps if row["generation"] == self._job["active_generation"]]

    def _step_s(self) -> float:
        return statistics.median(row["seconds"] for row in self._own_steps()[-STEPS_BEFORE:])

    def _steps_since(self, moment: float) -> int:
        return sum(_moment(row["finished_at"]) > moment for row in self._own_steps())

    def _until(self, what: str, timeout_s: float, condition: Callable[[], bool]) -> None:
        def look() -> bool:
            self._job = self.api.get(f"/api/v1/jobs/{self._job_id}")
            self._steps = self.api.steps(self._job_id, after=max(0, self._job["last_step"] - 40))
            return condition()

        def check() -> None:
            self._cluster.check()
            if self._job.get("state") in ("failed", "stopped", "finished"):
                raise DemoFailed(f"{what}: the job is {self._job['state']}: {self._job['reason']}")

        try:
            until(what, timeout_s, look, check, poll_s=POLL_S)
        except DemoFailed as error:
            state, reason = self._job.get("state"), self._job.get("reason")
            raise DemoFailed(f"{error}; the job is {state} on {self._job.get('nodes')}: {reason}") from error


def _moment(text: str) -> float:
    return datetime.fromisoformat(text).timestamp()
