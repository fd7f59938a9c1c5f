"""Pub/Sub and the operations of a GCP project, over HTTP from a double: nothing lost, nothing acted on twice."""

import base64
import json
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import pytest
from cryptography.hazmat.primitives.asymmetric import rsa
from sqlalchemy import URL, create_engine, select, text
from sqlalchemy.exc import OperationalError

from agent.protocol.sync import Provider
from service.clouds.gcp import operation_list, subscription_worker
from service.clouds.gcp.operation_list import ListIncomplete, OperationWorker
from service.clouds.gcp.push_tokens import GoogleKeys
from service.clouds.gcp.subscription_worker import SubscriptionWorker
from service.clouds.tables import ChannelRow, HearingCountRow, HearingRow, OperationCursorRow
from tests.service.clouds.google_double import (
    ACCOUNT,
    AUDIENCE,
    NAME,
    PROJECT,
    entry,
    google_double,
    operation,
    push_token,
)
from tests.service.waiting import until

pytest.importorskip("googleapiclient")
BOUNDARY = "google.auth._regional_access_boundary_utils._RegionalAccessBoundaryManager.maybe_start_refresh"
A, B, STRANGER = "5775171277418378001", "5775171277418378002", "999"


@pytest.fixture
def google(tmp_path, monkeypatch, context):
    with google_double() as double:
        monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(double.credentials(tmp_path)))
        # google-auth asks another host of Google's, in a thread, where an account may be used; it needs no answer.
        monkeypatch.setattr(BOUNDARY, lambda *arguments, **more: None)
        for name, value in {"gcp_endpoint_url": double.url, "gcp_subscription": NAME, "gcp_project": PROJECT,
                            "gcp_wait_s": 5, "gcp_workers": 2}.items():  # fmt: skip
            object.__setattr__(context.settings, name, value)
        yield double


@pytest.fixture
def make_agent(make_agent):
    """Nodes a and b are two machines of Compute Engine."""
    machines = {"a": A, "b": B}

    def make(node_id: str, **options):
        return make_agent(node_id, provider=Provider.GCP, provider_id=machines[node_id], **options)

    return make


@pytest.fixture
def on_google(running):
    return running


@pytest.fixture
def pulling(google, context):
    worker = SubscriptionWorker(context)
    worker.start()
    yield worker
    worker.stop()


def counts(context) -> dict[str, int]:
    with context.sessions() as session:
        return {row.disposition: row.heard for row in session.scalars(select(HearingCountRow))}


def test_a_preemption_in_the_log_is_in_the_orders_and_acknowledged(on_google, google, pulling, clock):
    _, _, b = on_google
    google.publish(json.dumps(entry(A, clock())))
    until(lambda: b.sync().jobs[0].notices, "the notice has not come")
    (fact,) = b.orders.jobs[0].notices
    assert (fact.node_id, fact.source, fact.deadline_utc) == ("a", "gcp-pubsub", clock())
    until(lambda: not google.messages)


def test_foreign_repeated_late_and_unreadable_messages_are_let_go(on_google, google, pulling, context, clock):
    google.publish(json.dumps(entry(A, clock())))
    until(lambda: counts(context).get("acts") == 1)
    google.publish(json.dumps(entry(A, clock())))
    google.publish(json.dumps(entry(B, clock() - timedelta(hours=1))))
    google.publish(json.dumps(entry(STRANGER, clock())))
    google.publish(json.dumps(entry(A, clock(), method="compute.instances.automaticRestart")))
    google.publish("no entry")
    until(lambda: sum(counts(context).values()) == 6 and not google.messages, str(counts(context)))
    assert counts(context) == {"acts": 1, "repeated": 1, "late": 1, "foreign": 1, "noted": 1, "malformed": 1}
    with context.sessions() as session:
        rows = {row.disposition: row for row in session.scalars(select(HearingRow))}
    assert rows["malformed"].raw == "no entry" and "foreign" not in rows


