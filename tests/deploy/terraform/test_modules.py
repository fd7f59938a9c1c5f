"""The Terraform modules. Read with an HCL parser everywhere; where terraform and the AWS provider are on the machine,
the AWS one is also applied, to moto. No provider for Google can be had here: that module is parsed, and not validated.
"""

import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import boto3
import hcl2
import pytest
from moto.events.models import EventPattern
from moto.server import ThreadedMotoServer

from tests.deploy.terraform.aws_events import UNWANTED, WANTED

ROOT = Path(__file__).resolve().parents[3]
AWS, GCP = ROOT / "deploy" / "terraform" / "aws", ROOT / "deploy" / "terraform" / "gcp"
PATTERNS = {path.stem.removeprefix("pattern-"): path.read_text() for path in sorted(AWS.glob("pattern-*.json"))}
PROVIDER_FOLDERS = ("/usr/local/share/terraform/plugins", "/usr/share/terraform/plugins", "/opt")
KNOW_NO_NARROWER = {
    "ec2:DescribeInstances", "events:ListRuleNamesByTarget",
    "autoscaling:DescribeAutoScalingInstances", "autoscaling:DescribeLifecycleHooks",
}  # fmt: skip
"""These actions know no narrower resource than everything (Service Authorization Reference)."""
BOTO3_CALLS = {
    "receive_message": "sqs:ReceiveMessage",
    "delete_message": "sqs:DeleteMessage",
    "delete_message_batch": "sqs:DeleteMessage",
    "change_message_visibility": "sqs:ChangeMessageVisibility",
    "change_message_visibility_batch": "sqs:ChangeMessageVisibility",
    "get_queue_attributes": "sqs:GetQueueAttributes",
    "describe_instances": "ec2:DescribeInstances",
    "record_lifecycle_action_heartbeat": "autoscaling:RecordLifecycleActionHeartbeat",
    "complete_lifecycle_action": "autoscaling:CompleteLifecycleAction",
    "describe_instance_status": "ec2:DescribeInstanceStatus",
    "describe_auto_scaling_instances": "autoscaling:DescribeAutoScalingInstances",
    "describe_lifecycle_hooks": "autoscaling:DescribeLifecycleHooks",
    "list_rules": "events:ListRules",
    "list_rule_names_by_target": "events:ListRuleNamesByTarget",
    "describe_rule": "events:DescribeRule",
    "list_targets_by_rule": "events:ListTargetsByRule",
    "send_message": "sqs:SendMessage",
}


def blocks(module: Path, kind: str) -> dict[tuple[str, str], dict[str, Any]]:
    """The blocks of a kind, by type and name, as the parser reads them."""
    with (module / "main.tf").open() as file:
        parsed = hcl2.load(file)
    return {
        (one.strip('"'), name.strip('"')): body
        for block in parsed[kind]
        for one, named in block.items()
        for name, body in named.items()
    }


def takes(rule: str, event: dict[str, Any]) -> bool:
    return EventPattern.load(PATTERNS[rule]).matches_event(event)  # pyright: ignore[reportArgumentType]


def test_every_event_is_taken_by_its_rule_and_by_no_other() -> None:
    assert set(PATTERNS) == set(WANTED)
    for name, events in WANTED.items():
        for event in events:
            assert [rule for rule in PATTERNS if takes(rule, event)] == [name], event["detail-type"]


def test_what_nobody_acts_on_does_not_reach_the_queue() -> None:
    assert not [(rule, event) for rule in PATTERNS for event in UNWANTED if takes(rule, event)]


def test_the_module_has_a_rule_for_each_pattern_and_drops_what_is_older_than_a_minute() -> None:
    text = (AWS / "main.tf").read_text()
    (listed,) = re.findall(r"rules = toset\(\[(.*?)\]\)", text, re.DOTALL)
    assert set(re.findall(r'"([\w-]+)"', listed)) == set(PATTERNS)
    assert re.search(r"^\s*event_age_s = 60$", text, re.MULTILINE)
    target = blocks(AWS, "resource")["aws_cloudwatch_event_target", "notices"]
    (retry,) = target["retry_policy"]
    assert "local.event_age_s" in str(retry["maximum_event_age_in_seconds"])
    assert target["dead_letter_config"]


