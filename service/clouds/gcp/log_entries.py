"""What a GCP project says of its machines: system events of the audit log, as Pub/Sub carries them, and operations of
Compute Engine. Pure.

Formats: Cloud Logging's LogEntry, Pub/Sub's PubsubMessage and push wrapper, Compute Engine's Operation. Both come after
the fact: what they tell of, nobody can do anything about before it begins.
"""

import base64
import binascii
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from agent.protocol.sync import Provider
from agent.protocol.values import utc
from liver_core.layout.limits import UTC_LEAST, UTC_MOST
from service.clouds.cloud_facts import CloudFact, FactKind, Unread, json_of
from service.notices.rules import GCP_OPERATIONS, GCP_PUBSUB

ENTRY_BYTES_MAX = 256 * 1024
"""Cloud Logging takes none that is longer."""
ENDS = {
    "compute.instances.preempted": FactKind.GOING,
    "compute.instances.baremetalCaretakerPreempted": FactKind.GOING,
    "compute.instances.terminateOnHostMaintenance": FactKind.GOING,
    "compute.instances.hostError": FactKind.GONE,
    "compute.instances.guestTerminate": FactKind.GONE,
}
"""By method of the log and type of the operation: what became of the machine. Going: it is being stopped, for up to
30 s. Gone: its host has failed, or it has turned itself off."""
_OTHERS = "compute.instances."
_MACHINE = re.compile(r"^[0-9]{1,20}$")
_EARLIEST, _LATEST = utc(UTC_LEAST), utc(UTC_MOST)


class UnreadEntry(Exception):
    """The message is none of those that are known, or lacks what it must have; the text says what."""


@dataclass(frozen=True, slots=True)
class LogRead:
    """What one message says. `passed`: why it says nothing of a machine that goes; `unread`: why nobody can read it."""

    facts: tuple[CloudFact, ...] = ()
    passed: str = ""
    unread: Unread | None = None


def read_pulled(message: Any, ack_id: str) -> LogRead:
    """What a message of a subscription says. `message`: a PubsubMessage; `ack_id`: named where it has no id."""
    raw, name = _shown(message), ack_id
    try:
        fields = _mapping(message, "message")
        name = _text(fields.get("messageId"), ack_id)
        raw = _data(fields)
        return _read_entry(raw, name)
    except UnreadEntry as error:
        return LogRead(unread=Unread(GCP_PUBSUB, name, str(error), raw))


def read_push(body: bytes, digest: str) -> LogRead:
    """What a push says, in Pub/Sub's wrapper or without. `digest`: named where it has no id."""
    raw = body.decode("utf-8", "replace")
    try:
        fields = _parsed(raw)
        if "message" in fields:
            return read_pulled(fields["message"], digest)
        return _read_entry(raw, digest)
    except UnreadEntry as error:
        return LogRead(unread=Unread(GCP_PUBSUB, digest, str(error), raw))


def read_operation(operation: Mapping[str, Any]) -> LogRead:
    """What an operation says, in the form of Compute Engine's REST API."""
    raw = _shown(operation)
    name = _text(operation.get("id"), _text(operation.get("name"), ""))
    try:
        kind = operation.get("operationType")
        if not isinstance(kind, str) or kind not in ENDS:
            return LogRead(passed=f"an operation of type {str(kind)[:80]}")
        said_at = _time(operation.get("insertTime"), "insertTime")
        return _told(kind, _machine(operation.get("targetId"), "targetId"), said_at, GCP_OPERATIONS, name, raw)
    except UnreadEntry as error:
        return LogRead(unread=Unread(GCP_OPERATIONS, name, str(error), raw))


def inserted_at(operation: Mapping[str, Any]) -> datetime | None:
    """When an operation began to be, by the cloud's clock; None if it does not say."""
    try:
        return _time(operation.get("insertTime"), "insertTime")
    except UnreadEntry:
        return None


def _read_entry(raw: str, name: str) -> LogRead:
    if len(raw) > ENTRY_BYTES_MAX:
        raise UnreadEntry(f"is longer than {ENTRY_BYTES_MAX} characters")
    entry = _parsed(raw)
    payload = entry.get("protoPayload")
    if not isinstance(payload, dict):
        raise UnreadEntry("protoPayload: must be a mapping of fields, as in an entry of the audit log")
    method = payload.get("methodName")
    if not isinstance(method, str):
        raise UnreadEntry("protoPayload.methodName: is required")
    if method not in ENDS:
        if method.startswith(_OTHERS):
            return LogRead(passed=f"an entry about {method[:80]}")
        raise UnreadEntry(f"protoPayload.methodName: {method[:100]!r} is not one that is known here")
    resource = entry.get("resource")
    labels = resource.get("labels") if isinstance(resource, dict) else None
    machine = _machine(_mapping(labels, "resource.labels").get("instance_id"), "resource.labels.instance_id")
    said_at = _time(entry.get("timestamp", entry.get("receiveTimestamp")), "timestamp")
    return _told(method, machine, said_at, GCP_PUBSUB, _text(entry.get("insertId"), name), raw)


def _told(method: str, machine: str, said_at: datetime, channel: str, name: str, raw: str) -> LogRead:
    kind = ENDS[method]
    deadline_at = said_at if kind is FactKind.GOING else None
    return LogRead(facts=(CloudFact(Provider.GCP, machine, kind, said_at, deadline_at, channel, name, raw),))


def _data(message: Mapping[str, Any]) -> str:
    data = message.get("data")
    if not isinstance(data, str):
        raise UnreadEntry("message.data: is required")
    try:
        # Pub/Sub writes the usual alphabet; some clients the one for addresses.
        content = base64.b64decode(data.replace("-", "+").replace("_", "/"), validate=True)
        return content.decode("utf-8")
    except (binascii.Error, ValueError):
        raise UnreadEntry("message.data: must be text in base64") from None


def _parsed(text: str) -> dict[str, Any]:
    try:
        return _mapping(json_of(text), "an entry")
    except (ValueError, RecursionError) as error:
        raise UnreadEntry(f"must be JSON: {error}") from None


def _mapping(value: Any, field: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise UnreadEntry(f"{field}: must be a mapping of fields")
    return value


def _machine(value: Any, field: str) -> str:
    if isinstance(value, int) and not isinstance(value, bool):
        value = str(value)
    if not isinstance(value, str) or not _MACHINE.match(value):
        raise UnreadEntry(f"{field}: must be the number of a machine, such as 5775171277418378000")
    return value


def _text(value: Any, default: str) -> str:
    return value if isinstance(value, str) and value else default


def _time(value: Any, field: str) -> datetime:
    try:
        found = datetime.fromisoformat(value) if isinstance(value, str) else None
    except ValueError:
        found = None
    if found is None or found.tzinfo is None or not _EARLIEST < found < _LATEST:
        raise UnreadEntry(f"{field}: must be a time with its zone, such as 2030-01-31T12:00:00Z")
    return found


def _shown(value: Any) -> str:
    try:
        return json.dumps(value)
    except (TypeError, ValueError, RecursionError):
        return "what came is not JSON"
