"""Reads the queue of an AWS account: several threads ask, store what they get, and delete a message after the commit.

How that goes is in `channel_worker`; here, what SQS is asked for, and what its messages lead to.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any

from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError
from sqlalchemy.orm import Session

from service.clouds.aws import hooks
from service.clouds.aws.events import EventRead, read_message
from service.clouds.channel_worker import AFTER_ERROR_S, MessageWorker
from service.clouds.cloud_facts import CloudFact
from service.clouds.operations import count_only, take_facts, take_unread
from service.context import Context
from service.db.outage import is_outage
from service.notices.rules import AWS_QUEUE
from service.settings import ServiceSettings

BATCH = 10
CONNECT_S, MARGIN_S = 3.0, 5.0
"""How long a connection may take; how much longer than SQS may wait an answer may."""
IN_RESERVATION_MAX = 1_000
OFF = (
    "the queue of an AWS account is not read: notices of AWS are heard by the nodes only; "
    "LIVER_SERVICE_AWS_QUEUE_URL turns it on"
)
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Clients:
    """What of AWS is called. Each may be used by several threads."""

    sqs: Any
    ec2: Any
    autoscaling: Any


def make_clients(settings: ServiceSettings) -> Clients:
    """Clients with limits on every call, by AWS's ordinary chain of credentials. Raises BotoCoreError where it names
    neither a region nor a profile that exists."""
    # Takes its time, and is not needed where no queue is read.
    from boto3.session import Session as Account

    config = Config(
        connect_timeout=CONNECT_S,
        read_timeout=settings.aws_wait_s + MARGIN_S,
        retries={"mode": "standard", "total_max_attempts": 2},
        max_pool_connections=settings.aws_workers + 4,
    )
    session = Account(region_name=settings.aws_region)
    made = {
        name: session.client(name, endpoint_url=settings.aws_endpoint_url, config=config)
        for name in ("sqs", "ec2", "autoscaling")
    }
    return Clients(**made)


class QueueWorker(MessageWorker[EventRead]):
    """The threads of one replica. Several replicas may read one queue."""

    EXTEND_MOST = BATCH

    def __init__(self, context: Context, *, clients: Callable[[ServiceSettings], Clients] = make_clients) -> None:
        super().__init__(context, AWS_QUEUE, "the queue of the AWS account")
        self._make_clients = clients
        self._clients: Clients | None = None

    def start(self) -> None:
        """Begin to read. Does nothing, and says so once, where no queue is configured."""
        if self._settings.aws_queue_url is None:
            _log.info(OFF)
            return
        every_s = self._settings.aws_visibility_s / 3
        loops = {"aws-hooks": self._look_at_hooks, "aws-visibility": lambda: self._extend_all(every_s)}
        reading = {f"aws-queue-{n}": lambda: self.repeat(self._read_once) for n in range(self._settings.aws_workers)}
        self.begin(loops | reading)

    def receive(self) -> Mapping[str, Any]:
        """At most ten messages, once there are some. Raises what boto3 raises."""
        answer = self._ready().sqs.receive_message(
            QueueUrl=self._settings.aws_queue_url,
            MaxNumberOfMessages=BATCH,
            WaitTimeSeconds=self._settings.aws_wait_s,
            VisibilityTimeout=self._settings.aws_visibility_s,
        )
        return {item["ReceiptHandle"]: item for item in answer.get("Messages", [])}

    def meaning(self, message: Any) -> EventRead:
        """What a message of SQS says."""
        return read_message(message.get("Body", ""), message["MessageId"])

    def completed(self, reading: EventRead) -> EventRead:
        """With the machines of a capacity block that ends. Raises what boto3 raises."""
        return _resolved(self._ready(), reading)

    def write(self, session: Session, readings: Sequence[EventRead], now: datetime) -> None:
        """Store what the messages say."""
        store(session, readings, now=now)

    def let_go(self, handles: Sequence[str]) -> None:
        """Delete the messages. Raises what boto3 raises."""
        entries = [{"Id": str(number), "ReceiptHandle": handle} for number, handle in enumerate(handles)]
        answer = self._ready().sqs.delete_message_batch(QueueUrl=self._settings.aws_queue_url, Entries=entries)
        for failed in answer.get("Failed", []):
            # It comes again, and is known then.
            _log.warning("a message of the queue could not be deleted: %s", failed.get("Message", failed.get("Code")))

    def extend(self, handles: Sequence[str]) -> None:
        """Keep the messages invisible."""
        visibility_s = self._settings.aws_visibility_s
        entries = [
            {"Id": str(number), "ReceiptHandle": handle, "VisibilityTimeout": visibility_s}
            for number, handle in enumerate(handles)
        ]
        try:
            self._ready().sqs.change_message_visibility_batch(QueueUrl=self._settings.aws_queue_url, Entries=entries)
        except (ClientError, BotoCoreError) as error:
            _log.warning("messages that are worked on may be shown to others: %s", error)

    def _look_at_hooks(self) -> None:
        while not self._stop.wait(hooks.LOOK_EVERY.total_seconds() / 2):
            try:
                hooks.tick(self._context, self._ready().autoscaling)
            except Exception as error:
                if not is_outage(error):
                    _log.exception("hooks of Auto Scaling groups could not be looked at")
                self._stop.wait(AFTER_ERROR_S)

    def _ready(self) -> Clients:
        with self._lock:
            if self._clients is None:
                self._clients = self._make_clients(self._settings)
            return self._clients


def store(session: Any, readings: Sequence[EventRead], *, now: datetime) -> None:
    """Store what these messages say, in the caller's transaction."""
    taken = take_facts(session, [fact for reading in readings for fact in reading.facts], now=now)
    nodes = {item.fact.provider_id: item for item in taken if item.node_id is not None}
    for reading in readings:
        hook = reading.hook
        if hook is not None and (of := nodes.get(hook.provider_id)) is not None and of.node_id is not None:
            hooks.store_hook(session, hook, node_id=of.node_id, lease_id=of.lease_id, now=now)
    take_unread(session, [reading.unread for reading in readings if reading.unread is not None], now=now)
    count_only(session, AWS_QUEUE, [reading.passed for reading in readings if reading.passed], now=now)


def _resolved(clients: Clients, reading: EventRead) -> EventRead:
    """With the machines of a capacity block that ends, which EC2 names. Raises what boto3 raises."""
    if reading.reservation is None:
        return reading
    wanted = [{"Name": "capacity-reservation-id", "Values": [reading.reservation.reservation_id]}]
    pages = clients.ec2.get_paginator("describe_instances").paginate(Filters=wanted, PaginationConfig={"PageSize": 100})
    facts: list[CloudFact] = []
    for page in pages:
        for group in page["Reservations"]:
            facts += [
                reading.reservation.of_machine(item["InstanceId"], item.get("InstanceType", ""))
                for item in group["Instances"]
            ]
        if len(facts) >= IN_RESERVATION_MAX:
            break
    passed = "" if facts else f"no machine is in {reading.reservation.reservation_id}"
    return replace(reading, facts=tuple(facts[:IN_RESERVATION_MAX]), passed=passed)
