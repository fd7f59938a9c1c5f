"""Events as AWS writes them, one of each that the rules are for, and some that they are not for."""

from typing import Any

INSTANCE = "i-0b662ef9931388ba0"
ENVELOPE = {"version": "0", "id": "1e5527d7-bb36-4607-3370-4164db56a40e", "account": "123456789012",
            "time": "2026-11-20T17:05:37Z", "region": "us-east-1"}  # fmt: skip
ARN = f"arn:aws:ec2:us-east-1b:instance/{INSTANCE}"
HOOK = {"LifecycleActionToken": "87654321-4321-4321-4321-210987654321", "AutoScalingGroupName": "p5",
        "LifecycleHookName": "liver", "EC2InstanceId": INSTANCE,
        "LifecycleTransition": "autoscaling:EC2_INSTANCE_TERMINATING"}  # fmt: skip
HEALTH = {
    "eventArn": "arn:aws:health:us-east-1::event/EC2/AWS_EC2_INSTANCE_RETIREMENT_SCHEDULED/1",
    "service": "EC2",
    "eventTypeCode": "AWS_EC2_INSTANCE_RETIREMENT_SCHEDULED",
    "eventTypeCategory": "scheduledChange",
    "startTime": "Sat, 05 Jun 2016 15:10:09 GMT",
    "eventDescription": [{"language": "en_US", "latestDescription": "retired"}],
    "affectedEntities": [{"entityValue": INSTANCE, "tags": {}}],
}


def event(detail_type: str, detail: dict[str, Any], source: str = "aws.ec2") -> dict[str, Any]:
    return {**ENVELOPE, "detail-type": detail_type, "source": source, "resources": [ARN], "detail": detail}


def interruption_of_reservation(name: str) -> dict[str, Any]:
    detail = {"instance-id": INSTANCE, "instance-action": "terminate",
              "instance-termination-time": "2026-11-20T17:07:37Z", "azId": "use1-az1"}  # fmt: skip
    return {**event(name, detail), "resources": ARN}


def state(name: str) -> dict[str, Any]:
    return event("EC2 Instance State-change Notification", {"instance-id": INSTANCE, "state": name})


WANTED: dict[str, list[dict[str, Any]]] = {
    "spot-interruption": [
        event("EC2 Spot Instance Interruption Warning", {"instance-id": INSTANCE, "instance-action": action})
        for action in ("terminate", "stop", "hibernate")
    ],
    "rebalance": [event("EC2 Instance Rebalance Recommendation", {"instance-id": INSTANCE})],
    "state-change": [state(name) for name in ("stopping", "stopped", "shutting-down", "terminated")],
    "reservation": [
        interruption_of_reservation("EC2 Interruptible Capacity Reservation Instance Interruption Warning"),
        interruption_of_reservation("EC2 Capacity Reservation Instance Interruption Warning"),
    ],
    "capacity-block": [
        event(
            "Capacity Block Reservation Expiration Warning",
            {"capacity-reservation-id": "cr-0", "end-date": "2026-11-20T17:45:00Z"},
        )
    ],
    "lifecycle": [event("EC2 Instance-terminate Lifecycle Action", HOOK, "aws.autoscaling")],
    "health": [event("AWS Health Event", HEALTH, "aws.health")],
}
UNWANTED = [
    state("running"),
    state("pending"),
    event("EC2 Instance-launch Lifecycle Action", HOOK, "aws.autoscaling"),
    event("AWS Health Event", {**HEALTH, "service": "S3"}, "aws.health"),
    event("AWS Health Event", {**HEALTH, "eventTypeCategory": "accountNotification"}, "aws.health"),
    event("Object Created", {}, "aws.s3"),
]