def test_a_service_that_ends_between_commit_and_acknowledgement_gets_it_again_and_acts_once(
    on_google, google, context, clock
):
    google.ack_deadline_s = 0.2
    google.refuse["acknowledge"] = (503, "UNAVAILABLE")
    google.publish(json.dumps(entry(A, clock())))
    first = SubscriptionWorker(context)
    with pytest.raises(Exception, match="UNAVAILABLE"):
        first._read_once()
    assert counts(context) == {"acts": 1} and google.messages
    google.refuse.clear()
    second = SubscriptionWorker(context)
    until(lambda: (second._read_once(), not google.messages)[1])
    assert counts(context) == {"acts": 1, "repeated": 1}


def test_a_message_is_acknowledged_only_once_it_is_stored(on_google, google, context, clock, monkeypatch):
    google.ack_deadline_s = 0.2
    failures, take = iter([RuntimeError("not today")] * 2), subscription_worker.take_facts

    def fails_twice(*arguments, **more):
        for error in failures:
            raise error
        return take(*arguments, **more)

    monkeypatch.setattr(subscription_worker, "take_facts", fails_twice)
    google.publish(json.dumps(entry(A, clock())))
    worker = SubscriptionWorker(context)
    worker._read_once()
    assert not google.times("acknowledge") and worker.trouble == "RuntimeError: not today"
    until(lambda: (worker._read_once(), not google.messages)[1])
    assert counts(context) == {"acts": 1}


class Lost(Exception):
    """As psycopg says that the connection is lost."""

    sqlstate = None


@pytest.mark.thorough
def test_while_the_database_is_away_messages_are_kept_from_others(on_google, google, context, clock, monkeypatch):
    google.ack_deadline_s = 3.5
    monkeypatch.setattr(subscription_worker, "EXTEND_EVERY_S", 1.0)
    away, take = iter(range(20)), subscription_worker.take_facts

    def outage(*arguments, **more):
        for _ in away:
            raise OperationalError("SELECT 1", {}, Lost())
        return take(*arguments, **more)

    monkeypatch.setattr(subscription_worker, "take_facts", outage)
    google.publish(json.dumps(entry(A, clock())))
    (lent,) = google.messages.values()
    worker = SubscriptionWorker(context)
    worker.start()
    try:
        until(lambda: not google.messages)
    finally:
        worker.stop()
    assert lent.tries == 1 and google.times("modifyAckDeadline") and counts(context) == {"acts": 1}


@pytest.mark.parametrize("status, name", [(403, "PERMISSION_DENIED"), (404, "NOT_FOUND")])
def test_a_subscription_that_cannot_be_pulled_is_said(google, context, client, status, name):
    google.refuse["pull"] = (status, name)
    worker = SubscriptionWorker(context)
    worker.start()
    try:
        until(lambda: worker.trouble)
    finally:
        worker.stop()
    assert name in worker.trouble
    with context.sessions() as session:
        assert session.get_one(ChannelRow, "gcp-pubsub").trouble == worker.trouble


def test_where_nothing_is_configured_one_line_each_says_how_to_turn_it_on(context, caplog):
    with caplog.at_level("INFO"):
        SubscriptionWorker(context).start()
        OperationWorker(context).start()
    assert [record.message.partition("LIVER_SERVICE_")[2].partition(" ")[0] for record in caplog.records] == [
        "GCP_SUBSCRIPTION", "GCP_PROJECT",
    ]  # fmt: skip


def pushed(client, google, token: str | None, value: object, *, wrapped: bool = True):
    settings, app = client.app.state.context.settings, client.app
    for name, setting in {"gcp_push_audience": AUDIENCE, "gcp_push_account": ACCOUNT}.items():
        object.__setattr__(settings, name, setting)
    if app.state.google_keys._url != f"{google.url}/certs":
        app.state.google_keys = GoogleKeys(f"{google.url}/certs")
    body = value if isinstance(value, bytes) else json.dumps(value).encode()
    if wrapped:
        message = {"data": base64.b64encode(body).decode(), "messageId": "1", "publishTime": "2026-01-01T00:00:00Z"}
        body = json.dumps({"message": message, "subscription": NAME}).encode()
    headers = {"Authorization": ""} if token is None else {"Authorization": f"Bearer {token}"}
    return client.post("/push/gcp-pubsub", content=body, headers=headers)


def test_a_push_is_stored_before_it_is_acknowledged(on_google, google, client, context, clock):
    for wrapped in (True, False):
        assert (
            pushed(client, google, push_token(clock()), entry(A, clock(), number="e"), wrapped=wrapped).status_code
            == 204
        )
    assert counts(context) == {"acts": 1, "repeated": 1} and client.get("/api/v1/nodes/a").json()["leaving"]
    assert google.times("/certs") == 1


