"""The look for what is missing between each cloud and the service: an emulator of AWS, a double of Google."""

import json
from datetime import UTC, datetime

import pytest

from service.clouds.aws.account_look import WANTED, takes
from service.clouds.aws.queue_worker import make_clients
from service.clouds.hearing import look_at_all
from tests.service.clouds.google_double import NAME, PROJECT, PUBSUB_ITSELF, WRITER, google_double
from tests.service.clouds.moto_server import CREDENTIALS, REGION, Account, moto_server

pytest.importorskip("moto")
pytest.importorskip("googleapiclient")
BOUNDARY = "google.auth._regional_access_boundary_utils._RegionalAccessBoundaryManager.maybe_start_refresh"


@pytest.fixture(scope="module")
def emulator(tmp_path_factory: pytest.TempPathFactory):
    with moto_server(tmp_path_factory.mktemp("moto")) as url:
        yield url


@pytest.fixture
def account(emulator, settings, monkeypatch) -> Account:
    for name, value in CREDENTIALS.items():
        monkeypatch.setenv(name, value)
    settings.aws_endpoint_url, settings.aws_region = emulator, REGION
    account = Account(emulator, make_clients(settings))
    account.make()
    settings.aws_queue_url = account.queue_url
    return account


@pytest.fixture
def google(tmp_path, monkeypatch, settings):
    with google_double() as double:
        monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(double.credentials(tmp_path)))
        monkeypatch.setattr(BOUNDARY, lambda *arguments, **more: None)
        settings.gcp_endpoint_url, settings.gcp_subscription, settings.gcp_project = double.url, NAME, PROJECT
        yield double


def whats(settings, channel: str, now: datetime | None = None) -> list[str]:
    (found,) = [one for one in look_at_all(settings, now or datetime.now(UTC)) if one.channel == channel]
    assert all(item.why and item.mend for item in found.findings)
    return [item.what for item in found.findings]


def test_clouds_that_are_off_are_shown_with_the_line_that_turns_them_on(settings):
    found = look_at_all(settings, datetime.now(UTC))
    assert [one.channel for one in found] == ["aws-queue", "gcp-pubsub", "gcp-operations"]
    assert not any(one.on or one.findings for one in found)
    assert all("LIVER_SERVICE_" in one.turn_on for one in found)


@pytest.mark.thorough
def test_a_rule_that_keeps_events_for_a_day_is_named_and_one_that_does_not_is_fine(account, settings):
    assert whats(settings, "aws-queue") == [f"maximum event age of rule {account.name}: 86400 s"]
    target = {"Id": "1", "Arn": account.arn_of(account.queue_url), "RetryPolicy": {"MaximumEventAgeInSeconds": 60}}
    account.events.put_targets(Rule=account.name, Targets=[target])
    assert whats(settings, "aws-queue") == []


@pytest.mark.thorough
def test_what_an_aws_account_lacks_is_named(account, settings, monkeypatch):
    account.events.remove_targets(Rule=account.name, Ids=["1"])
    account.clients.sqs.set_queue_attributes(QueueUrl=account.queue_url, Attributes={"RedrivePolicy": ""})
    found = whats(settings, "aws-queue", datetime(2026, 1, 1, tzinfo=UTC))
    assert [what.partition(" ")[0] for what in found] == ["clock:", "dead", *["rule:"] * len(WANTED)]
    settings.aws_queue_url += "-gone"
    (what,) = whats(settings, "aws-queue")
    assert what.startswith("queue: there is no ")
    settings.aws_endpoint_url = "http://127.0.0.1:1"
    (what,) = whats(settings, "aws-queue")
    assert what.startswith("AWS cannot be asked: EndpointConnectionError")
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", "/nonexistent")
    (what,) = whats(settings, "aws-queue")
    assert what.startswith("credentials: ")


@pytest.mark.thorough
def test_a_project_with_everything_lacks_nothing(google, settings):
    assert whats(settings, "gcp-pubsub") == [] and whats(settings, "gcp-operations") == []


