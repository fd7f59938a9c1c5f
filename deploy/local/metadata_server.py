"""A loopback HTTP server for IMDSv2 and GCP's metadata: one server is the metadata of one instance.

For the demo, rehearsals and tests outside a cloud. Not a mock: the agent uses real HTTP, and token rules, long polls,
status codes and bodies are the clouds'. An `/admin` path, which no cloud has, schedules the announcements.

    python -m deploy.local.metadata_server --port 0 --instance-id i-0a1
"""

import argparse
import contextlib
import json
import secrets
import signal
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, urlsplit

TTL_HEADER = "X-aws-ec2-metadata-token-ttl-seconds"
TOKEN_HEADER = "X-aws-ec2-metadata-token"
TTL_MAX_S = 21_600
TOKENS_MAX = 1_000
HANG_S = 30.0
ADMIN_BODY_MAX = 4_096
META_DATA = "/latest/meta-data/"
GCP_DATA = "/computeMetadata/"
GCP_INSTANCE = GCP_DATA + "v1/instance/"
GCP_PREEMPTED = GCP_INSTANCE + "preempted"
GCP_NO_MAINTENANCE = json.dumps({"error": "no notifications have been received yet, try again later"})
GCP_FLAVOR = {"Metadata-Flavor": "Google"}


class Mode(StrEnum):
    """How the server answers metadata reads."""

    OK = "ok"
    ERROR = "error"
    HANG = "hang"
    MALFORMED = "malformed"


@dataclass(slots=True)
class Instance:
    """The metadata of one instance. Times are seconds of `time.time()`."""

    instance_id: str = "i-00000000000000001"
    instance_type: str = "p4d.24xlarge"
    zone: str = "us-east-1a"
    mode: Mode = Mode.OK
    action: str = ""
    announced_at: float = 0.0
    ends_at: float = 0.0
    rebalance_at: float = 0.0
    group_state: str = ""
    maintenance_at: float = 0.0
    tokens: dict[str, float] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)
    changed: threading.Condition = field(default_factory=threading.Condition)

    def issue_token(self, ttl_s: int) -> str:
        """A new session token. If there are too many, the oldest are dropped."""
        token = secrets.token_urlsafe(40)
        with self.lock:
            while len(self.tokens) >= TOKENS_MAX:
                self.tokens.pop(next(iter(self.tokens)))
            self.tokens[token] = time.time() + ttl_s
        return token

    def token_is_valid(self, token: str) -> bool:
        """Whether the token was issued here and has not expired."""
        with self.lock:
            return self.tokens.get(token, 0.0) > time.time()

    def read(self, path: str) -> str | None:
        """The body of one metadata key, None for 404."""
        now = time.time()
        announced = bool(self.action) and now >= self.announced_at
        ends = _rfc3339(self.ends_at)
        match path:
            case "spot/instance-action" if announced:
                return json.dumps({"action": self.action, "time": ends})
            case "spot/termination-time" if announced and self.action == "terminate":
                return ends
            case "events/recommendations/rebalance" if 0 < self.rebalance_at <= now:
                return json.dumps({"noticeTime": _rfc3339(self.rebalance_at)})
            case "autoscaling/target-lifecycle-state" if self.group_state:
                return self.group_state
            case "events/maintenance/scheduled":
                return json.dumps([self._scheduled_event()] if self.maintenance_at else [])
            case "instance-id":
                return self.instance_id
            case "instance-type":
                return self.instance_type
            case "instance-life-cycle":
                return "spot"
            case "placement/availability-zone":
                return self.zone
            case "placement/region":
                return self.zone.rstrip("abcdef")
            case _:
                return None

    def _scheduled_event(self) -> dict[str, str]:
        begins, ends = (_http_date(self.maintenance_at + after_s) for after_s in (0.0, 7_200.0))
        return {"NotBefore": begins, "NotAfter": ends, "Code": "system-reboot", "Description": "scheduled reboot",
                "EventId": "instance-event-0d59937288b749b32", "State": "active"}  # fmt: skip

    def read_gcp(self, key: str) -> str | None:
        """The body of one key under `instance/` that nobody waits for, None for 404."""
        match key:
            case "maintenance-event":
                return "TERMINATE_ON_HOST_MAINTENANCE" if 0 < self.maintenance_at <= time.time() + 60 else "NONE"
            case "upcoming-maintenance" if self.maintenance_at:
                status = "ONGOING" if self.maintenance_at <= time.time() else "PENDING"
                window = {"windowStartTime": _rfc3339(self.maintenance_at),
                          "windowEndTime": _rfc3339(self.maintenance_at + 7_200.0)}  # fmt: skip
                return json.dumps({"type": "SCHEDULED", "canReschedule": False, "maintenanceStatus": status, **window})
            case "upcoming-maintenance":
                return GCP_NO_MAINTENANCE
            case "id":
                return str(int.from_bytes(self.instance_id.encode()[-7:], "big"))
            case "zone":
                return f"projects/123456789012/zones/{self.zone}"
            case _:
                return None

    def await_preempted(self, last_etag: str, timeout_s: float) -> tuple[str, str]:
        """TRUE or FALSE with its ETag, once that is another one than `last_etag` or the time is over."""
        ends = time.time() + timeout_s
        with self.changed:
            while True:
                now = time.time()
                is_ahead = bool(self.action) and now < self.announced_at
                value = "TRUE" if self.action and not is_ahead else "FALSE"
                etag = value if value == "FALSE" else f"{value}-{self.announced_at:.6f}"
                if etag != last_etag or now >= ends:
                    return value, etag
                self.changed.wait((min(ends, self.announced_at) if is_ahead else ends) - now)

    def change(self, request: dict[str, object]) -> str:
        """Apply one admin request; returns the problem, empty if there is none."""
        with self.changed:
            self.changed.notify_all()
            return self._change(request)

    def _change(self, request: dict[str, object]) -> str:
        match request.get("do"):
            case "interrupt":
                notice_in_s, ends_in_s = _number(request, "notice_in_s", 0.0), _number(request, "ends_in_s", 120.0)
                action = request.get("action", "terminate")
                if notice_in_s is None or ends_in_s is None or action not in ("terminate", "stop", "hibernate"):
                    return "interrupt needs numbers notice_in_s and ends_in_s, and action terminate, stop or hibernate"
                self.announced_at, self.ends_at = time.time() + notice_in_s, time.time() + ends_in_s
                self.action = str(action)
            case "rebalance":
                self.rebalance_at = time.time()
            case "maintenance":
                starts_in_s = _number(request, "starts_in_s", 3_600.0)
                if starts_in_s is None:
                    return "maintenance needs a number starts_in_s"
                self.maintenance_at = time.time() + starts_in_s
            case "group":
                self.group_state = str(request.get("state", "Terminated"))
            case "clear":
                self.action, self.rebalance_at, self.maintenance_at = "", 0.0, 0.0
                self.group_state = "InService" if self.group_state else ""
            case "drop_tokens":
                with self.lock:
                    self.tokens.clear()
            case "mode" if request.get("mode") in list(Mode):
                self.mode = Mode(str(request["mode"]))
            case _:
                return (
                    f"do must be interrupt, rebalance, maintenance, group, clear, drop_tokens, mode ({', '.join(Mode)})"
                )
        return ""