@pytest.mark.parametrize("claims, status, field", [
    ({"aud": "https://other"}, 403, "aud"),
    ({"email": "other@example.com"}, 403, "email"),
    ({"email_verified": False}, 403, "email"),
    ({"iss": "https://example.com"}, 401, "iss"),
    ({"exp": 1}, 401, "exp"),
    ({"exp": None}, 401, "exp"),
    ({"exp": 10**400}, 401, "exp"),
    ({"iat": 4_000_000_000, "exp": 4_000_003_600}, 401, "clocks"),
    ({"exp": 4_000_000_000}, 401, "exp"),
])  # fmt: skip
def test_a_push_of_somebody_else_is_refused_with_a_reason(google, client, context, clock, claims, status, field):
    answer = pushed(client, google, push_token(clock(), **claims), entry(A, clock()))
    assert answer.status_code == status and field in answer.json()["detail"]
    assert not counts(context) and not google.times("/certs")


def test_a_push_without_a_good_signature_is_refused_and_google_is_asked_seldom(google, client, context, clock):
    other = rsa.generate_private_key(public_exponent=65537, key_size=2048)
    tokens = [
        None,
        "a.b",
        "a.b.c",
        push_token(clock(), by=other),
        *[push_token(clock(), key_id=f"k{n}") for n in range(9)],
    ]
    tokens.append(push_token(clock()) + "AA")
    for token in tokens:
        answer = pushed(client, google, token, entry(A, clock()))
        assert answer.status_code == 401 and answer.json()["detail"], token
    assert google.times("/certs") <= 1 and not counts(context)


def test_without_googles_keys_a_push_is_asked_for_again(google, client, context, clock):
    google.refuse["/certs"] = (500, "INTERNAL")
    assert pushed(client, google, push_token(clock()), entry(A, clock())).status_code == 503
    assert not counts(context)


@pytest.mark.parametrize("body", [b"", b"[]", b"nonsense", b'{"message": 3}', b'{"message": {"data": "%"}}', b"\xff",
                                  b'{"message": {"messageId": "\\ud800"}}', b'{"insertId": "\\ud800"}'])  # fmt: skip
def test_a_push_that_nobody_can_read_is_counted_and_acknowledged(google, client, context, clock, body):
    assert pushed(client, google, push_token(clock()), body, wrapped=False).status_code == 204
    assert counts(context) == {"malformed": 1}


def test_a_push_while_the_database_is_away_is_refused_so_that_google_sends_it_again(
    on_google, google, client, context, clock, database_url
):
    message = entry(A, clock(), number="e")
    assert pushed(client, google, push_token(clock()), entry(STRANGER, clock())).status_code == 204
    with cut_off(database_url):
        answer = pushed(client, google, push_token(clock()), message)
        # Of all answers but 102 and 2xx Pub/Sub takes that the message was not handled.
        assert answer.status_code == 503, answer.text
    until(lambda: pushed(client, google, push_token(clock()), message).status_code == 204)
    assert counts(context) == {"foreign": 1, "acts": 1} and client.get("/api/v1/nodes/a").json()["leaving"]


@contextmanager
def cut_off(url: URL) -> Iterator[None]:
    """The test's own database takes no connection, and has none."""
    name = url.database
    admin = create_engine(url.set(database="postgres"), isolation_level="AUTOCOMMIT")
    with admin.connect() as connection:
        connection.execute(text(f"ALTER DATABASE {name} ALLOW_CONNECTIONS false"))
        ended = text("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = :name")
        connection.execute(ended, {"name": name}).all()
        try:
            yield
        finally:
            connection.execute(text(f"ALTER DATABASE {name} ALLOW_CONNECTIONS true"))
    admin.dispose()


def test_pushes_are_refused_where_they_are_not_configured(client):
    answer = client.post("/push/gcp-pubsub", content=b"{}")
    assert answer.status_code == 404 and "LIVER_SERVICE_GCP_PUSH_AUDIENCE" in answer.json()["detail"]


