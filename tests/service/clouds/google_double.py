"""A double of Google on loopback: keys and tokens, Pub/Sub, the operations of Compute Engine, sinks of Cloud Logging.

Each request and answer is checked against the shapes of the discovery documents that Google publishes.
"""

import base64
import importlib.util
import json
import re
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from functools import cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit
from uuid import uuid4

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import rsa
from cryptography.x509.oid import NameOID
from google.auth import crypt, jwt

PROJECT, NAME = "liver-test", "projects/liver-test/subscriptions/liver-notices"
KEY_ID, AUDIENCE, ACCOUNT = (
    "key-1",
    "https://liver.example.com/push/gcp-pubsub",
    "push@liver-test.iam.gserviceaccount.com",
)

WRITER = "serviceAccount:service-42@gcp-sa-logging.iam.gserviceaccount.com"
PUBSUB_ITSELF = "serviceAccount:service-42@gcp-sa-pubsub.iam.gserviceaccount.com"


@cache
def discovery(name: str) -> dict[str, Any]:
    spec = importlib.util.find_spec("googleapiclient")
    assert spec is not None and spec.submodule_search_locations
    folder = Path(spec.submodule_search_locations[0]) / "discovery_cache" / "documents"
    return json.loads((folder / f"{name}.json").read_text())


def checked(document: str, schema: str, value: Any) -> Any:
    """The value, which has to have the shape that the discovery document gives it."""
    _check(discovery(document)["schemas"], {"$ref": schema}, value, schema)
    return value


def _check(schemas: dict[str, Any], shape: dict[str, Any], value: Any, where: str) -> None:
    if "$ref" in shape:
        shape = schemas[shape["$ref"]]
    kinds = {"string": str, "integer": int, "boolean": bool, "array": list, "object": dict, "number": (int, float)}
    kind = shape.get("type", "any")
    assert kind == "any" or isinstance(value, kinds[kind]), f"{where}: {value!r} is no {kind}"
    if kind == "array":
        for one in value:
            _check(schemas, shape["items"], one, f"{where}[]")
    if kind == "object":
        for name, one in value.items():
            inner = shape.get("properties", {}).get(name, shape.get("additionalProperties"))
            assert inner is not None, f"{where}: there is no field {name}"
            _check(schemas, inner, one, f"{where}.{name}")
    if shape.get("format") == "byte":
        base64.b64decode(value, validate=True)
    if "enum" in shape:
        assert value in shape["enum"], f"{where}: {value} is not one of {shape['enum']}"


@cache
def key() -> rsa.RSAPrivateKey:
    return rsa.generate_private_key(public_exponent=65537, key_size=2048)


def private_pem(of: rsa.RSAPrivateKey) -> str:
    kind, form = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8
    return of.private_bytes(kind, form, serialization.NoEncryption()).decode()


@cache
def certificate() -> str:
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "double")])
    begins = datetime(2020, 1, 1, tzinfo=UTC)
    made = x509.CertificateBuilder().subject_name(name).issuer_name(name).public_key(key().public_key())
    made = made.serial_number(1).not_valid_before(begins).not_valid_after(begins + timedelta(days=36_500))
    return made.sign(key(), hashes.SHA256()).public_bytes(serialization.Encoding.PEM).decode()


def push_token(now: datetime, *, by: rsa.RSAPrivateKey | None = None, key_id: str = KEY_ID, **claims: Any) -> str:
    """As Pub/Sub makes it."""
    at = int(now.timestamp())
    usual = {"iss": "https://accounts.google.com", "aud": AUDIENCE, "email": ACCOUNT, "email_verified": True,
             "iat": at, "exp": at + 3_600, "sub": "1", "azp": "1"}  # fmt: skip
    signer = crypt.RSASigner.from_string(private_pem(by or key()), key_id)
    return jwt.encode(signer, {name: value for name, value in (usual | claims).items() if value is not None}).decode()


@dataclass
class Lent:
    """A message of the subscription. `until`: nobody else gets it before."""

    message: dict[str, Any]
    until: float = 0.0
    tries: int = 0


