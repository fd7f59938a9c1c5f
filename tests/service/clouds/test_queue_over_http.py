"""The queue of an AWS account, over HTTP from an emulator: nothing lost, nothing acted on twice, whatever fails."""

import json
import re
from datetime import timedelta

import pytest
from botocore.exceptions import EndpointConnectionError
from botocore.stub import Stubber
from sqlalchemy import select
from sqlalchemy.exc import OperationalError

from service.clouds.aws import hooks, queue_worker
from service.clouds.aws.queue_worker import QueueWorker, make_clients
from service.clouds.tables import ChannelRow, HearingCountRow, HearingRow, HookRow
from service.nodes.operations import mark_gone
from service.nodes.tables import NodeRow
from tests.service.clouds.moto_server import CREDENTIALS, REGION, Account, moto_server
from tests.service.waiting import until

pytest.importorskip("moto")


@pytest.fixture(scope="module")
def emulator(tmp_path_factory: pytest.TempPathFactory):
    with moto_server(tmp_path_factory.mktemp("moto")) as url:
        yield url


@pytest.fixture
def account(emulator, settings, monkeypatch, context) -> Account:
    for name, value in CREDENTIALS.items():
        monkeypatch.setenv(name, value)
    for name, value in {
        "aws_endpoint_url": emulator,
        "aws_region": REGION,
        "aws_wait_s": 1,
        "aws_visibility_s": 5,
    }.items():
        object.__setattr__(context.settings, name, value)
    account = Account(emulator, make_clients(context.settings))
    account.make(receives=3)
    object.__setattr__(context.settings, "aws_queue_url", account.queue_url)
    return account


@pytest.fixture
def worker(account, context):
    found = QueueWorker(context)
    found.start()
    yield found
    found.stop()


def counts(context) -> dict[str, int]:
    with context.sessions() as session:
        return {row.disposition: row.heard for row in session.scalars(select(HearingCountRow))}


def test_a_warning_by_eventbridge_is_in_the_orders_and_gone_from_the_queue(on_machines, account, worker, clock):
    _, _, b = on_machines
    account.warn("i-a", at=clock())
    until(lambda: b.sync().jobs[0].notices, "the notice has not come")
    (fact,) = b.orders.jobs[0].notices
    assert (fact.node_id, fact.source) == ("a", "aws-queue")
    assert fact.deadline_utc == clock() + timedelta(seconds=120)
    until(lambda: account.left() == 0)
    assert account.left(account.dlq_url) == 0


@pytest.mark.thorough
def test_foreign_repeated_late_and_unreadable_messages_are_let_go(on_machines, account, worker, context, clock):
    account.warn("i-a", at=clock())
    until(lambda: counts(context).get("acts") == 1)
    account.warn("i-a", at=clock())
    account.warn("i-b", at=clock() - timedelta(hours=1))
    account.warn("i-stranger", at=clock())
    account.put("this is no event")
    account.put('{"id": "\\ud800"}')
    until(lambda: sum(counts(context).values()) == 6 and account.left() == 0, str(counts(context)))
    assert counts(context) == {"acts": 1, "repeated": 1, "late": 1, "foreign": 1, "malformed": 2}
    with context.sessions() as session:
        rows = session.scalars(select(HearingRow)).all()
    unread = {row.raw for row in rows if row.disposition == "malformed" and row.node_id is None}
    assert unread == {"this is no event", '{"id": "\\ud800"}'}
    assert "foreign" not in {row.disposition for row in rows}
    assert account.left(account.dlq_url) == 0


@pytest.mark.thorough
def test_what_comes_through_sns_is_heard(on_machines, account, worker, client, clock):
    event = {
        "detail-type": "EC2 Spot Instance Interruption Warning",
        "source": "aws.ec2",
        "time": clock().isoformat(),
        "detail": {"instance-id": "i-b", "instance-action": "terminate"},
    }
    account.put(json.dumps({"Type": "Notification", "MessageId": "x", "Message": json.dumps(event)}))
    until(lambda: client.get("/api/v1/nodes/b").json()["leaving"])


