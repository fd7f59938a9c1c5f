"""A notice of 15 s for a node that nothing can replace: the job saves what it has and ends in that time, with real
processes all through (service with embedded PostgreSQL, agents, metadata endpoints, Megatron ranks)."""

import time
from collections.abc import Iterator

import pytest

from deploy.local.api import interrupt
from tests.cluster.real_service import STEPS_AFTER, RealJob, real_job

pytestmark = [pytest.mark.real, pytest.mark.timeout(400)]

NOTICE_S = 15.0


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

    last_step = scene.job()["last_step"]
    written = sorted(path.name for path in scene.checkpoints.rglob("step-*"))
    assert written[-1] == f"step-{last_step:09d}" and not any(".partial" in name for name in written)
    # That it is whole shows when the job goes on from it.
    scene.cluster.start_node("n3")
    scene.wait("the job on other nodes", lambda: scene.job()["last_step"] >= last_step + STEPS_AFTER)
    job = scene.job()
    assert job["lost_steps"] == 0 and leaver not in job["nodes"]
    assert [row["source"] for row in job["generations"]][-1] == "checkpoint"
