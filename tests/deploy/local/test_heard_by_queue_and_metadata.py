"""One real job whose nodes are announced to go by the queue of the account, by their metadata, and by both: one handoff
for each loss, whoever says it first, and none for what is an hour late or about machines of others.

Real processes all through: service with embedded PostgreSQL, an emulator of SQS over HTTP, agents, Megatron ranks.
"""

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

from deploy.local.api import Api, interrupt, until
from deploy.local.cluster import Cluster
from deploy.local.processes import Processes
from service.clouds.aws.queue_worker import make_clients
from service.settings import ServiceSettings
from tests.cluster.real_ranks_model import build_corpus
from tests.service.clouds.moto_server import CREDENTIALS, REGION, Account, moto_server

pytest.importorskip("moto")
pytestmark = [pytest.mark.real, pytest.mark.timeout(400)]

NODES = ("n1", "n2", "n3", "n4", "n5", "n6")
WORLD = 2
APART_S, SLACK_S = 5.0, 4.0
STEPS_AFTER = 3
QUEUE, METADATA = "aws-queue", "aws-imds"


class Scene:
    """The running job, and both ways to announce that a machine goes."""

    def __init__(self, folder: Path, processes: Processes, account: Account) -> None:
        self.account = account
        settings = {"AWS_ENDPOINT_URL": account.url, "AWS_REGION": REGION, "AWS_QUEUE_URL": account.queue_url}
        given = {f"LIVER_SERVICE_{name}": value for name, value in settings.items()}
        self.cluster = Cluster(folder, processes, service_environment=given)
        self.cluster.start_service()
        self.prefix = build_corpus(folder)
        self.api: Api = self.cluster.await_service()
        for node_id in NODES:
            self.cluster.start_node(node_id)
        self.wait(120, lambda: self.cluster.ready_nodes(self.api) == set(NODES), "ready nodes")
        self.job_id = self.api.post("/api/v1/jobs", job_file(self.prefix, folder / "checkpoints"))["job_id"]
        self.wait(120, lambda: self.job()["state"] == "running" and self.last_step() >= STEPS_AFTER, "the first steps")

    def job(self) -> dict[str, Any]:
        return self.api.get(f"/api/v1/jobs/{self.job_id}")

    def last_step(self) -> int:
        return self.job()["last_step"]

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

    def wait(self, timeout_s: float, condition: Callable[[], Any], what: str) -> None:
        until(what, timeout_s, condition, self.cluster.check)

    def trains_on(self) -> None:
        """Some more steps."""
        before = self.last_step()
        self.wait(60, lambda: self.last_step() >= before + STEPS_AFTER, "more steps")

    def announce(self, *channels: str) -> tuple[str, dict[str, Any]]:
        """The first node of the world goes, says each of the channels, 5 s apart. The node, and its one notice once the
        job has left it."""
        leaver, done = self.job()["nodes"][0], len(self.handoffs())
        first = datetime.now(UTC)
        for number, channel in enumerate(channels):
            if number:
                due = first + timedelta(seconds=number * APART_S)
                self.wait(60, lambda due=due: datetime.now(UTC) >= due, "the next channel")
            self.say(leaver, channel)
        self.wait(30, lambda: self.sources(leaver) == set(channels), f"a notice by {channels}")
        self.wait(60, lambda: leaver not in self.job()["nodes"] and self.job()["state"] == "running", "the handoff")
        self.trains_on()
        new = self.handoffs()[done:]
        assert [(item["state"], item["leaving"]) for item in new] == [("active", [leaver])], json.dumps(new, indent=1)
        (notice,) = self.notices(leaver)
        return leaver, notice


def job_file(prefix: str, checkpoints: Path) -> dict[str, Any]:
    return {
        "name": "two-channels",
        "entrypoint": "tests.agent.held_job:SlowJob",
        "model": {
            "num_layers": 2, "hidden_size": 64, "ffn_hidden_size": 128, "num_attention_heads": 4, "seq_length": 32,
            "padded_vocab_size": 264,
        },
        "args": {"data_prefix": prefix, "micro_batch_s": 0.05},
        "global_batch": 8,
        "micro_batch": 1,
        "nodes": {"min": WORLD, "max": WORLD},
        "layouts": {"pinned": [{"nodes": WORLD, "layout": "DP2"}]},
        "checkpoint": {"path": str(checkpoints), "every_steps": 100},
        "stop": {"steps": 100_000},
    }  # fmt: skip


@pytest.fixture
def scene(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Scene]:
    for name, value in CREDENTIALS.items():
        monkeypatch.setenv(name, value)
    with ExitStack() as stack:
        url = stack.enter_context(moto_server(tmp_path))
        account = Account(url, make_clients(ServiceSettings(aws_endpoint_url=url, aws_region=REGION)))
        account.make()
        processes = Processes(tmp_path / "logs")
        stack.callback(processes.close)
        yield Scene(tmp_path, processes, account)


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
    scene.wait(30, lambda: sum(scene.counts().values()) == 3 and not scene.account.left(), "three messages")
    assert scene.counts() == {"late": 2, "foreign": 1}
    scene.trains_on()
    assert scene.handoffs() == [] and scene.notices(node_id) == []
    assert not scene.api.get(f"/api/v1/nodes/{node_id}")["leaving"]


def heard(notice: dict[str, Any]) -> list[tuple[str, float]]:
    return [(item["source"], item["lag_s"]) for item in notice["channels"]]
