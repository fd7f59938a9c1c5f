"""Pulls the subscription of a GCP project: several threads ask, store what they get, and acknowledge after the commit.

How that goes is in `channel_worker`; here, what Pub/Sub is asked for. Pub/Sub answers a pull that finds nothing after
up to a minute and a half, so threads begin one after the other, and the channel is heard alive in between.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any

from sqlalchemy.orm import Session

from service.clouds.channel_worker import MessageWorker
from service.clouds.gcp.google_calls import PUBSUB, AnswerTooLong, GoogleCaller, endpoint, make_caller
from service.clouds.gcp.log_entries import LogRead, read_pulled
from service.clouds.operations import count_only, take_facts, take_unread
from service.context import Context
from service.notices.rules import GCP_PUBSUB

BATCH = 20
CALL_S = 10.0
EXTEND_EVERY_S = 3.0
"""A subscription cannot be set to wait less than 10 s for an acknowledgement."""
OFF = (
    "the subscription of a GCP project is not pulled: LIVER_SERVICE_GCP_SUBSCRIPTION turns it on; "
    "LIVER_SERVICE_GCP_PUSH_AUDIENCE with LIVER_SERVICE_GCP_PUSH_ACCOUNT lets Pub/Sub push instead"
)
_log = logging.getLogger(__name__)


class SubscriptionWorker(MessageWorker[LogRead]):
    """The threads of one replica. Several replicas may pull one subscription."""

    EXTEND_MOST = 100

    def __init__(self, context: Context, *, caller: Callable[[], GoogleCaller] = make_caller) -> None:
        super().__init__(context, GCP_PUBSUB, "the subscription of the GCP project")
        self._make_caller = caller
        self._caller: GoogleCaller | None = None
        self._most = BATCH

    def start(self) -> None:
        """Begin to pull. Does nothing, and says so once, where no subscription is configured."""
        if self._settings.gcp_subscription is None:
            if self._settings.gcp_push_audience is None:
                _log.info(OFF)
            return
        workers = self._settings.gcp_workers
        loops = {"gcp-deadlines": lambda: self._extend_all(EXTEND_EVERY_S)}
        self.begin(
            loops | {f"gcp-pull-{n}": self._loop(n * self._settings.gcp_wait_s / workers) for n in range(workers)}
        )

    def receive(self) -> Mapping[str, Any]:
        """Messages once there are some, or none after a time. Raises what `GoogleCaller` raises."""
        most, self._most = self._most, BATCH
        try:
            answer = self._call("pull", {"maxMessages": most}, timeout_s=self._settings.gcp_wait_s)
        except AnswerTooLong:
            if most == 1:
                raise
            self._most = 1
            return {}
        found = answer.get("receivedMessages") or []
        return {item["ackId"]: item for item in found if isinstance(item, dict) and isinstance(item.get("ackId"), str)}

    def meaning(self, message: Any) -> LogRead:
        """What a received message says."""
        return read_pulled(message.get("message"), message["ackId"])

    def write(self, session: Session, readings: Sequence[LogRead], now: datetime) -> None:
        """Store what the messages say."""
        store(session, readings, GCP_PUBSUB, now=now)

    def let_go(self, handles: Sequence[str]) -> None:
        """Acknowledge. Raises what `GoogleCaller` raises; then they come again, and are known."""
        self._call("acknowledge", {"ackIds": list(handles)}, timeout_s=CALL_S)

    def extend(self, handles: Sequence[str]) -> None:
        """Ask for more time."""
        body = {"ackIds": list(handles), "ackDeadlineSeconds": self._settings.gcp_ack_deadline_s}
        try:
            self._call("modifyAckDeadline", body, timeout_s=CALL_S)
        except Exception as error:
            _log.warning("messages that are worked on may be given to others: %s", error)

    def _loop(self, begin_after_s: float) -> Callable[[], None]:
        def loop() -> None:
            self._stop.wait(begin_after_s)
            self.repeat(self._read_once)

        return loop

    def _call(self, verb: str, body: Mapping[str, Any], *, timeout_s: float) -> Mapping[str, Any]:
        with self._lock:
            if self._caller is None:
                self._caller = self._make_caller()
            caller = self._caller
        url = f"{endpoint(self._settings, PUBSUB)}/v1/{self._settings.gcp_subscription}:{verb}"
        return caller("POST", url, body, timeout_s=timeout_s).fields


def store(session: Session, readings: Sequence[LogRead], channel: str, *, now: datetime) -> None:
    """Store what these messages say, in the caller's transaction."""
    take_facts(session, [fact for reading in readings for fact in reading.facts], now=now)
    take_unread(session, [reading.unread for reading in readings if reading.unread is not None], now=now)
    count_only(session, channel, [reading.passed for reading in readings if reading.passed], now=now)
