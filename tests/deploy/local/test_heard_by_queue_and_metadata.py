"""One real job whose nodes are announced to go by the queue of the account, by their metadata, and by both: one handoff
for each loss, whoever says it first, and none for what is an hour late or about machines of others.

Real processes all through: service with embedded PostgreSQL, an emulator of SQS over HTTP, agents, Megatron ranks.
"""

import json
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

from deploy.local.api import interrupt
from deploy.local.cluster import Cluster
from service.clouds.aws.queue_worker import make_clients
from service.settings import ServiceSettings
from tests.cluster.real_service import RealJob, real_job
from tests.service.clouds.moto_server import CREDENTIALS, REGION, Account, moto_server

pytest.importorskip("moto")
pytestmark = [pytest.mark.thorough, pytest.mark.real, pytest.mark.timeout(400)]

NODES = ("n1", "n2", "n3", "n4", "n5", "n6")
APART_S, SLACK_S = 5.0, 4.0
QUEUE, METADATA = "aws-queue", "aws-imds"


class Scene(RealJob):
    """The running job, and both ways to announce that a machine goes."""

    account: Account

    def handoffs(self) -> list[dict[str, Any]]:
        return self.api.handoffs(self.job_id)

    def notices(self, node_id: str) -> list[dict[str, Any]]:
        return self.api.get("/api/v1/notices", node_id=node_id)

    def sources(self, node_id: str) -> set[str]:
        return {item["source"] for row in self.notices(node_id) for item in row["channels"]}

    def counts(self) -> dict[str, int]:
        return {name: heard for row in self.api.get("/api/v1/channels") for name, heard in row["counts"].items()}

    def say(self, node_id: str, channel: str) -> None:
        if channel == QUEUE:
            self.account.warn(f"i-{node_id}")
        else:
            interrupt(self.cluster.nodes[node_id].imds_url, ends_in_s=120)

    def announce(self, *channels: str) -> tuple[str, dict[str, Any]]:
        """The first node of the world goes, says each of the channels, 5 s apart. The node, and its one notice once the
        job has left it."""
        leaver, done = self.job()["nodes"][0], len(self.handoffs())
        first = datetime.now(UTC)
        for number, channel in enumerate(channels):
            if number:
                due = first + timedelta(seconds=number * APART_S)
                self.wait("the next channel", lambda due=due: datetime.now(UTC) >= due, 60)
            self.say(leaver, channel)
        self.wait(f"a notice by {channels}", lambda: self.sources(leaver) == set(channels), 30)
        self.wait("the handoff", lambda: leaver not in self.job()["nodes"] and self.job()["state"] == "running", 60)
        self.trains_on()
        new = self.handoffs()[done:]
        assert [(item["state"], item["leaving"]) for item in new] == [("active", [leaver])], json.dumps(new, indent=1)
        (notice,) = self.notices(leaver)
        return leaver, notice


@pytest.fixture
def scene(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Scene]:
    for name, value in CREDENTIALS.items():
        monkeypatch.setenv(name, value)
    with moto_server(tmp_path) as url:
        account = Account(url, make_clients(ServiceSettings(aws_endpoint_url=url, aws_region=REGION)))
        account.make()
        settings = {"AWS_ENDPOINT_URL": url, "AWS_REGION": REGION, "AWS_QUEUE_URL": account.queue_url}
        given = {f"LIVER_SERVICE_{name}": value for name, value in settings.items()}
        with real_job(Scene, partial(Cluster, service_environment=given)) as job:
            job.account = account
            job.start(*NODES)
            yield job


def test_one_loss_is_one_handoff_by_whichever_channels_it_is_heard(scene: Scene) -> None:
    before = scene.job()["nodes"]
    late_twice_and_foreign(scene, before[0])

    leaver, notice = scene.announce(QUEUE)
    assert heard(notice) == [(QUEUE, 0)]
    leaver, notice = scene.announce(METADATA)
    assert heard(notice) == [(METADATA, 0)]
    for first, second in ((QUEUE, METADATA), (METADATA, QUEUE)):
        leaver, notice = scene.announce(first, second)
        (_, at_once), (channel, lag_s) = heard(notice)
        assert (notice["source"], at_once, channel) == (first, 0, second)
        assert APART_S - 1 <= lag_s <= APART_S + SLACK_S
        ends = [item["deadline_at"] for item in notice["channels"]]
        assert notice["deadline_at"] == min(ends) == scene.api.get(f"/api/v1/nodes/{leaver}")["deadline_at"]

    job, handoffs = scene.job(), scene.handoffs()
    assert [item["state"] for item in handoffs] == ["active"] * 4 and not set(job["nodes"]) & set(before)
    assert [row["source"] for row in job["generations"][1:]] == ["handoff"] * 4 and job["lost_steps"] == 0
    assert scene.counts() == {"late": 2, "foreign": 1, "acts": 2, "adds": 1}
    assert scene.account.left() == scene.account.left(scene.account.dlq_url) == 0


def late_twice_and_foreign(scene: Scene, node_id: str) -> None:
    """What was said an hour ago of a node of the world and comes twice, and what is said of a machine of others."""
    event = {
        "version": "0", "id": str(uuid4()), "detail-type": "EC2 Spot Instance Interruption Warning",
        "source": "aws.ec2", "time": (datetime.now(UTC) - timedelta(hours=1)).isoformat(),
        "detail": {"instance-id": f"i-{node_id}", "instance-action": "terminate"},
    }  # fmt: skip
    for _ in range(2):
        scene.account.put(json.dumps(event))
    scene.account.warn("i-stranger")
    scene.wait("three messages", lambda: sum(scene.counts().values()) == 3 and not scene.account.left(), 30)
    assert scene.counts() == {"late": 2, "foreign": 1}
    scene.trains_on()
    assert scene.handoffs() == [] and scene.notices(node_id) == []
    assert not scene.api.get(f"/api/v1/nodes/{node_id}")["leaving"]


def heard(notice: dict[str, Any]) -> list[tuple[str, float]]:
    return [(item["source"], item["lag_s"]) for item in notice["channels"]]
