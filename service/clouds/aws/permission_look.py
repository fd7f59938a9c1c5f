"""Whether the service may do in an AWS account what it does there. Each permission is tried by a call that changes
nothing: with a handle or token that nobody has, or as a dry run. AWS says that a call is not allowed before it says
that it makes no sense.

Receiving is not tried, as it counts against a message: the reader itself says whether it may.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any
from uuid import uuid4

from botocore.exceptions import ClientError

from service.clouds.lacks import Lack, advice, missing

NO_HANDLE = "liver-cloud-check"
MACHINES_MAX, GROUPS_MAX = 50, 5
"""So many machines Auto Scaling takes at once; so many of their groups are looked at."""
ATTACH = "attach the policies of deploy/terraform/aws"
ENDS = "autoscaling:EC2_INSTANCE_TERMINATING"
_DENIED = ("AccessDenied", "UnauthorizedOperation", "NotAuthorized")


def is_denied(error: ClientError) -> bool:
    """Whether AWS refuses for want of a permission. Also a 403 that names nothing, as of a proxy. Pure."""
    code = str(error.response.get("Error", {}).get("Code", ""))
    return code == "403" or any(word in code for word in _DENIED)


def look_at_permissions(aws: Mapping[str, Any], queue_url: str, machines: Sequence[str]) -> list[Lack]:
    """What the service may not do. `aws`: clients by name; `machines`: ids of some of ours. Raises BotoCoreError."""
    return [*_of_queue(aws["sqs"], queue_url), *_of_machines(aws["ec2"]), *_of_groups(aws["autoscaling"], machines)]


def _of_queue(sqs: Any, url: str) -> Iterable[Lack]:
    of_message = {"QueueUrl": url, "ReceiptHandle": NO_HANDLE}
    if _may_not(sqs.delete_message, **of_message):
        why = "each message comes again until it is too old, or in the dead letter queue"
        yield missing(f"permission: sqs:DeleteMessage on {url}", why, ATTACH)
    if _may_not(sqs.change_message_visibility, **of_message, VisibilityTimeout=0):
        why = "what one replica works on for long is shown to others as well"
        yield missing(f"permission: sqs:ChangeMessageVisibility on {url}", why, ATTACH)


def _of_machines(ec2: Any) -> Iterable[Lack]:
    if _may_not(ec2.describe_instances, DryRun=True):
        why = "which machines are in a capacity block that ends cannot be asked"
        yield missing("permission: ec2:DescribeInstances", why, ATTACH)


def _of_groups(autoscaling: Any, machines: Sequence[str]) -> Iterable[Lack]:
    """Of the groups that our machines are in, if they are in any."""
    if not machines:
        # Without names Auto Scaling would list those of the whole account.
        return
    unseen = "nobody knows whether groups wait until jobs have left their machines"
    try:
        found = autoscaling.describe_auto_scaling_instances(InstanceIds=list(machines[:MACHINES_MAX]))
    except ClientError as error:
        yield advice(_unseen(error, "autoscaling:DescribeAutoScalingInstances"), unseen, ATTACH)
        return
    for group in sorted({one["AutoScalingGroupName"] for one in found["AutoScalingInstances"]})[:GROUPS_MAX]:
        try:
            hooks = autoscaling.describe_lifecycle_hooks(AutoScalingGroupName=group)["LifecycleHooks"]
        except ClientError as error:
            yield advice(_unseen(error, "autoscaling:DescribeLifecycleHooks"), unseen, ATTACH)
            return
        yield from _of_hooks(autoscaling, group, [one for one in hooks if one["LifecycleTransition"] == ENDS])


def _of_hooks(autoscaling: Any, group: str, hooks: Sequence[Mapping[str, Any]]) -> Iterable[Lack]:
    if not hooks:
        what, why = f"hook: group {group} has none for {ENDS}", "the group ends a machine without waiting for its job"
        yield advice(what, why, "add a lifecycle hook to the group")
        return
    # Neither names a machine: an end that is under way cannot be meant.
    nobodys = {"AutoScalingGroupName": group, "LifecycleHookName": hooks[0]["LifecycleHookName"],
               "LifecycleActionToken": str(uuid4())}  # fmt: skip
    named = f"on group {group}"
    mend = "name the group in auto_scaling_group_arns of deploy/terraform/aws"
    if _may_not(autoscaling.record_lifecycle_action_heartbeat, **nobodys):
        why = "the group ends a machine while its job still leaves it"
        yield missing(f"permission: autoscaling:RecordLifecycleActionHeartbeat {named}", why, mend)
    if _may_not(autoscaling.complete_lifecycle_action, **nobodys, LifecycleActionResult="CONTINUE"):
        why = "a machine that is empty is kept, and paid for, until the hook's time is over"
        yield missing(f"permission: autoscaling:CompleteLifecycleAction {named}", why, mend)


def _may_not(call: Callable[..., Any], **arguments: Any) -> bool:
    try:
        call(**arguments)
    except ClientError as error:
        return is_denied(error)
    return False


def _unseen(error: ClientError, action: str) -> str:
    return f"permission: {action}" if is_denied(error) else f"groups: cannot be seen: {error}"