class ImdsServer:
    """Serves one instance from a thread of its own; `url` is what LIVER_AGENT_AWS_IMDS_URL takes."""

    def __init__(self, instance: Instance | None = None, host: str = "127.0.0.1", port: int = 0) -> None:
        self.instance = instance or Instance()
        self._http = _HttpServer((host, port), _Handler)
        self._http.instance = self.instance
        self._thread = threading.Thread(target=self._http.serve_forever, args=(0.05,), name="imds", daemon=True)
        self.url = f"http://{host}:{self._http.server_address[1]}"

    def start(self) -> "ImdsServer":
        """Start answering."""
        self._thread.start()
        return self

    def stop(self) -> None:
        """Stop answering and free the port."""
        self._http.stopping.set()
        self._http.shutdown()
        self._http.server_close()
        self._thread.join(timeout=5.0)


class _HttpServer(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False

    def __init__(self, address: tuple[str, int], handler: type[BaseHTTPRequestHandler]) -> None:
        super().__init__(address, handler)
        self.instance = Instance()
        self.stopping = threading.Event()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server_version = "EC2ws"
    timeout = 60
    server: _HttpServer  # pyright: ignore[reportIncompatibleVariableOverride]

    def do_PUT(self) -> None:
        """A session token."""
        if self.path != "/latest/api/token":
            return self._answer(404)
        if not self._mode_lets_through():
            return None
        if self.headers.get("X-Forwarded-For") is not None:
            return self._answer(403)
        ttl = self.headers.get(TTL_HEADER, "")
        if not ttl.isdigit() or not 1 <= int(ttl) <= TTL_MAX_S:
            return self._answer(400)
        return self._answer(200, self.server.instance.issue_token(int(ttl)), {TTL_HEADER: ttl})

    def do_GET(self) -> None:
        """A metadata key."""
        if not self._mode_lets_through():
            return None
        if self.path.startswith(GCP_DATA):
            return self._answer_gcp()
        if not self.server.instance.token_is_valid(self.headers.get(TOKEN_HEADER, "")):
            return self._answer(401)
        key = self.path.removeprefix(META_DATA)
        body = self.server.instance.read(key) if self.path.startswith(META_DATA) else None
        if body is None:
            return self._answer(404)
        if self.server.instance.mode is Mode.MALFORMED and body.startswith("{"):
            body = body[: len(body) // 2]
        return self._answer(200, body)

    def _answer_gcp(self) -> None:
        if self.headers.get("Metadata-Flavor") != GCP_FLAVOR["Metadata-Flavor"]:
            return self._answer(403)
        asked = urlsplit(self.path)
        if asked.path != GCP_PREEMPTED:
            body = self.server.instance.read_gcp(asked.path.removeprefix(GCP_INSTANCE))
            return self._answer(404 if body is None else 200, body or "", GCP_FLAVOR)
        query = {name: values[-1] for name, values in parse_qs(asked.query).items()}
        waits_s = query.get("timeout_sec", "") if query.get("wait_for_change") == "true" else "0"
        if waits_s and not waits_s.isdigit():
            return self._answer(400, "timeout_sec must be a whole number of seconds", GCP_FLAVOR)
        value, etag = self.server.instance.await_preempted(query.get("last_etag", ""), float(waits_s or HANG_S))
        return self._answer(200, value, {**GCP_FLAVOR, "ETag": etag})

    def do_POST(self) -> None:
        """The admin part: one JSON object, see `Instance.change`."""
        length = self.headers.get("Content-Length", "")
        if self.path != "/admin" or not length.isdigit() or int(length) > ADMIN_BODY_MAX:
            return self._answer(404)
        try:
            request = json.loads(self.rfile.read(int(length)))
        except ValueError:
            return self._answer(400, "the body must be JSON")
        problem = self.server.instance.change(request) if isinstance(request, dict) else "the body must be an object"
        return self._answer(400 if problem else 200, problem or "ok")

    def log_message(self, format: str, *args: object) -> None:
        """Log nothing: one line for each poll would be noise."""

    def _mode_lets_through(self) -> bool:
        match self.server.instance.mode:
            case Mode.ERROR:
                self._answer(500, "internal error")
                return False
            case Mode.HANG:
                self.server.stopping.wait(HANG_S)
                self.close_connection = True
                return False
            case Mode.OK | Mode.MALFORMED:
                return True

    def _answer(self, status: int, body: str = "", headers: dict[str, str] | None = None) -> None:
        data = body.encode()
        with contextlib.suppress(OSError):
            self.send_response(status)
            for name, value in (headers or {}).items():
                self.send_header(name, value)
            self.send_header("Content-Type", "text/plain")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)


def main(arguments: Sequence[str] | None = None) -> int:
    """Serve until SIGTERM or SIGINT; the first line on standard output is the URL."""
    parser = argparse.ArgumentParser(prog="python -m deploy.local.metadata_server", description=__doc__)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=0, help="0 takes a free port")
    parser.add_argument("--instance-id", default=Instance().instance_id)
    options = parser.parse_args(arguments)
    try:
        server = ImdsServer(Instance(instance_id=options.instance_id), options.host, options.port).start()
    except OSError as error:
        sys.stderr.write(f"cannot listen on {options.host}:{options.port}: {error.strerror}\n")
        return 2
    sys.stdout.write(f"{server.url}\n")
    sys.stdout.flush()
    ended = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: ended.set())
    while not ended.wait(1.0):
        pass
    server.stop()
    return 0


def _number(request: dict[str, object], name: str, default: float) -> float | None:
    value = request.get(name, default)
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def _http_date(seconds: float) -> str:
    moment = datetime.fromtimestamp(0, UTC) + timedelta(seconds=seconds)
    return moment.strftime("%d %b %Y %H:%M:%S GMT")


def _rfc3339(seconds: float) -> str:
    moment = datetime.fromtimestamp(0, UTC) + timedelta(seconds=seconds)
    return moment.strftime("%Y-%m-%dT%H:%M:%SZ")


if __name__ == "__main__":
    sys.exit(main())
