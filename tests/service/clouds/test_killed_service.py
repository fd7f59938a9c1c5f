"""A real service that is killed between the commit of what clouds told and its acknowledgement: it comes again to the
next one, and nothing is acted on twice. What the service lacks is the exit status of the command."""

import json
from collections.abc import Iterator
from contextlib import ExitStack
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest

pytest.importorskip("moto")
pytest.importorskip("googleapiclient")

from typer.testing import CliRunner

from agent.protocol.sync import Provider
from service.cli.main import app
from service.clouds.aws.queue_worker import make_clients
from service.settings import ServiceSettings
from tests.cluster.real_service import RealService, real_service, service_folder
from tests.service.clouds.google_double import NAME, PROJECT, Google, entry, google_double, operation
from tests.service.clouds.held_requests import HeldRequests, held_requests
from tests.service.clouds.moto_server import CREDENTIALS, REGION, Account, moto_server
from tests.service.fake_agent import FakeAgent
from tests.service.waiting import until

eventually = partial(until, within_s=120.0)
"""Longer than a killed service has the list of operations to itself, 60 s."""
PUBSUB, LISTED, QUEUED = "5775171277418378001", "5775171277418378002", "i-queued"
CHANNELS = ("aws-queue", "gcp-operations", "gcp-pubsub")
DELETE, ACKNOWLEDGE = "DeleteMessageBatch", "acknowledge"


class Place:
    """Both clouds, and the service that hears them, which can be killed."""

    def __init__(self, folder: Path, google: Google, account: Account, held: HeldRequests) -> None:
        self.google, self.account, self.held = google, account, held
        self._folder = folder
        self._settings = {
            "AWS_ENDPOINT_URL": held.url, "AWS_REGION": REGION, "AWS_QUEUE_URL": account.queue_url,
            "AWS_VISIBILITY_S": "5", "AWS_WAIT_S": "1", "GCP_ENDPOINT_URL": google.url, "GCP_SUBSCRIPTION": NAME,
            "GCP_PROJECT": PROJECT, "GCP_WAIT_S": "2", "GCP_OPERATIONS_EVERY_S": "1",
            "SILENT_AFTER_S": "3600", "GONE_AFTER_S": "3600",
        }  # fmt: skip
        self._running = ExitStack()
        self.service = self.start()

    def start(self) -> RealService:
        """On the same port and data as before."""
        arguments = ("-m", "service.cli.main", "serve")
        service = self._running.enter_context(real_service(RealService, self._folder, arguments, self._settings))
        self._settings["PORT"] = str(urlsplit(service.url).port)
        return service

    def kill(self) -> None:
        """Without a word before."""
        self.service.process.kill()
        self.service.process.wait(10)
        self._running.close()

    def close(self) -> None:
        self._running.close()

    def ask(self, path: str) -> list[dict]:
        header = {"Authorization": f"Bearer {self.service.token('operator')}"}
        return httpx.get(f"{self.service.url}{path}", headers=header, timeout=30).raise_for_status().json()

    def counts(self) -> dict[str, dict[str, int]]:
        """By channel, messages by what was done with them."""
        return {one["channel"]: one["counts"] for one in self.ask("/api/v1/channels")}


@pytest.fixture
def place(tmp_path, monkeypatch) -> Iterator[Place]:
    with ExitStack() as stack:
        for name, value in CREDENTIALS.items():
            monkeypatch.setenv(name, value)
        google = stack.enter_context(google_double())
        monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(google.credentials(tmp_path)))
        endpoint = stack.enter_context(moto_server(tmp_path))
        account = Account(endpoint, make_clients(ServiceSettings(aws_endpoint_url=endpoint, aws_region=REGION)))
        account.make()
        held = stack.enter_context(held_requests(endpoint))
        place = Place(stack.enter_context(service_folder()), google, account, held)
        stack.callback(place.close)
        yield place


@pytest.mark.thorough
@pytest.mark.real
@pytest.mark.timeout(300)
def test_what_a_killed_service_has_stored_and_not_acknowledged_comes_again_and_is_acted_on_once(place):
    google, account, held = place.google, place.account, place.held
    with httpx.Client(base_url=place.service.url, timeout=30) as client:
        join = {"Authorization": f"Bearer {place.service.token('join')}"}
        machines = {"p": (Provider.GCP, PUBSUB), "l": (Provider.GCP, LISTED), "q": (Provider.AWS, QUEUED)}
        for name, (provider, machine) in machines.items():
            agent = FakeAgent(name, client, join, lambda: datetime.now(UTC), provider=provider, provider_id=machine)
            agent.sync()
    google.ack_deadline_s = 10.0
    held.hold, google.hold = {DELETE}, {ACKNOWLEDGE}
    account.warn(QUEUED)
    google.publish(json.dumps(entry(PUBSUB, datetime.now(UTC))))
    google.operations = [operation(LISTED, datetime.now(UTC))]
    eventually(lambda: held.held and google.held, lambda: (held.held, google.held))
    once = {channel: {"acts": 1} for channel in CHANNELS}
    eventually(lambda: place.counts() == once, place.counts)

    asked = google.times(f"/compute/v1/projects/{PROJECT}/aggregated/operations")
    place.kill()
    assert account.left() == 1 and google.messages, "nothing was acknowledged"
    held.release()
    with google.changed:
        google.hold.clear()
        google.changed.notify_all()
    place.service = place.start()

    again = {"gcp-operations": {"acts": 1}}
    again |= {channel: {"acts": 1, "repeated": 1} for channel in ("aws-queue", "gcp-pubsub")}
    eventually(lambda: not google.messages and account.left() == 0, lambda: (google.messages, account.left()))
    eventually(lambda: google.times(f"/compute/v1/projects/{PROJECT}/aggregated/operations") > asked + 1, place.counts)
    assert place.counts() == again
    assert account.left(account.dlq_url) == 0
    notices = place.ask("/api/v1/notices")
    assert sorted(item["node_id"] for item in notices) == ["l", "p", "q"]
    assert sum(item["disposition"] == "acts" for item in place.ask("/api/v1/hearings")) == 3

    # Its rule keeps warnings for a day, which the command says, and ends with status 1.
    environment = {
        "LIVER_SERVICE_URL": place.service.url,
        "LIVER_TOKEN_FILE": str(place.service.folder / "tokens" / "admin.token"),
        "COLUMNS": "200",
    }
    checked = CliRunner().invoke(app, ["cloud", "check"], env=environment)
    assert checked.exit_code == 1 and "maximum event age" in checked.output, checked.output
    target = {"Id": "1", "Arn": account.arn_of(account.queue_url), "RetryPolicy": {"MaximumEventAgeInSeconds": 60}}
    account.events.put_targets(Rule=account.name, Targets=[target])
    checked = CliRunner().invoke(app, ["cloud", "check"], env=environment)
    assert checked.exit_code == 0, checked.output