def test_operations_are_read_once_also_by_two_replicas_and_over_a_restart(on_google, google, context, client, clock):
    clock.advance(300)
    google.operations = [operation(A, clock() - timedelta(seconds=5)), operation(STRANGER, clock())]
    assert OperationWorker(context).look() and not OperationWorker(context).look()
    assert counts(context) == {"acts": 1, "foreign": 1} and client.get("/api/v1/nodes/a").json()["leaving"]
    clock.advance(10)
    # One that shows up late lies before the newest that was read.
    google.operations.append(operation(B, clock() - timedelta(seconds=60)))
    assert OperationWorker(context).look()
    assert counts(context) == {"acts": 2, "foreign": 1}
    with context.sessions() as session:
        row = session.get_one(OperationCursorRow, PROJECT)
        assert row.inserted_until == clock() - timedelta(seconds=10) and len(row.recent) == 3
        assert session.get_one(ChannelRow, "gcp-operations").ok_at == clock()


def test_the_log_and_the_list_tell_of_one_end_once(on_google, google, context, client, clock):
    client_of = SubscriptionWorker(context)
    google.publish(json.dumps(entry(A, clock())))
    client_of._read_once()
    google.operations = [operation(A, clock())]
    OperationWorker(context).look()
    assert counts(context) == {"acts": 1, "noted": 1}


def test_what_is_read_and_not_stored_is_read_again(on_google, google, context, clock, monkeypatch):
    google.operations = [operation(A, clock())]
    monkeypatch.setattr(operation_list, "store", lambda *arguments, **more: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        OperationWorker(context).look()
    monkeypatch.undo()
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(google.credentials(context.settings.resolved_data_dir())))
    assert OperationWorker(context).look() and counts(context) == {"acts": 1}


def test_zones_that_do_not_answer_hold_the_cursor_but_not_the_others(on_google, google, context, clock):
    clock.advance(300)
    google.unreachables, google.operations = ["zones/us-west1-b"], [operation(A, clock())]
    with pytest.raises(ListIncomplete, match="us-west1-b"):
        OperationWorker(context).look()
    assert counts(context) == {"acts": 1}
    google.unreachables = []
    clock.advance(10)
    google.operations.append(operation(B, clock() - timedelta(minutes=2)))
    assert OperationWorker(context).look() and counts(context) == {"acts": 2}


@pytest.mark.parametrize("ahead_s", [-600, 600])
def test_a_cloud_whose_clock_differs_is_heard_as_far_as_that_can_be(on_google, google, context, clock, ahead_s):
    google.operations = [operation(A, clock() + timedelta(seconds=ahead_s))]
    OperationWorker(context).look()
    clock.advance(10)
    google.operations.append(operation(B, clock() + timedelta(seconds=ahead_s)))
    OperationWorker(context).look()
    # One that is behind seems to tell of what is over: the check of the clouds names the clock.
    assert counts(context) == ({"acts": 2} if ahead_s > 0 else {"late": 2})


def test_more_operations_than_are_read_at_once_are_stored_and_asked_for_again(
    on_google, google, context, clock, monkeypatch
):
    """What is beyond the limit is not lost: the cursor stays where it was, until a list is whole."""
    monkeypatch.setattr(operation_list, "PAGE", 2)
    monkeypatch.setattr(operation_list, "PAGES_MAX", 2)
    google.operations = [operation(A, clock()), *(operation(STRANGER, clock()) for _ in range(3))]
    google.operations.append(operation(B, clock()))
    worker = OperationWorker(context)
    with pytest.raises(ListIncomplete, match="more than 4 operations"):
        worker.look()
    assert counts(context) == {"acts": 1, "foreign": 3}
    with context.sessions() as session:
        row = session.get_one(OperationCursorRow, PROJECT)
        assert row.inserted_until is None and len(row.recent) == 4
    monkeypatch.setattr(operation_list, "PAGES_MAX", 3)
    clock.advance(10)
    assert worker.look() and counts(context) == {"acts": 2, "foreign": 3}


def test_many_operations_come_in_pages(on_google, google, context, clock, monkeypatch):
    monkeypatch.setattr(operation_list, "PAGE", 3)
    google.operations = [operation(STRANGER, clock()) for _ in range(10)] + [operation(A, clock())]
    OperationWorker(context).look()
    assert counts(context) == {"acts": 1, "foreign": 10}
