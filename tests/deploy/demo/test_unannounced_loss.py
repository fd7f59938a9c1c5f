"""A node vanishes without notice: the job comes back from its checkpoint; with too few nodes it waits, then resumes.

Real processes all through: service with embedded PostgreSQL, agents, Megatron ranks.
"""

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from deploy.demo.demo_job import MODEL
from deploy.local.api import Api
from deploy.local.cluster import Cluster
from deploy.local.processes import Processes
from tests.liver_core.rank.support.event_reader import read_run

pytestmark = [pytest.mark.thorough, pytest.mark.real, pytest.mark.timeout(400)]


@pytest.fixture
def processes(tmp_path: Path) -> Iterator[Processes]:
    made = Processes(tmp_path / "logs")
    yield made
    made.close()


def test_a_job_survives_the_unannounced_loss_of_a_node_and_waits_for_nodes_when_too_few_are_left(
    processes: Processes, tmp_path: Path
) -> None:
    cluster = Cluster(tmp_path, processes)
    cluster.start_service()
    prefix, corpus = cluster.start_corpus()
    api = cluster.await_service()
    for node_id in ("node-a", "node-b", "node-c"):
        cluster.start_node(node_id)
    if corpus is not None:
        processes.finish(corpus, 120)
    wait(120, lambda: len(cluster.ready_nodes(api)) == 3, "three ready nodes")
    job_id = api.post("/api/v1/jobs", job_file(prefix, tmp_path / "checkpoints"))["job_id"]
    wait(120, lambda: last_step(api, job_id) >= 12, "twelve steps on three nodes")

    cluster.end_node("node-c")
    wait(150, lambda: trains_on(api, job_id, {"node-a", "node-b"}), "steps on the two nodes that are left")
    births = [row for row in job(api, job_id)["generations"] if row["source"] == "checkpoint"]
    assert births, "the new generation says that it came from a checkpoint"
    for birth in births:
        assert birth["checkpoint_step"] % 5 == 0 and "from checkpoint of step" in birth["reason"]
    assert job(api, job_id)["lost_steps"] == sum(birth["lost_steps"] for birth in births)
    steps = [(row["generation"], row["step"]) for row in api.steps(job_id, after=0)]
    first_again = min(step for generation, step in steps if generation >= 2)
    assert first_again % 5 == 1, "it goes on at the step after a checkpoint"
    assert_numbers_are_one_run(api, job_id, tmp_path / "checkpoints" / "tensorboard" / job_id, first_again)

    cluster.end_node("node-b")
    wait(120, lambda: job(api, job_id)["state"] == "suspended", "the job to be suspended")
    before = last_step(api, job_id)
    cluster.start_node("node-d")
    wait(150, lambda: job(api, job_id)["state"] == "running" and last_step(api, job_id) > before, "the job to resume")


def job_file(prefix: str, checkpoints: Path) -> dict:
    return {
        "name": "unannounced",
        "entrypoint": "tests.agent.held_job:SlowJob",
        "model": MODEL | {"num_layers": 6},
        "args": {"data_prefix": prefix, "micro_batch_s": 0.05},
        "global_batch": 8,
        "micro_batch": 1,
        "nodes": {"min": 2, "max": 3},
        "layouts": {"pinned": [{"nodes": 3, "layout": "PP3"}, {"nodes": 2, "layout": "PP2"}]},
        "checkpoint": {"path": str(checkpoints), "every_steps": 5},
        "tensorboard": str(checkpoints / "tensorboard"),
        "stop": {"steps": 100_000},
    }


def assert_numbers_are_one_run(api: Api, job_id: str, folder: Path, first_again: int) -> None:
    """Each step once, in order, and those that were made again as they were made last. What the lost node had not
    passed on of steps before the checkpoint is missing."""

    def numbers() -> list[dict]:
        return api.get(f"/api/v1/jobs/{job_id}/metrics", after=first_again - 1, limit=20_000)

    wait(
        30, lambda: len(numbers()) > 2 and all(row["generation"] >= 2 for row in numbers()), "numbers of the new world"
    )
    assert all(set(row["values"]) == {"loss", "learning_rate", "gradient_norm"} for row in numbers())
    wait(30, lambda: read_run(folder).steps("loss")[-1] > first_again + 1, "event files of the new world")
    shown, known = read_run(folder).steps("loss"), [row["step"] for row in numbers()]
    assert shown == sorted(set(shown)) and known == [*range(first_again, known[-1] + 1)]
    assert [step for step in shown if step >= first_again] == [*range(first_again, shown[-1] + 1)]


def job(api: Api, job_id: str) -> dict:
    return api.get(f"/api/v1/jobs/{job_id}")


def last_step(api: Api, job_id: str) -> int:
    return max((row["step"] for row in api.steps(job_id, after=0)), default=0)


def trains_on(api: Api, job_id: str, nodes: set[str]) -> bool:
    now = job(api, job_id)
    stepped = {row["generation"] for row in api.steps(job_id, after=0)}
    return set(now["nodes"]) == nodes and now["active_generation"] in stepped


def wait(timeout_s: float, condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"no {what} within {timeout_s} s"
        time.sleep(0.5)  # Real processes on real time.
