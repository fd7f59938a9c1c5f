"""A proxy on loopback that passes requests of AWS on, but for some, which nobody gets an answer to."""

import http.client
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlsplit

PASSED_S = 60.0
_OWN = {"content-length", "transfer-encoding", "connection"}


@dataclass
class HeldRequests:
    """`hold`: calls that are not passed on, such as DeleteMessageBatch; each that came is in `held`."""

    beyond: str
    url: str = ""
    hold: set[str] = field(default_factory=set)
    held: set[str] = field(default_factory=set)
    changed: threading.Condition = field(default_factory=threading.Condition)

    def is_held(self, call: str) -> bool:
        """Wait while the call is held. Whether it was, and must not be passed on any more."""
        with self.changed:
            if call not in self.hold:
                return False
            self.held.add(call)
            self.changed.notify_all()
            self.changed.wait_for(lambda: call not in self.hold)
        return True

    def release(self) -> None:
        """Let go of those that are held, which are dropped, and hold none any more."""
        with self.changed:
            self.hold.clear()
            self.changed.notify_all()


class _Handler(BaseHTTPRequestHandler):
    requests: HeldRequests
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: object) -> None:
        pass

    def do_POST(self) -> None:
        content = self.rfile.read(int(self.headers.get("Content-Length", "0")))
        if self.requests.is_held(self.headers.get("X-Amz-Target", "").rpartition(".")[2]):
            self.close_connection = True
            return
        beyond = http.client.HTTPConnection(urlsplit(self.requests.beyond).netloc, timeout=PASSED_S)
        try:
            headers = {name: value for name, value in self.headers.items() if name.lower() not in _OWN}
            beyond.request("POST", self.path, content, headers)
            answer = beyond.getresponse()
            body = answer.read()
        finally:
            beyond.close()
        # Whoever asked may have been killed meanwhile.
        with suppress(ConnectionError):
            self.send_response(answer.status)
            for name, value in answer.getheaders():
                if name.lower() not in _OWN:
                    self.send_header(name, value)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)


@contextmanager
def held_requests(beyond: str) -> Iterator[HeldRequests]:
    """One that listens until the end of the block, in front of this address."""
    found = HeldRequests(beyond)
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"requests": found}))
    server.daemon_threads = True
    found.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    try:
        yield found
    finally:
        found.release()
        server.shutdown()
        server.server_close()