def policy(name: str) -> list[dict[str, Any]]:
    text = (AWS / name).read_text()
    return json.loads(re.sub(r"(?<=: )\$\{\w+_arns\}", "[]", text))["Statement"]


def allowed() -> set[str]:
    """The actions that the policies of the service allow."""
    statements = [*policy("service-policy.json"), *policy("lifecycle-policy.json")]
    actions = [one["Action"] for one in statements if one["Effect"] == "Allow"]
    return {name for some in actions for name in ([some] if isinstance(some, str) else some)}


def test_no_action_of_the_service_is_a_wildcard_and_only_describing_is_for_everything() -> None:
    assert not {action for action in allowed() if "*" in action}
    for statement in [*policy("service-policy.json"), *policy("lifecycle-policy.json")]:
        actions = {statement["Action"]} if isinstance(statement["Action"], str) else set(statement["Action"])
        assert statement["Resource"] != "*" or actions <= KNOW_NO_NARROWER


def test_the_service_is_allowed_exactly_what_its_code_calls() -> None:
    code = sorted((ROOT / "service" / "clouds").rglob("*.py"))
    text = "\n".join(path.read_text() for path in code)
    if "boto3" not in text:
        pytest.skip("service/clouds calls nothing of AWS yet: there is no call to compare the policy with")
    called = {action for call, action in BOTO3_CALLS.items() if re.search(rf"\.{call}\(|[\"']{call}[\"']", text)}
    assert called == allowed()


def test_only_the_rules_may_send_and_nobody_without_tls() -> None:
    allow, deny = policy("queue-policy.json")
    assert (allow["Principal"], allow["Action"]) == ({"Service": "events.amazonaws.com"}, "sqs:SendMessage")
    assert "aws:SourceArn" in allow["Condition"]["ArnEquals"]
    assert (deny["Effect"], deny["Condition"]) == ("Deny", {"Bool": {"aws:SecureTransport": "false"}})


def test_nodes_are_reached_by_nodes_alone() -> None:
    ingress = {name: body for (kind, name), body in blocks(AWS, "resource").items() if kind.endswith("_ingress_rule")}
    assert set(ingress) == {"nodes"} and "cidr_ipv4" not in ingress["nodes"]
    assert ingress["nodes"]["referenced_security_group_id"] == ingress["nodes"]["security_group_id"]
    firewall = blocks(GCP, "resource")["google_compute_firewall", "nodes"]
    assert firewall["source_service_accounts"] == firewall["target_service_accounts"]
    assert "source_ranges" not in firewall


def test_the_google_module_is_parsed_only_and_has_sink_topic_subscription_and_accounts() -> None:
    found = blocks(GCP, "resource")
    kinds = {kind for kind, _ in found}
    assert {"google_logging_project_sink", "google_pubsub_topic", "google_pubsub_subscription"} <= kinds
    assert {name for kind, name in found if kind == "google_service_account"} == {"service", "node", "push"}
    assert "project_iam_member" not in str(found["google_service_account", "node"])
    roles = {str(body["role"]).strip('"') for kind, body in ((k, b) for (k, _), b in found.items()) if "role" in body
             and kind.endswith("iam_member")}  # fmt: skip
    assert not {role for role in roles if role in ("roles/owner", "roles/editor", "roles/viewer")}
    held = [
        name for (kind, name), body in found.items() if "google_service_account.node" in str(body.get("member", ""))
    ]
    assert not held, "nodes hold no role"


def test_the_sink_takes_what_compute_engine_says_of_the_end_of_a_machine() -> None:
    text = (GCP / "sink-filter.txt").read_text()
    for part in ("cloudaudit.googleapis.com%2Fsystem_event", 'resource.type = "gce_instance"', "methodName"):
        assert part in text
    (methods,) = re.findall(r"methods = \[(.*?)\]", (GCP / "main.tf").read_text())
    assert set(re.findall(r'"(\w+)"', methods)) == {
        "preempted", "hostError", "terminateOnHostMaintenance", "guestTerminate", "baremetalCaretakerPreempted",
    }  # fmt: skip