def test_what_a_project_lacks_is_named(google, settings):
    google.permissions, google.sinks = [], []
    google.subscription |= {"topic": "_deleted-topic_", "pushConfig": {"pushEndpoint": "https://example.com"},
                            "expirationPolicy": {"ttl": "2678400s"}}  # fmt: skip
    del google.subscription["deadLetterPolicy"]
    google.skew_s = 90
    found = whats(settings, "gcp-pubsub")
    words = ["clock: the service's is", "permission: pubsub.subscriptions.consume", "topic of", "it pushes",
             "dead letter topic", "it expires", "sink: none"]  # fmt: skip
    assert len(found) == len(words) and all(word in what for word, what in zip(words, found, strict=True)), found


@pytest.mark.parametrize("path, status, name, begins", [
    ("testIamPermissions", 404, "NOT_FOUND", "subscription: there is no"),
    (f"/v1/{NAME}", 403, "PERMISSION_DENIED", "permission: pubsub.subscriptions.get"),
    (f"/v2/projects/{PROJECT}/sinks", 403, "PERMISSION_DENIED", "sink: cannot be seen"),
    ("/token", 400, "invalid_grant", "credentials: "),
])  # fmt: skip
def test_what_google_refuses_is_named(google, settings, path, status, name, begins):
    google.refuse[path] = (status, name)
    (what,) = whats(settings, "gcp-pubsub")
    assert what.startswith(begins)


TO_LIST = "compute.globalOperations.list", "compute.zoneOperations.list"


@pytest.mark.parametrize("held, named", [((), TO_LIST), (TO_LIST[:1], TO_LIST[1:]), (TO_LIST[1:], TO_LIST[:1])])
def test_of_what_listing_operations_needs_exactly_what_is_missing_is_named(google, settings, held, named):
    google.refuse[f"/compute/v1/projects/{PROJECT}/aggregated/operations"] = (403, "PERMISSION_DENIED")
    google.of_project = list(held)
    assert whats(settings, "gcp-operations") == [f"permission: {name} on project {PROJECT}" for name in named]


def test_where_google_does_not_say_which_permission_is_held_all_are_named(google, settings):
    google.refuse[f"/compute/v1/projects/{PROJECT}/aggregated/operations"] = (403, "PERMISSION_DENIED")
    google.refuse["testIamPermissions"] = (403, "SERVICE_DISABLED")
    assert len(whats(settings, "gcp-operations")) == 2


def test_a_sink_or_a_dead_letter_policy_whose_account_may_not_publish_is_named(google, settings):
    google.publishers = [PUBSUB_ITSELF]
    topic = f"projects/{PROJECT}/topics/liver-notices"
    assert whats(settings, "gcp-pubsub") == [f"permission: {WRITER} is no publisher of {topic}"]
    google.publishers = [WRITER]
    assert whats(settings, "gcp-pubsub") == [
        f"permission: gcp-sa-pubsub.iam.gserviceaccount.com is no publisher of {topic}-dead"
    ]
    google.refuse["getIamPolicy"] = (403, "PERMISSION_DENIED")
    assert [what.partition(" (")[0] for what in whats(settings, "gcp-pubsub")] == [
        f"permission: pubsub.topics.getIamPolicy on {name}" for name in (topic, f"{topic}-dead")
    ]


def test_where_pub_sub_pushes_it_is_named_that_googles_keys_cannot_be_had(google, settings):
    settings.gcp_subscription, settings.gcp_push_audience, settings.gcp_push_account = None, "https://x", "push@x"
    settings.gcp_certs_url = f"{google.url}/certs"
    assert whats(settings, "gcp-pubsub") == []
    google.refuse["/certs"] = (503, "UNAVAILABLE")
    (what,) = whats(settings, "gcp-pubsub")
    assert what.startswith("keys of Google: ")


def test_only_admins_may_look(client, settings):
    assert client.get("/api/v1/channels/check").status_code == 403
    token = (settings.resolved_data_dir() / "tokens" / "admin.token").read_text().strip()
    answer = client.get("/api/v1/channels/check", headers={"Authorization": f"Bearer {token}"})
    assert answer.status_code == 200 and [one["on"] for one in answer.json()] == [False] * 3


@pytest.mark.parametrize("pattern, is_taken", [
    ({"source": ["aws.ec2"]}, True),
    ({"source": [{"prefix": "aws."}], "detail-type": ["A"]}, True),
    ({"source": ["aws.health"]}, False),
    ({"detail-type": ["B"]}, False),
])  # fmt: skip
def test_a_pattern_is_read_by_source_and_kind(pattern, is_taken):
    assert takes(json.dumps(pattern), "aws.ec2", "A") == is_taken
