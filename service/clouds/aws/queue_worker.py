"""Reads the queue of an AWS account: several threads ask, store what they get, and delete a message after the commit.

Whatever fails, the service goes on, and the channel says why it is not heard. A message that cannot be stored is left
to the queue, which shows it again and at last puts it where its own redrive policy says.
"""

import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import Any

from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError

from agent.protocol.sync import Provider
from service.clouds.aws import hooks
from service.clouds.aws.events import EventRead, read_message
from service.clouds.cloud_facts import CloudFact
from service.clouds.operations import count_only, note_channel, take_facts, take_unread
from service.context import Context
from service.db.outage import is_outage
from service.notices.rules import AWS_QUEUE
from service.settings import ServiceSettings

BATCH = 10
CONNECT_S, MARGIN_S = 3.0, 5.0
"""How long a connection may take; how much longer than SQS may wait an answer may."""
AFTER_ERROR_S, AFTER_ERROR_MOST_S = 1.0, 30.0
OUTAGE_AGAIN_S = 0.25
SAY_ALIVE_EVERY = timedelta(seconds=5)
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
    from boto3.session import Session

    config = Config(
        connect_timeout=CONNECT_S,
        read_timeout=settings.aws_wait_s + MARGIN_S,
        retries={"mode": "standard", "total_max_attempts": 2},
        max_pool_connections=settings.aws_workers + 4,
    )
    session = Session(region_name=settings.aws_region)
    made = {
        name: session.client(name, endpoint_url=settings.aws_endpoint_url, config=config)
        for name in ("sqs", "ec2", "autoscaling")
    }
    return Clients(**made)


@dataclass(frozen=True, slots=True)
class _Message:
    receipt: str
    reading: EventRead


