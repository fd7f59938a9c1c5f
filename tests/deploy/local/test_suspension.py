"""A notice of 15 s for a node that nothing can replace: the job saves what it has and ends in that time, with real
processes all through (service with embedded PostgreSQL, agents, metadata endpoints, Megatron ranks)."""

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from deploy.local.api import Api, interrupt, until
from deploy.local.cluster import Cluster
from deploy.local.processes import Processes
from tests.cluster.real_ranks_model import build_corpus
from tests.cluster.real_service import service_folder
from tests.deploy.local.test_heard_by_queue_and_metadata import STEPS_AFTER, WORLD, job_file

pytestmark = [pytest.mark.real, pytest.mark.timeout(400)]

NOTICE_S = 15.0
PATIENCE_S = 120.0


class Scene:
    """A job that trains on the only two nodes that there are, and needs two."""

    def __init__(self, folder: Path, processes: Processes) -> None:
        self.cluster = Cluster(folder, processes)
        self.cluster.start_service()
        prefix = build_corpus(folder)
        self.checkpoints = folder / "checkpoints"
        self.api: Api = self.cluster.await_service()
        for number in range(WORLD):
            self.cluster.start_node(f"n{number + 1}")
        self.wait("ready nodes", lambda: len(self.cluster.ready_nodes(self.api)) == WORLD)
        self.job_id = self.api.post("/api/v1/jobs", job_file(prefix, self.checkpoints))["job_id"]
        self.wait("the first steps", lambda: self.job()["last_step"] >= STEPS_AFTER)

    def job(self) -> dict[str, Any]:
        return self.api.get(f"/api/v1/jobs/{self.job_id}")

    def wait(self, what: str, condition: Callable[[], Any]) -> None:
        until(what, PATIENCE_S, condition, self.cluster.check)


@pytest.fixture
def scene() -> Iterator[Scene]:
    with ExitStack() as stack:
        folder = stack.enter_context(service_folder())
        processes = Processes(folder / "logs")
        stack.callback(processes.close)
        yield Scene(folder, processes)


def test_a_suspension_that_was_announced_fits_a_notice_of_15_s_and_loses_no_step(scene: Scene) -> None:
    leaver = scene.job()["nodes"][0]
    began = time.monotonic()
    interrupt(scene.cluster.nodes[leaver].imds_url, ends_in_s=NOTICE_S)
    scene.wait("the suspension", lambda: scene.job()["state"] == "suspended")
    assert time.monotonic() - began < NOTICE_S, "all ranks have ended before the node is taken"
    scene.cluster.end_node(leaver)

    last_step = scene.job()["last_step"]
    written = sorted(path.name for path in scene.checkpoints.rglob("step-*"))
    assert written[-1] == f"step-{last_step:09d}" and not any(".partial" in name for name in written)
    # That it is whole shows when the job goes on from it.
    scene.cluster.start_node("n3")
    scene.wait("the job on other nodes", lambda: scene.job()["last_step"] >= last_step + STEPS_AFTER)
    job = scene.job()
    assert job["lost_steps"] == 0 and leaver not in job["nodes"]
    assert [row["source"] for row in job["generations"]][-1] == "checkpoint"
