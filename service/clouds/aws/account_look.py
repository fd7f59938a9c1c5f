"""What is missing so that an AWS account is heard: looked at with the service's own credentials, changing nothing."""

import json
from collections.abc import Callable, Iterable, Mapping
from datetime import datetime
from fnmatch import fnmatchcase
from typing import Any

from botocore.exceptions import BotoCoreError, ClientError

from agent.protocol.sync import Provider
from service.clouds.aws.permission_look import ATTACH, is_denied, look_at_permissions
from service.clouds.aws.queue_worker import CONNECT_S
from service.clouds.lacks import Lack, OwnView, advice, clock_finding, missing
from service.settings import ServiceSettings

READ_S = 5.0
AGE_MOST_S = 300
"""A warning that lies longer than this in EventBridge is about a machine that is gone."""
LATE = "notices of AWS are heard by the nodes only"
WANTED = {
    ("aws.ec2", "EC2 Spot Instance Interruption Warning"): True,
    ("aws.ec2", "EC2 Instance State-change Notification"): True,
    ("aws.ec2", "EC2 Instance Rebalance Recommendation"): False,
    ("aws.ec2", "EC2 Interruptible Capacity Reservation Instance Interruption Warning"): False,
    ("aws.ec2", "EC2 Capacity Reservation Instance Interruption Warning"): False,
    ("aws.ec2", "Capacity Block Reservation Expiration Warning"): False,
    ("aws.autoscaling", "EC2 Instance-terminate Lifecycle Action"): False,
    ("aws.health", "AWS Health Event"): False,
}
"""Events, by source and kind, for which there has to be a rule, and whether any account loses notices without it."""
NAMES = ("sts", "sqs", "events", "ec2", "autoscaling")
EVENTBRIDGE = "events.amazonaws.com"


def make_lookers(settings: ServiceSettings) -> Mapping[str, Any]:
    """Clients, by name. Raises BotoCoreError."""
    from boto3.session import Session as Account
    from botocore.config import Config

    config = Config(connect_timeout=CONNECT_S, read_timeout=READ_S, retries={"total_max_attempts": 1})
    account = Account(region_name=settings.aws_region)
    return {name: account.client(name, endpoint_url=settings.aws_endpoint_url, config=config) for name in NAMES}


def look_at_queue(
    settings: ServiceSettings,
    now: datetime,
    own: OwnView,
    *,
    clients: Callable[[ServiceSettings], Mapping[str, Any]] = make_lookers,
) -> list[Lack]:
    """Of the channel aws-queue. Never raises."""
    url = settings.aws_queue_url
    if url is None:
        return []
    found: list[Lack] = []
    try:
        aws = clients(settings)
        answer = aws["sts"].get_caller_identity()
        headers = answer["ResponseMetadata"]["HTTPHeaders"]
        found += clock_finding(headers.get("date", ""), now, "AWS")
        found += look_at_permissions(aws, url, own.machines.get(Provider.AWS, ()))
        queue = aws["sqs"].get_queue_attributes(QueueUrl=url, AttributeNames=["All"])["Attributes"]
    except ClientError as error:
        return [*found, _refused(error, url)]
    except BotoCoreError as error:
        return [*found, _unasked(error)]
    if not _json(queue.get("RedrivePolicy", "")).get("deadLetterTargetArn"):
        why = "a message that cannot be stored comes again until it is too old"
        found.append(missing(f"dead letter queue of {url}", why, "set RedrivePolicy, as deploy/terraform/aws does"))
    return found + of_key(url, queue) + _rules(aws["events"], queue)


def _rules(events: Any, queue: Mapping[str, str]) -> list[Lack]:
    queue_arn = queue["QueueArn"]
    try:
        rules = []
        for name in events.list_rule_names_by_target(TargetArn=queue_arn)["RuleNames"]:
            rule = events.describe_rule(Name=name)
            targets = events.list_targets_by_rule(Rule=name)["Targets"]
            rules.append((rule, [one for one in targets if one["Arn"] == queue_arn]))
    except ClientError as error:
        denied = f"permission: events:{error.operation_name} on the rules"
        what = denied if is_denied(error) else f"rules: cannot be seen: {error}"
        return [advice(what, "nobody knows whether EventBridge sends to the queue", ATTACH)]
    except BotoCoreError as error:
        return [_unasked(error)]
    senders = {str(rule["Name"]): str(rule["Arn"]) for rule, _ in rules}
    return of_rules(rules) + of_queue_policy(queue.get("Policy", ""), senders)