@dataclass
class Google:
    """What the double knows. `refuse`: status and name by verb or path; `asked`: what was asked for, in order. `hold`:
    what nobody gets an answer to, and what is not done either; whoever has asked is in `held`."""

    url: str = ""
    ack_deadline_s: float = 10.0
    messages: dict[str, Lent] = field(default_factory=dict)
    operations: list[dict[str, Any]] = field(default_factory=list)
    unreachables: list[str] = field(default_factory=list)
    subscription: dict[str, Any] = field(default_factory=dict)
    sinks: list[dict[str, Any]] = field(default_factory=list)
    permissions: list[str] = field(default_factory=lambda: ["pubsub.subscriptions.consume"])
    of_project: list[str] = field(default_factory=list)
    publishers: list[str] = field(default_factory=lambda: [WRITER, PUBSUB_ITSELF])
    refuse: dict[str, tuple[int, str]] = field(default_factory=dict)
    hold: set[str] = field(default_factory=set)
    held: set[str] = field(default_factory=set)
    keys: dict[str, str] = field(default_factory=lambda: {KEY_ID: certificate()})
    asked: list[tuple[str, Any]] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    skew_s: float = 0.0
    changed: threading.Condition = field(default_factory=threading.Condition)

    def __post_init__(self) -> None:
        topic = f"projects/{PROJECT}/topics/liver-notices"
        self.subscription = {"name": NAME, "topic": topic, "ackDeadlineSeconds": 30, "state": "ACTIVE",
            "expirationPolicy": {}, "messageRetentionDuration": "3600s",
            "deadLetterPolicy": {"deadLetterTopic": f"{topic}-dead", "maxDeliveryAttempts": 5}}  # fmt: skip
        wanted = 'protoPayload.methodName = ("compute.instances.preempted")'
        destination = f"pubsub.googleapis.com/{topic}"
        self.sinks = [{"name": "liver", "destination": destination, "filter": wanted, "writerIdentity": WRITER}]

    def publish(self, data: str) -> None:
        number = str(len(self.asked) + len(self.messages) + 1) + uuid4().hex[:6]
        message = {"data": base64.b64encode(data.encode()).decode(), "messageId": number,
                   "publishTime": datetime.now(UTC).isoformat()}  # fmt: skip
        with self.changed:
            self.messages[number] = Lent(checked("pubsub.v1", "PubsubMessage", message))
            self.changed.notify_all()

    def times(self, what: str) -> int:
        return sum(name == what for name, _ in self.asked)

    def credentials(self, folder: Path) -> Path:
        """A file of a service account, whose tokens the double makes."""
        path = folder / "account.json"
        path.write_text(json.dumps({
            "type": "service_account", "project_id": PROJECT, "private_key_id": "1", "private_key": private_pem(key()),
            "client_email": f"service@{PROJECT}.iam.gserviceaccount.com", "client_id": "1",
            "token_uri": f"{self.url}/token"}))  # fmt: skip
        return path

    def pull(self, body: dict[str, Any], wait_s: float = 0.5) -> dict[str, Any]:
        end = time.monotonic() + wait_s
        with self.changed:
            while not (free := [n for n, one in self.messages.items() if one.until <= time.monotonic()]):
                if time.monotonic() >= end:
                    return {}
                self.changed.wait(0.05)
            found = []
            for name in free[: body["maxMessages"]]:
                one = self.messages[name]
                one.until, one.tries = time.monotonic() + self.ack_deadline_s, one.tries + 1
                found.append({"ackId": f"{name}/{one.tries}", "message": one.message, "deliveryAttempt": one.tries})
        return checked("pubsub.v1", "PullResponse", {"receivedMessages": found})

    def acknowledge(self, body: dict[str, Any]) -> dict[str, Any]:
        with self.changed:
            for name in body["ackIds"]:
                self.messages.pop(name.partition("/")[0], None)
        return {}

    def modify(self, body: dict[str, Any]) -> dict[str, Any]:
        with self.changed:
            for name in body["ackIds"]:
                if (one := self.messages.get(name.partition("/")[0])) is not None:
                    one.until = time.monotonic() + body["ackDeadlineSeconds"]
        return {}

    def test_permissions(self, body: dict[str, Any]) -> dict[str, Any]:
        held = [name for name in body["permissions"] if name in self.permissions]
        return checked("pubsub.v1", "TestIamPermissionsResponse", {"permissions": held})

    def test_project(self, content: bytes | None) -> dict[str, Any]:
        method = discovery("cloudresourcemanager.v3")["resources"]["projects"]["methods"]["testIamPermissions"]
        assert method["httpMethod"] == "POST" and method["flatPath"] == "v3/projects/{projectsId}:testIamPermissions"
        body = checked("cloudresourcemanager.v3", "TestIamPermissionsRequest", json.loads(content or b"{}"))
        held = [name for name in body["permissions"] if name in self.of_project]
        return checked("cloudresourcemanager.v3", "TestIamPermissionsResponse", {"permissions": held})

    def topic_policy(self) -> dict[str, Any]:
        topics = discovery("pubsub.v1")["resources"]["projects"]["resources"]["topics"]["methods"]
        method = topics["getIamPolicy"]
        assert (method["httpMethod"], method["response"]["$ref"]) == ("GET", "Policy")
        bindings = [{"role": "roles/pubsub.publisher", "members": self.publishers}] if self.publishers else []
        return checked("pubsub.v1", "Policy", {"version": 1, "etag": "BwXhqDVt", "bindings": bindings})

    def list_operations(self, query: dict[str, list[str]]) -> dict[str, Any]:
        known = discovery("compute.v1")["resources"]["globalOperations"]["methods"]["aggregatedList"]["parameters"]
        common = discovery("compute.v1")["parameters"]
        assert set(query) <= set(known) | set(common), f"no such parameters: {set(query) - set(known)}"
        since = datetime.fromisoformat(query["filter"][0].partition('insertTime >= "')[2].partition('"')[0])
        found = [one for one in self.operations if datetime.fromisoformat(one["insertTime"]) >= since]
        begin, size = int(query.get("pageToken", ["0"])[0]), int(query.get("maxResults", ["500"])[0])
        zones: dict[str, Any] = {}
        for one in found[begin : begin + size]:
            zones.setdefault("zones/us-central1-a", {"operations": []})["operations"].append(one)
        answer: dict[str, Any] = {"items": zones, "kind": "compute#operationAggregatedList"}
        if begin + size < len(found):
            answer["nextPageToken"] = str(begin + size)
        if self.unreachables:
            answer["unreachables"] = self.unreachables
        return checked("compute.v1", "OperationAggregatedList", answer)


