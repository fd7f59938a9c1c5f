"""One end of a measured wire, a process of its own that the zygote forks as it forks ranks, and as the same user: what
the kernel forbids to one it forbids to the other.

The source hosts a store for the two, says where it is found, and ends when the reader has told it to there. Each says
one line on `control`: what it found, or why it failed.
"""

import contextlib
import json
import socket
import time
from collections.abc import Iterator
from typing import Any

from agent.protocol.wires import REFUSED_MAX
from agent.supervisor.child_entry import LastStep
from liver_core.layout.limits import fitting

LIMIT_S = 90.0
"""For each end: on a machine with EFA the first look at that may take a minute."""
_OVER = "over"


def serve(spec: dict[str, Any], control: socket.socket, _: LastStep) -> int:
    """The end that is read. `spec` has `name`, `host`, `relay` and `rdma`."""
    from agent.supervisor.store_child import host_store
    from liver_core.transport.wire_check import offer

    with contextlib.ExitStack() as stack, told(control):
        store, port = host_store(spec["host"])
        address = {"host": spec["host"], "port": port}
        endpoint = _endpoint(spec, address)
        stack.callback(endpoint.close)
        say(control, {"store": address, "address": offer(endpoint).decode()})
        until = time.monotonic() + LIMIT_S
        while time.monotonic() < until and not store.check([_OVER]):
            time.sleep(0.1)
    return 0


def read(spec: dict[str, Any], control: socket.socket, _: LastStep) -> int:
    """The end that reads. `spec` has `store` and `address` of the source, and `bytes_max`, beside what `serve` gets."""
    from liver_core.transport.wire_check import measure

    with contextlib.ExitStack() as stack, told(control):
        endpoint = _endpoint(spec, spec["store"])
        stack.callback(_tell_source, spec["store"])
        stack.callback(endpoint.close)
        speed = measure(endpoint, spec["address"].encode(), time.monotonic() + LIMIT_S, bytes_max=spec["bytes_max"])
        refused = [fitting(text) for text in speed.wire.refused][:REFUSED_MAX]
        found = {"bytes_per_s": speed.bytes_per_s, "latency_s": speed.latency_s}
        say(control, {"wire": speed.wire.way, "refused": refused, **found})
    return 0


@contextlib.contextmanager
def told(control: socket.socket) -> Iterator[None]:
    """What goes wrong inside is said to the agent, too."""
    try:
        yield
    except Exception as error:
        say(control, {"error": fitting(str(error) or type(error).__name__)})
        raise


def say(control: socket.socket, line: dict[str, Any]) -> None:
    """To the agent, if it still asks."""
    control.settimeout(LIMIT_S)
    with contextlib.suppress(OSError):
        client, _ = control.accept()
        with client:
            client.sendall(json.dumps(line).encode() + b"\n")


def _endpoint(spec: dict[str, Any], store: dict[str, Any]) -> Any:
    from liver_core.handoff import StoreAddress
    from liver_core.transport.endpoint import make_endpoint

    where = StoreAddress(**store)
    return make_endpoint(spec["name"], spec["host"], where, spec["relay"], host_memory_only=not spec["rdma"])


def _tell_source(store: dict[str, Any]) -> None:
    """That this end has read all that it wants."""
    from liver_core.handoff import StoreAddress
    from liver_core.worlds.groups import STORE_ANSWER_S, connect_store

    with contextlib.suppress(Exception):
        where = StoreAddress(**store)
        connect_store(where, timeout_s=STORE_ANSWER_S, answer_s=STORE_ANSWER_S).set(_OVER, "")
