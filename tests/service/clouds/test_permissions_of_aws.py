"""What `liver cloud check` says of an account whose policies allow less than those of deploy/. The emulator enforces
policies here."""

import json
import re
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any
from uuid import uuid4

import pytest
from botocore.stub import Stubber

from agent.protocol.sync import Provider
from service.clouds.aws.account_look import WANTED, of_key, of_queue_policy, takes
from service.clouds.aws.permission_look import NO_HANDLE, look_at_permissions
from service.clouds.aws.queue_worker import make_clients
from service.clouds.hearing import look_at_all
from service.clouds.lacks import OwnView, Weight
from tests.service.clouds.moto_server import CREDENTIALS, REGION, TERRAFORM, Account, moto_server
from tests.tiers import sample

pytest.importorskip("moto")
ARN = "arn:aws:events:us-east-1:123456789012:rule/liver-spot-interruption"
RECEIVE = "sqs:ReceiveMessage"


def granted() -> list[str]:
    """Every action that the policies in deploy/ allow the service."""
    found: list[str] = []
    for name in ("service-policy.json", "lifecycle-policy.json"):
        text = re.sub(r'"?\$\{\w+\}"?', '"*"', (TERRAFORM / name).read_text())
        for statement in json.loads(text)["Statement"]:
            actions = statement["Action"]
            found += [actions] if isinstance(actions, str) else actions
    return found


@dataclass
class Guarded:
    """An account with a user of its own, who may do what `allow` says and nothing else."""

    url: str
    account: Account
    iam: Any
    machine: str
    user: str = field(default_factory=lambda: f"liver-{uuid4().hex[:8]}")

    def allow(self, actions: list[str]) -> dict[str, str]:
        """The user's credentials. The emulator does not know which resource a call is about, so all are allowed."""
        self.enforce(False)
        statement = {"Effect": "Allow", "Action": [*actions, "sts:GetCallerIdentity"], "Resource": "*"}
        document = json.dumps({"Version": "2012-10-17", "Statement": [statement]})
        self.iam.create_user(UserName=self.user)
        self.iam.put_user_policy(UserName=self.user, PolicyName="service", PolicyDocument=document)
        key = self.iam.create_access_key(UserName=self.user)["AccessKey"]
        self.enforce(True)
        return {"AWS_ACCESS_KEY_ID": key["AccessKeyId"], "AWS_SECRET_ACCESS_KEY": key["SecretAccessKey"]}

    def enforce(self, is_on: bool) -> None:
        after = b"0" if is_on else b"inf"
        headers = {"Content-Type": "text/plain"}
        request = urllib.request.Request(f"{self.url}/moto-api/reset-auth", after, headers, method="POST")
        with urllib.request.urlopen(request, timeout=10) as answer:
            assert answer.status == 200