class QueueWorker:
    """The threads of one replica. Several replicas may read one queue."""

    def __init__(self, context: Context, *, clients: Callable[[ServiceSettings], Clients] = make_clients) -> None:
        self._context = context
        self._settings = context.settings
        self._make_clients = clients
        self._clients: Clients | None = None
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._held: set[str] = set()
        self._alive_at: datetime | None = None
        self._threads: list[threading.Thread] = []
        self.trouble = ""

    def start(self) -> None:
        """Begin to read. Does nothing, and says so once, where no queue is configured."""
        if self._settings.aws_queue_url is None:
            _log.info(OFF)
            return
        loops = [("hooks", self._look_at_hooks), ("visibility", self._extend)]
        loops += [(f"queue-{number}", self._read) for number in range(self._settings.aws_workers)]
        for name, loop in loops:
            thread = threading.Thread(target=loop, name=f"aws-{name}", daemon=True)
            thread.start()
            self._threads.append(thread)

    def stop(self, *, timeout_s: float = 2.0) -> None:
        """Ask for nothing more. What was read and is not stored comes again."""
        self._stop.set()
        for thread in self._threads:
            thread.join(timeout_s / max(1, len(self._threads)))

    def _read(self) -> None:
        wait_s = AFTER_ERROR_S
        while not self._stop.is_set():
            try:
                self._read_once()
                wait_s = AFTER_ERROR_S
            except Exception as error:
                self._trouble(error)
                self._stop.wait(wait_s)
                wait_s = min(2 * wait_s, AFTER_ERROR_MOST_S)

    def _read_once(self) -> None:
        clients, url = self._ready(), self._settings.aws_queue_url
        answer = clients.sqs.receive_message(
            QueueUrl=url,
            MaxNumberOfMessages=BATCH,
            WaitTimeSeconds=self._settings.aws_wait_s,
            VisibilityTimeout=self._settings.aws_visibility_s,
        )
        found = answer.get("Messages", [])
        receipts = {item["ReceiptHandle"] for item in found}
        with self._lock:
            self._held |= receipts
        try:
            self._say_alive()
            messages = [
                _Message(item["ReceiptHandle"], read_message(item.get("Body", ""), item["MessageId"])) for item in found
            ]
            done = self._store(clients, messages)
        finally:
            with self._lock:
                self._held -= receipts
        self._delete(clients, done)

    def _store(self, clients: Clients, messages: Sequence[_Message]) -> list[_Message]:
        """Those of the messages that are stored, together if that goes, or else one by one."""
        if not messages or self._stop.is_set():
            return []
        try:
            resolved = [replace(item, reading=_resolved(clients, item.reading)) for item in messages]
            self._commit(resolved)
            return list(messages)
        except Exception as error:
            if len(messages) == 1:
                _log.exception("a message of the queue cannot be stored: it is left there")
                self._trouble(error)
                return []
        return [done for item in messages for done in self._store(clients, [item])]

    def _commit(self, messages: Sequence[_Message]) -> None:
        """One transaction. While the database is away it is tried again: that is not the fault of a message, which
        else would be shown again so often that the queue takes it for one that nobody can handle."""
        while not self._stop.is_set():
            try:
                with self._context.sessions.begin() as session:
                    store(session, [item.reading for item in messages], now=self._context.clock())
                self._context.database.outage.ends()
                return
            except Exception as error:
                if not is_outage(error):
                    raise
                self._context.database.outage.begins(error)
                self._stop.wait(OUTAGE_AGAIN_S)
        raise InterruptedError("the service ends")

    def _delete(self, clients: Clients, messages: Sequence[_Message]) -> None:
        if not messages:
            return
        entries = [{"Id": str(number), "ReceiptHandle": item.receipt} for number, item in enumerate(messages)]
        answer = clients.sqs.delete_message_batch(QueueUrl=self._settings.aws_queue_url, Entries=entries)
        for failed in answer.get("Failed", []):
            # It comes again, and is known then.
            _log.warning("a message of the queue could not be deleted: %s", failed.get("Message", failed.get("Code")))

    def _extend(self) -> None:
        """While messages are worked on nobody else gets them."""
        visibility_s = self._settings.aws_visibility_s
        while not self._stop.wait(visibility_s / 3):
            with self._lock:
                held = sorted(self._held)
            for start in range(0, len(held), BATCH):
                entries = [
                    {"Id": str(number), "ReceiptHandle": receipt, "VisibilityTimeout": visibility_s}
                    for number, receipt in enumerate(held[start : start + BATCH])
                ]
                try:
                    self._ready().sqs.change_message_visibility_batch(
                        QueueUrl=self._settings.aws_queue_url, Entries=entries
                    )
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

    def _say_alive(self) -> None:
        now = self._context.clock()
        if not self.trouble and self._alive_at is not None and now - self._alive_at < SAY_ALIVE_EVERY:
            return
        if self.trouble:
            _log.warning("the queue of the AWS account is read again")
        self.trouble, self._alive_at = "", now
        with self._context.sessions.begin() as session:
            note_channel(session, AWS_QUEUE, Provider.AWS, now=now)

    def _trouble(self, error: Exception) -> None:
        """Why the queue is not heard: shown, stored if that goes, and logged when it changes."""
        if is_outage(error):
            return
        reason = f"{type(error).__name__}: {error}"
        if reason != self.trouble:
            _log.error("the queue of the AWS account cannot be read: %s", reason)
        self.trouble = reason
        try:
            with self._context.sessions.begin() as session:
                note_channel(session, AWS_QUEUE, Provider.AWS, trouble=reason, now=self._context.clock())
        except Exception:
            _log.debug("the trouble could not be stored", exc_info=True)


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
            facts += [replace(reading.reservation.fact, provider_id=item["InstanceId"]) for item in group["Instances"]]
        if len(facts) >= IN_RESERVATION_MAX:
            break
    passed = "" if facts else f"no machine is in {reading.reservation.reservation_id}"
    return replace(reading, facts=tuple(facts[:IN_RESERVATION_MAX]), passed=passed)