def operation(machine: str, at: datetime, *, kind: str = "compute.instances.preempted") -> dict[str, Any]:
    """As Compute Engine lists it."""
    number = str(uuid4().int % 2**63)
    link = f"https://www.googleapis.com/compute/v1/projects/{PROJECT}/zones/us-central1-a"
    return {"id": number, "name": f"systemevent-{number}", "operationType": kind, "targetId": machine, "user": "system",
            "targetLink": f"{link}/instances/vm", "status": "DONE", "statusMessage": "Instance was preempted.",
            "insertTime": at.isoformat(), "startTime": at.isoformat(), "endTime": at.isoformat(), "progress": 100,
            "zone": link, "kind": "compute#operation"}  # fmt: skip


def entry(
    machine: str, at: datetime, *, method: str = "compute.instances.preempted", number: str = ""
) -> dict[str, Any]:
    """As Cloud Logging sends it."""
    labels = {"instance_id": machine, "project_id": PROJECT, "zone": "us-central1-a"}
    payload = {"@type": "type.googleapis.com/google.cloud.audit.AuditLog", "serviceName": "compute.googleapis.com",
               "methodName": method, "resourceName": f"projects/{PROJECT}/zones/z/instances/vm"}  # fmt: skip
    found = {"insertId": number or uuid4().hex, "severity": "INFO", "timestamp": at.isoformat(),
             "logName": f"projects/{PROJECT}/logs/cloudaudit.googleapis.com%2Fsystem_event",
             "resource": {"type": "gce_instance", "labels": labels}, "protoPayload": payload}  # fmt: skip
    return checked("logging.v2", "LogEntry", found)


