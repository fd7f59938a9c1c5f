"""One end of a measured wire, a process of its own that the zygote forks as it forks ranks, and as the same user: what
the kernel forbids to one it forbids to the other.

The source hosts a store for the two, says where it is found, and ends when the reader has told it to there. Each says
one line on `control`: what it found, or why it failed.
"""

import contextlib
import json
import socket
import time
from typing import Any

from agent.supervisor.child_entry import LastStep

LIMIT_S = 30.0
"""For each end."""
_OVER = "over"


def serve(spec: dict[str, Any], control: socket.socket, _: LastStep) -> int:
    """The end that is read. `spec` has `name`, `host`, `relay` and `rdma`."""
    from agent.supervisor.store_child import host_store
    from liver_core.transport.wire_check import offer

    until = time.monotonic() + LIMIT_S
    store, port = host_store(spec["host"])
    address = {"host": spec["host"], "port": port}
    endpoint = _endpoint(spec, address)
    try:
        say(control, {"store": address, "address": offer(endpoint).decode()})
        while time.monotonic() < until and not store.check([_OVER]):
            time.sleep(0.1)
    except Exception as error:
        say(control, {"error": str(error)})
        raise
    finally:
        endpoint.close()
    return 0


def read(spec: dict[str, Any], control: socket.socket, _: LastStep) -> int:
    """The end that reads. `spec` has `store` and `address` of the source, and `bytes_max`, beside what `serve` gets."""
    from liver_core.transport.wire_check import measure

    deadline = time.monotonic() + LIMIT_S
    endpoint = _endpoint(spec, spec["store"])
    try:
        speed = measure(endpoint, spec["address"].encode(), deadline, bytes_max=spec["bytes_max"])
        found = {"bytes_per_s": speed.bytes_per_s, "latency_s": speed.latency_s}
        say(control, {"wire": speed.wire.way, "refused": speed.wire.refused, **found})
    except Exception as error:
        say(control, {"error": str(error)})
        raise
    finally:
        endpoint.close()
        with contextlib.suppress(Exception):
            _store(spec["store"]).set(_OVER, "")
    return 0


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


def _store(address: dict[str, Any]) -> Any:
    from liver_core.handoff import StoreAddress
    from liver_core.worlds.groups import STORE_ANSWER_S, connect_store

    return connect_store(StoreAddress(**address), timeout_s=STORE_ANSWER_S, answer_s=STORE_ANSWER_S)
