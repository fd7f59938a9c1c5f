"""A notice for a node that nothing can replace: the job saves what it has and ends in time, with real processes all
through (service with embedded PostgreSQL, agents, metadata endpoints, Megatron ranks)."""

import os
import signal
import time
from collections.abc import Iterator
from datetime import UTC, datetime

import pytest

from deploy.local.api import interrupt
from tests.cluster.real_service import STEPS_AFTER, RealJob, real_job

pytestmark = [pytest.mark.thorough, pytest.mark.real, pytest.mark.timeout(400)]

NOTICE_S, LONG_NOTICE_S = 15.0, 40.0


@pytest.fixture
def scene() -> Iterator[RealJob]:
    """On the only two nodes that there are, and it needs two."""
    with real_job(RealJob) as job:
        job.start("n1", "n2")
        yield job


def test_a_suspension_that_was_announced_fits_a_notice_of_15_s_and_loses_no_step(scene: RealJob) -> None:
    leaver = scene.job()["nodes"][0]
    began = time.monotonic()
    interrupt(scene.cluster.nodes[leaver].imds_url, ends_in_s=NOTICE_S)
    scene.wait("the suspension", lambda: scene.job()["state"] == "suspended")
    assert time.monotonic() - began < NOTICE_S, "all ranks have ended before the node is taken"
    scene.cluster.end_node(leaver)

    assert_nothing_is_lost(scene, leaver)


def test_ranks_end_in_time_by_themselves_where_the_service_is_away_since_it_named_the_time(scene: RealJob) -> None:
    """A checkpoint has been written before, so that the service knows how long that takes."""
    leaver, service = scene.job()["nodes"][0], scene.cluster.service
    assert service is not None
    scene.api.post(f"/api/v1/jobs/{scene.job_id}/checkpoint")
    scene.wait("a checkpoint", lambda: scene.job()["checkpoints"])
    ends_at = time.monotonic() + LONG_NOTICE_S
    interrupt(scene.cluster.nodes[leaver].imds_url, ends_in_s=LONG_NOTICE_S)
    scene.wait("the time of the suspension", lambda: scene.job()["suspends_at"])
    begun, before = scene.job()["suspends_at"], scene.last_step()
    assert (datetime.fromisoformat(begun) - datetime.now(UTC)).total_seconds() > 5.0, "it trains on until then"
    scene.wait("that agents know it", lambda: all('"suspends_utc":"2' in text for text in journals(scene)))
    os.kill(service.process.pid, signal.SIGSTOP)
    try:
        scene.wait("the end of the notice", lambda: time.monotonic() >= ends_at)
        scene.cluster.end_node(leaver)
    finally:
        os.kill(service.process.pid, signal.SIGCONT)
    scene.wait("the suspension", lambda: scene.job()["state"] == "suspended")
    assert scene.job()["last_step"] > before + STEPS_AFTER
    assert_nothing_is_lost(scene, leaver)


def test_ranks_end_in_time_by_themselves_also_where_the_service_was_away_before_the_notice(scene: RealJob) -> None:
    """So that it could name no time. The agent that leads keeps rank 0, and knows how long a checkpoint takes."""
    leaver, service = scene.job()["nodes"][1], scene.cluster.service
    assert service is not None
    scene.api.post(f"/api/v1/jobs/{scene.job_id}/checkpoint")
    scene.wait("a checkpoint", lambda: scene.job()["checkpoints"])
    before = scene.last_step()
    os.kill(service.process.pid, signal.SIGSTOP)
    try:
        ends_at = time.monotonic() + LONG_NOTICE_S
        interrupt(scene.cluster.nodes[leaver].imds_url, ends_in_s=LONG_NOTICE_S)
        scene.wait("the end of the notice", lambda: time.monotonic() >= ends_at)
        scene.cluster.end_node(leaver)
    finally:
        os.kill(service.process.pid, signal.SIGCONT)
    scene.wait("the suspension", lambda: scene.job()["state"] == "suspended")
    job = scene.job()
    assert job["last_step"] > before + STEPS_AFTER, "it trained on until then"
    assert "the service is not heard" in job["reason"], job["reason"]
    assert_nothing_is_lost(scene, leaver)


def journals(scene: RealJob) -> list[str]:
    """Of every agent, as written."""
    folders = [scene.cluster.folder / "nodes" / name for name in scene.cluster.nodes]
    return [(folder / "journal.jsonl").read_text() for folder in folders]


def assert_nothing_is_lost(scene: RealJob, leaver: str) -> None:
    """The last step is saved, and the job goes on from it on another node."""
    last_step = scene.job()["last_step"]
    written = sorted(path.name for path in scene.checkpoints.rglob("step-*"))
    assert written[-1] == f"step-{last_step:09d}" and not any(".partial" in name for name in written)
    # That it is whole shows when the job goes on from it.
    scene.cluster.start_node("n3")
    scene.wait("the job on other nodes", lambda: scene.job()["last_step"] >= last_step + STEPS_AFTER)
    job = scene.job()
    assert job["lost_steps"] == 0 and leaver not in job["nodes"]
    assert [row["source"] for row in job["generations"]][-1] == "checkpoint"