@pytest.fixture(scope="module")
def emulator(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with moto_server(tmp_path_factory.mktemp("moto")) as url:
        yield url


@pytest.fixture
def guarded(emulator, settings, monkeypatch) -> Iterator[Guarded]:
    from boto3.session import Session

    for name, value in CREDENTIALS.items():
        monkeypatch.setenv(name, value)
    settings.aws_endpoint_url, settings.aws_region = emulator, REGION
    account = Account(emulator, make_clients(settings))
    account.make()
    settings.aws_queue_url = account.queue_url
    own = Guarded(emulator, account, Session(region_name=REGION).client("iam", endpoint_url=emulator), machine="")
    own.machine = a_machine_of_a_group(account)
    yield own
    own.enforce(False)


def a_machine_of_a_group(account: Account) -> str:
    """The group has a hook that waits with the end of its machines."""
    group, groups = account.name, account.clients.autoscaling
    groups.create_launch_configuration(LaunchConfigurationName=group, ImageId="ami-12c6146b", InstanceType="t2.micro")
    size = {"MinSize": 1, "MaxSize": 1, "AvailabilityZones": [f"{REGION}a"]}
    groups.create_auto_scaling_group(AutoScalingGroupName=group, LaunchConfigurationName=group, **size)
    ends = "autoscaling:EC2_INSTANCE_TERMINATING"
    groups.put_lifecycle_hook(AutoScalingGroupName=group, LifecycleHookName="liver", LifecycleTransition=ends)
    machines = groups.describe_auto_scaling_instances()["AutoScalingInstances"]
    return next(item["InstanceId"] for item in machines if item["AutoScalingGroupName"] == group)


def permissions_named(settings, machine: str) -> list[str]:
    own = OwnView(machines={Provider.AWS: (machine,)})
    found = look_at_all(settings, datetime.now(UTC), own)[0].findings
    return [item.what.split()[1] for item in found if item.what.startswith("permission: ")]


def use(monkeypatch, credentials: dict[str, str]) -> None:
    for name, value in credentials.items():
        monkeypatch.setenv(name, value)


def test_with_the_policies_of_deploy_no_permission_is_missing(guarded, settings, monkeypatch):
    use(monkeypatch, guarded.allow(granted()))
    assert permissions_named(settings, guarded.machine) == []


TAKEN = [action for action in granted() if action != RECEIVE]


@pytest.mark.parametrize("taken", sample(TAKEN, *TAKEN[::4]))
def test_each_permission_of_deploy_is_named_where_it_is_missing(guarded, settings, monkeypatch, taken):
    use(monkeypatch, guarded.allow([action for action in granted() if action != taken]))
    assert permissions_named(settings, guarded.machine) == [taken]


@pytest.mark.thorough
def test_that_messages_may_not_be_received_the_reader_says(guarded, settings, client, context):
    from service.clouds.operations import note_channel

    trouble = "ClientError: An error occurred (AccessDenied) when calling the ReceiveMessage operation"
    with context.sessions.begin() as session:
        note_channel(session, "aws-queue", Provider.AWS, trouble=trouble, now=context.clock())
    object.__setattr__(context.settings, "aws_queue_url", settings.aws_queue_url)
    object.__setattr__(context.settings, "aws_endpoint_url", settings.aws_endpoint_url)
    object.__setattr__(context.settings, "aws_region", settings.aws_region)
    token = (settings.resolved_data_dir() / "tokens" / "admin.token").read_text().strip()
    answer = client.get("/api/v1/channels/check", headers={"Authorization": f"Bearer {token}"})
    first = answer.json()[0]["findings"][0]
    assert (first["weight"], first["what"]) == ("missing", f"reader: {trouble}")


@pytest.mark.thorough
def test_looking_receives_deletes_and_hides_nothing(guarded, settings):
    guarded.account.put("a message of somebody")
    look_at_all(settings, datetime.now(UTC), OwnView(machines={Provider.AWS: (guarded.machine,)}))
    sqs, url = guarded.account.clients.sqs, guarded.account.queue_url
    names = ["ApproximateReceiveCount"]
    (message,) = sqs.receive_message(QueueUrl=url, AttributeNames=names, MaxNumberOfMessages=10)["Messages"]
    assert message["Attributes"] == {"ApproximateReceiveCount": "1"} and message["ReceiptHandle"] != NO_HANDLE


def stubbed(settings, hooks: list[dict[str, str]], errors: dict[str, str]) -> tuple[dict[str, Any], Stubber]:
    """Auto Scaling's answers, checked against botocore's own model: what the emulator cannot do."""
    made = make_clients(settings)
    groups, stub = made.autoscaling, Stubber(made.autoscaling)
    item = {"InstanceId": "i-a", "AutoScalingGroupName": "p5", "AvailabilityZone": "us-east-1a",
            "HealthStatus": "HEALTHY", "LifecycleState": "InService", "ProtectedFromScaleIn": False}  # fmt: skip
    stub.add_response("describe_auto_scaling_instances", {"AutoScalingInstances": [item]}, {"InstanceIds": ["i-a"]})
    stub.add_response("describe_lifecycle_hooks", {"LifecycleHooks": hooks}, {"AutoScalingGroupName": "p5"})
    for call, code in errors.items():
        stub.add_client_error(call, code)
    calm: Callable[..., None] = lambda **arguments: None  # noqa: E731
    quiet = type("Quiet", (), {"__getattr__": lambda self, name: calm})()
    return {"sqs": quiet, "ec2": quiet, "autoscaling": groups}, stub


@pytest.mark.thorough
def test_a_group_that_ends_machines_without_waiting_is_advice(guarded, settings):
    launches = {"LifecycleHookName": "start", "LifecycleTransition": "autoscaling:EC2_INSTANCE_LAUNCHING"}
    aws, stub = stubbed(settings, [launches], {})
    with stub:
        (found,) = look_at_permissions(aws, "q", ("i-a",))
    assert found.weight is Weight.ADVICE and found.what.startswith("hook: group p5 has none for ")


@pytest.mark.thorough
def test_a_hook_that_says_there_is_no_such_action_may_be_told(guarded, settings):
    ends = {"LifecycleHookName": "end", "LifecycleTransition": "autoscaling:EC2_INSTANCE_TERMINATING"}
    codes = {"record_lifecycle_action_heartbeat": "ValidationError", "complete_lifecycle_action": "ValidationError"}
    aws, stub = stubbed(settings, [ends], codes)
    with stub:
        assert look_at_permissions(aws, "q", ("i-a",)) == []
        stub.assert_no_pending_responses()


def statement(**more: Any) -> dict[str, Any]:
    usual = {"Effect": "Allow", "Principal": {"Service": "events.amazonaws.com"}, "Action": "sqs:SendMessage",
             "Condition": {"ArnEquals": {"aws:SourceArn": [ARN]}}}  # fmt: skip
    return usual | more


@pytest.mark.parametrize("found, may_send", [
    ([statement()], True),
    (statement(), True),
    ([statement(Condition={})], True),
    ([statement(Principal="*", Action=["sqs:*"])], True),
    ([statement(Condition={"ArnLike": {"aws:SourceArn": "arn:aws:events:*:*:rule/liver-*"}})], True),
    ([], False),
    ([statement(Effect="Deny")], False),
    ([statement(Principal={"AWS": "arn:aws:iam::1:root"})], False),
    ([statement(Action="sqs:ReceiveMessage")], False),
    ([statement(Condition={"ArnEquals": {"aws:SourceArn": f"{ARN}-other"}})], False),
])  # fmt: skip
def test_a_queue_that_does_not_let_a_rule_send_is_named(found, may_send):
    lacks = of_queue_policy(json.dumps({"Statement": found}), {"spot": ARN})
    assert [item.what for item in lacks] == (
        [] if may_send else ["queue policy: events.amazonaws.com may not send for rule spot"]
    )


def test_a_queue_whose_policy_cannot_be_read_lets_nobody_send():
    assert len(of_queue_policy("", {"spot": ARN})) == len(of_queue_policy("no json", {"spot": ARN})) == 1


def test_a_queue_with_the_key_that_aws_manages_hears_nothing_and_with_another_key_it_is_said():
    assert of_key("q", {}) == []
    (managed,), (own,) = (of_key("q", {"KmsMasterKeyId": key}) for key in ("alias/aws/sqs", "alias/own"))
    assert (managed.weight, own.weight) == (Weight.MISSING, Weight.ADVICE)


def test_there_is_a_rule_in_deploy_for_each_event_that_the_check_wants():
    patterns = [path.read_text() for path in TERRAFORM.glob("pattern-*.json")]
    assert all(any(takes(pattern, source, kind) for pattern in patterns) for source, kind in WANTED)
    kinds = {kind for pattern in patterns for kind in json.loads(pattern)["detail-type"]}
    assert kinds == {kind for _, kind in WANTED}
