"""The store of one generation: torch's TCPStore in a process of its own, forked by the zygote.

It listens on the job's private address only. Each client of `control`, its unix socket, gets one line, `{"type":
"store", "host", "port"}`; a client that sends the line `{"type": "stop"}` ends it.
"""

import contextlib
import json
import select
import signal
import socket
import sys
import time
from datetime import timedelta
from typing import Any

from agent.supervisor.child_entry import LastStep

ORPHAN_S = 6 * 3_600.0
"""A store without a connected agent for this long ends: its node was forgotten."""

CLIENTS_MAX = 16
BACKLOG = 4_096


def run(spec: dict[str, Any], control: socket.socket, _: LastStep) -> int:
    """Serve until stopped. `spec` has `host` and optionally `orphan_s`."""
    store, port = host_store(spec["host"])
    sys.stdout.write(f"store listens on {spec['host']}:{port}\n")
    hello = json.dumps({"type": "store", "host": spec["host"], "port": port}).encode() + b"\n"
    serve_control(control, hello, float(spec.get("orphan_s", ORPHAN_S)))
    del store
    return 0


def host_store(host: str) -> tuple[Any, int]:
    """A store that listens on exactly this address as long as it is kept, and its port."""
    from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

    listener = listen_private(host)
    port = listener.getsockname()[1]
    # Pass a socket that is bound to the private address: by itself TCPStore listens on every interface.
    store = TCPStore(
        host,
        port,
        is_master=True,
        wait_for_workers=False,
        timeout=timedelta(seconds=30),
        master_listen_fd=listener.detach(),
    )
    return store, port


def listen_private(host: str) -> socket.socket:
    """A listening socket on exactly this address, on a free port."""
    family = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][0]
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind((host, 0))
    listener.listen(BACKLOG)
    return listener


def serve_control(control: socket.socket, hello: bytes, orphan_s: float) -> None:
    """Send `hello` to each client. Returns on a stop request, on SIGTERM, or after `orphan_s` without a client."""
    ended: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: ended.append(number))
    reader, writer = socket.socketpair()
    writer.setblocking(False)
    signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
    clients: list[socket.socket] = []
    alone_since = time.monotonic()
    while not ended:
        ready, _, _ = select.select([control, reader, *clients], [], [], 60.0)
        for source in ready:
            if source is control:
                client, _ = control.accept()
                client.settimeout(5.0)
                clients = [*clients[-CLIENTS_MAX + 1 :], client]
                with contextlib.suppress(OSError):
                    client.sendall(hello)
            elif source is not reader:
                if _reads_stop(source):
                    return
                if source.fileno() < 0:
                    clients.remove(source)
        if clients:
            alone_since = time.monotonic()
        elif time.monotonic() - alone_since > orphan_s:
            return


def _reads_stop(client: socket.socket) -> bool:
    """Read one request: whether it is a stop. Closes the connection at its end."""
    try:
        data = client.recv(4_096)
    except OSError:
        data = b""
    if not data:
        client.close()
        return False
    return b'"stop"' in data
