"""What is missing so that an AWS account is heard: looked at with the service's own credentials, changing nothing."""

import json
from collections.abc import Callable, Iterable, Mapping
from datetime import datetime
from typing import Any

from botocore.exceptions import BotoCoreError, ClientError

from service.clouds.aws.queue_worker import CONNECT_S
from service.clouds.lacks import Lack, advice, clock_finding, missing
from service.settings import ServiceSettings

READ_S = 5.0
AGE_MOST_S = 300
"""A warning that lies longer than this in EventBridge is about a machine that is gone."""
LATE = "notices of AWS are heard by the nodes only"
WANTED = {
    "EC2 Spot Instance Interruption Warning": True,
    "EC2 Instance State-change Notification": True,
    "EC2 Instance Rebalance Recommendation": False,
}
"""Events of aws.ec2 for which there has to be a rule, and whether notices are lost without it."""
NAMES = ("sts", "sqs", "events")


def make_lookers(settings: ServiceSettings) -> Mapping[str, Any]:
    """Clients, by name. Raises BotoCoreError."""
    from boto3.session import Session as Account
    from botocore.config import Config

    config = Config(connect_timeout=CONNECT_S, read_timeout=READ_S, retries={"total_max_attempts": 1})
    account = Account(region_name=settings.aws_region)
    return {name: account.client(name, endpoint_url=settings.aws_endpoint_url, config=config) for name in NAMES}


def look_at_queue(
    settings: ServiceSettings, now: datetime, *, clients: Callable[[ServiceSettings], Mapping[str, Any]] = make_lookers
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
        queue = aws["sqs"].get_queue_attributes(QueueUrl=url, AttributeNames=["All"])["Attributes"]
    except ClientError as error:
        return [*found, _refused(error, url)]
    except BotoCoreError as error:
        return [*found, _unasked(error)]
    if not _redrive(queue).get("deadLetterTargetArn"):
        why = "a message that cannot be stored comes again until it is too old"
        found.append(missing(f"dead letter queue of {url}", why, "set RedrivePolicy, as deploy/terraform/aws does"))
    return found + _rules(aws["events"], queue["QueueArn"])


def _rules(events: Any, queue_arn: str) -> list[Lack]:
    try:
        rules = []
        for name in events.list_rule_names_by_target(TargetArn=queue_arn)["RuleNames"]:
            rule = events.describe_rule(Name=name)
            targets = events.list_targets_by_rule(Rule=name)["Targets"]
            rules.append((rule, [one for one in targets if one["Arn"] == queue_arn]))
    except ClientError as error:
        code = error.response.get("Error", {}).get("Code", "")
        what = f"rules: cannot be seen ({code}): events:ListRuleNamesByTarget, DescribeRule, ListTargetsByRule"
        return [advice(what, "nobody knows whether EventBridge sends to the queue", "grant them")]
    except BotoCoreError as error:
        return [_unasked(error)]
    return of_rules(rules)


def of_rules(rules: Iterable[tuple[Mapping[str, Any], list[Mapping[str, Any]]]]) -> list[Lack]:
    """What the rules that send to the queue lack, each with its targets. Pure. A pattern is read for source and
    detail-type only."""
    rules, found = list(rules), []
    for kind, is_needed in WANTED.items():
        if not any(rule.get("State") == "ENABLED" and takes(rule.get("EventPattern", ""), kind) for rule, _ in rules):
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


def takes(pattern: str, kind: str) -> bool:
    """Whether a pattern, by source and detail-type, takes an event of EC2 of this kind. Pure."""
    try:
        fields = json.loads(pattern)
    except ValueError:
        return False
    return all(_matches(fields.get(name), value) for name, value in (("source", "aws.ec2"), ("detail-type", kind)))


def _matches(allowed: Any, value: str) -> bool:
    if allowed is None:
        return True
    for one in allowed if isinstance(allowed, list) else ():
        if one == value or (isinstance(one, dict) and value.startswith(str(one.get("prefix", "\0")))):
            return True
    return False


def _redrive(queue: Mapping[str, str]) -> dict[str, Any]:
    try:
        return json.loads(queue.get("RedrivePolicy", "{}"))
    except ValueError:
        return {}


def _refused(error: ClientError, url: str) -> Lack:
    code = str(error.response.get("Error", {}).get("Code", ""))
    if "NonExistentQueue" in code or "QueueDoesNotExist" in code:
        return missing(f"queue: there is no {url}", LATE, "make it, or name another in LIVER_SERVICE_AWS_QUEUE_URL")
    if "AccessDenied" in code or "NotAuthorized" in code:
        what = f"permission: sqs:GetQueueAttributes on {url}"
        return missing(what, "the queue cannot be checked", "attach the policies of deploy/terraform/aws")
    return missing(f"AWS refuses: {error}", LATE, "see the credentials, and the clock of this machine")


def _unasked(error: BotoCoreError) -> Lack:
    if "Credential" in type(error).__name__:
        return missing(f"credentials: {error}", LATE, "run the service with a role, or set a profile or its keys")
    return missing(
        f"AWS cannot be asked: {type(error).__name__}: {error}", LATE, "see the network, region and endpoint"
    )