def test_a_message_is_deleted_only_after_the_commit_and_comes_again_until_it_is_stored(
    on_machines, account, context, client, clock, monkeypatch
):
    failures = iter([RuntimeError("not today")] * 2)
    take = queue_worker.take_facts

    def fails_twice(*arguments, **more):
        for error in failures:
            raise error
        return take(*arguments, **more)

    monkeypatch.setattr(queue_worker, "take_facts", fails_twice)
    object.__setattr__(context.settings, "aws_visibility_s", 1)
    worker = QueueWorker(context)
    account.warn("i-a", at=clock())
    worker._read_once()
    assert account.left() == 1 and not client.get("/api/v1/nodes/a").json()["leaving"]
    assert worker.trouble == "RuntimeError: not today"
    until(lambda: (worker._read_once(), account.left() == 0)[1])
    assert client.get("/api/v1/nodes/a").json()["leaving"]
    assert counts(context)["acts"] == 1


@pytest.mark.thorough
def test_a_message_that_can_never_be_stored_goes_to_the_dead_letter_queue_and_the_others_do_not(
    on_machines, account, context, clock, monkeypatch
):
    take = queue_worker.take_facts

    def refuses_one(session, facts, **more):
        assert all(fact.provider_id != "i-poison" for fact in facts)
        return take(session, facts, **more)

    monkeypatch.setattr(queue_worker, "take_facts", refuses_one)
    monkeypatch.setattr("service.clouds.aws.events._INSTANCE", re.compile("^i-"))
    object.__setattr__(context.settings, "aws_visibility_s", 1)
    worker = QueueWorker(context)
    account.warn("i-poison", at=clock())
    account.warn("i-a", at=clock())
    until(lambda: (worker._read_once(), account.left(account.dlq_url) == 1)[1], "nothing came to the dead-letter queue")
    assert account.left() == 0 and counts(context)["acts"] == 1


@pytest.mark.thorough
def test_while_the_database_is_away_messages_are_kept_from_others_and_then_stored(
    on_machines, account, context, client, clock, monkeypatch
):
    """Away for longer than messages stay invisible, and longer than the dead-letter queue would wait."""
    object.__setattr__(context.settings, "aws_visibility_s", 2)
    away = iter(range(20))
    take = queue_worker.take_facts

    def outage(*arguments, **more):
        for _ in away:
            raise OperationalError("SELECT 1", {}, Lost())
        return take(*arguments, **more)

    monkeypatch.setattr(queue_worker, "take_facts", outage)
    account.warn("i-a", at=clock())
    worker = QueueWorker(context)
    worker.start()
    try:
        until(lambda: client.get("/api/v1/nodes/a").json()["leaving"])
        until(lambda: account.left() == 0)
    finally:
        worker.stop()
    assert account.left(account.dlq_url) == 0 and counts(context) == {"acts": 1}


class Lost(Exception):
    """As psycopg says that the connection is lost."""

    sqlstate = None


@pytest.mark.thorough
def test_two_replicas_read_one_queue_and_each_machine_is_announced_once(on_machines, account, worker, context, clock):
    second = QueueWorker(context)
    second.start()
    try:
        for _ in range(10):
            account.warn("i-a", at=clock())
            account.warn("i-b", at=clock())
        until(lambda: sum(counts(context).values()) == 20 and account.left() == 0)
    finally:
        second.stop()
    assert counts(context) == {"acts": 2, "repeated": 18}


def test_a_cloud_that_cannot_be_reached_is_said_and_the_service_goes_on(on_machines, context, client, monkeypatch):
    for name, value in CREDENTIALS.items():
        monkeypatch.setenv(name, value)
    for name, value in {
        "aws_endpoint_url": "http://127.0.0.1:1", "aws_region": REGION, "aws_queue_url": "http://127.0.0.1:1/1/q",
    }.items():  # fmt: skip
        object.__setattr__(context.settings, name, value)
    worker = QueueWorker(context)
    worker.start()
    try:
        until(lambda: worker.trouble)
    finally:
        worker.stop()
    assert EndpointConnectionError.__name__ in worker.trouble
    with context.sessions() as session:
        row = session.get_one(ChannelRow, "aws-queue")
        assert row.trouble == worker.trouble and row.ok_at is None and row.trouble_since is not None
    assert client.get("/api/v1/jobs").status_code == 200