def test_every_reference_in_both_modules_is_to_a_block_that_is_there() -> None:
    for module in (AWS, GCP):
        text = (module / "main.tf").read_text()
        there = {f"{kind}.{name}" for kind, name in blocks(module, "resource")}
        used = set(re.findall(r"(?<![\w.\"])((?:aws|google)_\w+\.\w+)", text))
        assert used <= there, used - there
        assert set(re.findall(r"var\.(\w+)", text)) <= set(re.findall(r'^variable "(\w+)"', text, re.MULTILINE))


def terraform() -> str:
    found = shutil.which("terraform") or shutil.which("tofu")
    if found is None:
        pytest.skip("neither terraform nor tofu is on this machine; the modules are parsed with python-hcl2 only")
    return found


def test_the_modules_are_formatted_as_terraform_formats_them() -> None:
    done = subprocess.run(
        [terraform(), "fmt", "-check", "-recursive", str(AWS.parent)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout


@pytest.fixture
def moto_url() -> Iterator[str]:
    server = ThreadedMotoServer("127.0.0.1", 0)
    server.start()
    host, port = server.get_host_and_port()
    yield f"http://{host}:{port}"
    server.stop()


def provider_mirror() -> Path:
    """A folder with Terraform's AWS provider, as `terraform providers mirror` writes it."""
    for folder in (Path.home() / ".terraform.d" / "plugins", *map(Path, PROVIDER_FOLDERS)):
        for mirror in (folder, *folder.glob("*")):
            if (mirror / "registry.terraform.io" / "hashicorp" / "aws").is_dir():
                return mirror
    pytest.skip("Terraform's AWS provider is not on this machine, and its registry is not asked")


PROVIDER = """
provider "aws" {{
  region                      = "us-east-1"
  access_key                  = "test"
  secret_key                  = "test"
  skip_credentials_validation = true
  skip_metadata_api_check     = true
  skip_requesting_account_id  = true
  endpoints {{
    sqs    = "{url}"
    events = "{url}"
    iam    = "{url}"
    sts    = "{url}"
  }}
}}
"""


@pytest.mark.thorough
@pytest.mark.real
@pytest.mark.timeout(500)
def test_the_aws_module_is_applied_to_moto_and_a_second_plan_has_nothing_to_do(tmp_path: Path, moto_url: str) -> None:
    program, mirror = terraform(), provider_mirror()
    module = tmp_path / "module"
    shutil.copytree(AWS, module)
    (module / "provider_override.tf").write_text(PROVIDER.format(url=moto_url))
    settings = tmp_path / "terraform.rc"
    settings.write_text(f'provider_installation {{\n  filesystem_mirror {{\n    path = "{mirror}"\n  }}\n}}\n')
    environment = {
        **os.environ,
        "TF_CLI_CONFIG_FILE": str(settings),
        "CHECKPOINT_DISABLE": "1",
        "TF_IN_AUTOMATION": "1",
    }

    def run(*arguments: str) -> tuple[int, str]:
        done = subprocess.run(
            [program, *arguments], cwd=module, env=environment, capture_output=True, text=True, timeout=240, check=False
        )
        assert done.returncode in (0, 2), done.stderr[-3_000:]
        return done.returncode, done.stdout

    group = "arn:aws:autoscaling:us-east-1:123456789012:autoScalingGroup:*:autoScalingGroupName/p5"
    groups = f'auto_scaling_group_arns=["{group}"]'
    run("init", "-input=false", "-no-color")
    run("validate", "-no-color")
    run("apply", "-auto-approve", "-input=false", "-no-color", "-var", groups)
    left, plan = run("plan", "-detailed-exitcode", "-input=false", "-no-color", "-var", groups)
    # moto gives this one document back with other white space than it got; AWS does not.
    is_white_space = re.search(r"redrive_policy += jsonencode\( # whitespace changes", plan)
    assert left == 0 or (is_white_space and "0 to add, 1 to change, 0 to destroy" in plan), plan
    client = boto3.client(
        "events", endpoint_url=moto_url, region_name="us-east-1", aws_access_key_id="x", aws_secret_access_key="x"
    )
    rules = {rule["Name"].removeprefix("liver-") for rule in client.list_rules()["Rules"]}
    assert rules == set(PATTERNS)
    for rule in rules:
        (target,) = client.list_targets_by_rule(Rule=f"liver-{rule}")["Targets"]
        assert target["RetryPolicy"]["MaximumEventAgeInSeconds"] == 60