class _Handler(BaseHTTPRequestHandler):
    google: Google
    protocol_version = "HTTP/1.1"

    def date_time_string(self, timestamp: float | None = None) -> str:
        return format_datetime(datetime.now(UTC) + timedelta(seconds=self.google.skew_s), usegmt=True)

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def do_GET(self) -> None:
        self._answer(None)

    def do_POST(self) -> None:
        content = self.rfile.read(int(self.headers.get("Content-Length", "0")))
        self._answer(content)

    def _answer(self, content: bytes | None) -> None:
        try:
            status, found = self._found(content)
        except ConnectionAbortedError:
            self.close_connection = True
            return
        except Exception as error:
            self.google.wrong.append(f"{self.path}: {type(error).__name__}: {error}")
            status, found = 400, {"error": {"code": 400, "status": "INVALID_ARGUMENT", "message": str(error)}}
        body = json.dumps(found).encode()
        # Whoever asked may have been killed meanwhile.
        with suppress(ConnectionError):
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

    def _found(self, content: bytes | None) -> tuple[int, Any]:
        google, where = self.google, urlsplit(self.path)
        what = where.path.rpartition(":")[2] if ":" in where.path else where.path
        google.asked.append((what, content))
        with google.changed:
            if what in google.hold:
                google.held.add(what)
                while what in google.hold:
                    google.changed.wait(0.05)
                raise ConnectionAbortedError(f"{what} was held, and is dropped")
        if what in google.refuse:
            status, name = google.refuse[what]
            return status, {"error": {"code": status, "status": name, "message": "as the test wants"}}
        if what == "/certs":
            return 200, google.keys
        if what == "/token":
            return 200, {"access_token": "ya29.double", "expires_in": 3_600, "token_type": "Bearer"}
        token = self.headers.get("Authorization", "").removeprefix("Bearer ")
        assert token == "ya29.double" or jwt.decode(token, certs=certificate(), verify=True), "no token"
        if what == f"/compute/v1/projects/{PROJECT}/aggregated/operations" and content is None:
            return 200, google.list_operations(parse_qs(where.query))
        if what == f"/v2/projects/{PROJECT}/sinks" and content is None:
            return 200, checked("logging.v2", "ListSinksResponse", {"sinks": google.sinks})
        if where.path == f"/v3/projects/{PROJECT}:testIamPermissions":
            return 200, google.test_project(content)
        if re.fullmatch(rf"/v1/projects/{PROJECT}/topics/liver-notices(-dead)?:getIamPolicy", where.path):
            assert content is None, "getIamPolicy has no body"
            return 200, google.topic_policy()
        if what == f"/v1/{NAME}" and content is None:
            return 200, checked("pubsub.v1", "Subscription", google.subscription)
        return self._verb(what, where.path, content)

    def _verb(self, what: str, path: str, content: bytes | None) -> tuple[int, Any]:
        google = self.google
        verbs = {"pull": ("PullRequest", google.pull), "acknowledge": ("AcknowledgeRequest", google.acknowledge),
                 "modifyAckDeadline": ("ModifyAckDeadlineRequest", google.modify),
                 "testIamPermissions": ("TestIamPermissionsRequest", google.test_permissions)}  # fmt: skip
        methods = discovery("pubsub.v1")["resources"]["projects"]["resources"]["subscriptions"]["methods"]
        assert path == f"/v1/{NAME}:{what}" and what in verbs and methods[what]["httpMethod"] == "POST", path
        schema, answer = verbs[what]
        assert methods[what]["request"]["$ref"] == schema
        return 200, answer(checked("pubsub.v1", schema, json.loads(content or b"{}")))


@contextmanager
def google_double() -> Iterator[Google]:
    """One that answers until the end of the block, and was asked for nothing that Google does not know."""
    google = Google()
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"google": google}))
    server.daemon_threads = True
    google.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    try:
        yield google
    finally:
        server.shutdown()
        server.server_close()
        thread.join(5)
    assert not google.wrong, google.wrong