def of_rules(rules: Iterable[tuple[Mapping[str, Any], list[Mapping[str, Any]]]]) -> list[Lack]:
    """What the rules that send to the queue lack, each with its targets. Pure. A pattern is read for source and
    detail-type only."""
    rules, found = list(rules), []
    enabled = [str(rule.get("EventPattern", "")) for rule, _ in rules if rule.get("State") == "ENABLED"]
    for (source, kind), is_needed in WANTED.items():
        if not any(takes(pattern, source, kind) for pattern in enabled):
            what, mend = (
                f"rule: none that is enabled sends {kind} to the queue",
                "make it, as deploy/terraform/aws does",
            )
            found.append((missing if is_needed else advice)(what, "the service does not hear of it", mend))
    for rule, targets in rules:
        ages = [int(one.get("RetryPolicy", {}).get("MaximumEventAgeInSeconds", 86_400)) for one in targets]
        if any(age > AGE_MOST_S for age in ages):
            what = f"maximum event age of rule {rule.get('Name')}: {max(ages)} s"
            why = "after a disturbance warnings come about machines that are long gone"
            found.append(missing(what, why, "set MaximumEventAgeInSeconds of its target to 60"))
    return found


def of_queue_policy(policy: str, rules: Mapping[str, str]) -> list[Lack]:
    """Which rules, by name and ARN, the policy of the queue does not let send. Pure. Of conditions only those on
    aws:SourceArn are read; any other is taken to hold."""
    statements = _json(policy).get("Statement", [])
    allows = [one for one in ([statements] if isinstance(statements, dict) else statements) if _lets_send(one)]
    return [
        missing(
            f"queue policy: {EVENTBRIDGE} may not send for rule {name}",
            "EventBridge drops what the rule takes",
            "allow sqs:SendMessage, as deploy/terraform/aws/queue-policy.json does",
        )
        for name, arn in rules.items()
        if not any(_is_for(one, arn) for one in allows)
    ]


def of_key(url: str, queue: Mapping[str, str]) -> list[Lack]:
    """Whether EventBridge can write into a queue that is encrypted so. Pure."""
    key = queue.get("KmsMasterKeyId", "")
    if key.endswith("alias/aws/sqs"):
        why = "EventBridge cannot use the key that AWS manages for SQS, and drops what its rules take"
        return [missing(f"key of {url}: {key}", why, "encrypt with SSE-SQS, as deploy/terraform/aws does")]
    if key:
        why = f"without kms:GenerateDataKey and kms:Decrypt for {EVENTBRIDGE} in the key's policy nothing comes in"
        return [advice(f"key of {url}: {key}: its policy is not seen here", why, "see to it, or encrypt with SSE-SQS")]
    return []


def _lets_send(statement: Mapping[str, Any]) -> bool:
    who, actions = statement.get("Principal"), _listed(statement.get("Action"))
    services = _listed(who.get("Service")) + _listed(who.get("AWS")) if isinstance(who, dict) else _listed(who)
    allows = statement.get("Effect") == "Allow" and (EVENTBRIDGE in services or "*" in services)
    return allows and any(str(action).lower() in ("sqs:sendmessage", "sqs:*", "*") for action in actions)


def _is_for(statement: Mapping[str, Any], arn: str) -> bool:
    conditions = (statement.get("Condition") or {}).values()
    asked = [value for fields in conditions for name, value in fields.items() if name.lower() == "aws:sourcearn"]
    return all(any(fnmatchcase(arn, str(one)) for one in _listed(value)) for value in asked)


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [] if value is None else [value]


def takes(pattern: str, source: str, kind: str) -> bool:
    """Whether a pattern, by source and detail-type, takes an event of this kind. Pure."""
    try:
        fields = json.loads(pattern)
    except ValueError:
        return False
    return all(_matches(fields.get(name), value) for name, value in (("source", source), ("detail-type", kind)))


def _matches(allowed: Any, value: str) -> bool:
    if allowed is None:
        return True
    for one in allowed if isinstance(allowed, list) else ():
        if one == value or (isinstance(one, dict) and value.startswith(str(one.get("prefix", "\0")))):
            return True
    return False


def _json(text: str) -> dict[str, Any]:
    try:
        found = json.loads(text or "{}")
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def _refused(error: ClientError, url: str) -> Lack:
    code = str(error.response.get("Error", {}).get("Code", ""))
    if "NonExistentQueue" in code or "QueueDoesNotExist" in code:
        return missing(f"queue: there is no {url}", LATE, "make it, or name another in LIVER_SERVICE_AWS_QUEUE_URL")
    if is_denied(error):
        return missing(f"permission: sqs:GetQueueAttributes on {url}", "the queue cannot be checked", ATTACH)
    return missing(f"AWS refuses: {error}", LATE, "see the credentials, and the clock of this machine")


def _unasked(error: BotoCoreError) -> Lack:
    if "Credential" in type(error).__name__:
        return missing(f"credentials: {error}", LATE, "run the service with a role, or set a profile or its keys")
    return missing(
        f"AWS cannot be asked: {type(error).__name__}: {error}", LATE, "see the network, region and endpoint"
    )