def test_where_no_queue_is_configured_one_line_says_how_to_read_one(context, caplog):
    with caplog.at_level("INFO"):
        QueueWorker(context).start()
    (line,) = [record.message for record in caplog.records if "queue" in record.message]
    assert "LIVER_SERVICE_AWS_QUEUE_URL" in line


@pytest.mark.thorough
def test_the_machines_of_a_capacity_block_that_ends_are_told_by_ec2(
    on_machines, account, worker, context, client, clock, monkeypatch
):
    """The emulator has no capacity blocks: EC2's answer is checked against botocore's own model."""
    worker.stop()
    clients = make_clients(context.settings)
    kinds = {"i-a": "p5.48xlarge", "i-b": "p6e-gb200.36xlarge", "i-c": "p5.48xlarge"}
    machines = [{"InstanceId": name, "InstanceType": kind} for name, kind in kinds.items()]
    answer = {"Reservations": [{"Instances": machines}]}
    block = "cr-0123456789abcdef0"
    asked = {"Filters": [{"Name": "capacity-reservation-id", "Values": [block]}], "MaxResults": 100}
    detail = {"capacity-reservation-id": block, "end-date": (clock() + timedelta(minutes=70)).isoformat()}
    account.emit("Capacity Block Reservation Expiration Warning", detail, at=clock())
    reader = QueueWorker(context, clients=lambda settings: clients)
    with Stubber(clients.ec2) as stub:
        stub.add_response("describe_instances", answer, asked)
        until(lambda: (reader._read_once(), account.left() == 0)[1])
    assert counts(context) == {"acts": 1, "advice": 1, "foreign": 1}, "of the UltraServer it is near"
    deadline = client.get("/api/v1/nodes/b").json()["deadline_at"]
    assert deadline == (clock() + timedelta(minutes=10)).isoformat().replace("+00:00", "Z")
    assert not client.get("/api/v1/nodes/a").json()["leaving"]


@pytest.mark.thorough
def test_a_group_waits_while_a_job_leaves_the_machine_and_goes_on_when_it_has(
    on_machines, account, context, client, clock
):
    """The emulator cannot complete a hook: Auto Scaling's answers are checked against botocore's own model."""
    token = "87654321-4321-4321-4321-210987654321"
    detail = {
        "LifecycleActionToken": token, "AutoScalingGroupName": "asg", "LifecycleHookName": "hook",
        "EC2InstanceId": "i-a", "LifecycleTransition": "autoscaling:EC2_INSTANCE_TERMINATING",
    }  # fmt: skip
    call = {
        "AutoScalingGroupName": "asg", "LifecycleHookName": "hook", "LifecycleActionToken": token, "InstanceId": "i-a",
    }  # fmt: skip
    account.emit("EC2 Instance-terminate Lifecycle Action", detail, source="aws.autoscaling", at=clock())
    reader = QueueWorker(context)
    until(lambda: (reader._read_once(), account.left() == 0)[1])
    assert client.get("/api/v1/nodes/a").json()["leaving"]
    autoscaling = make_clients(context.settings).autoscaling
    with Stubber(autoscaling) as stub:
        for _ in range(2):
            stub.add_response("record_lifecycle_action_heartbeat", {}, call)
            assert hooks.tick(context, autoscaling) == 1
            clock.advance(16)
        with context.sessions.begin() as session:
            mark_gone(session, session.get_one(NodeRow, "a"), reason="test", now=clock())
        stub.add_response("complete_lifecycle_action", {}, call | {"LifecycleActionResult": "CONTINUE"})
        assert hooks.tick(context, autoscaling) == 1
        stub.assert_no_pending_responses()
    clock.advance(60)
    assert hooks.tick(context, autoscaling) == 0
    with context.sessions() as session:
        (row,) = session.scalars(select(HookRow))
        assert (row.heartbeats, row.due_at, row.reason) == (2, None, "the node is gone")
