"""A store child without torch: it listens and says where, and nobody ever asks it for anything."""

import json
import socket
from typing import Any

from agent.supervisor.child_entry import LastStep
from agent.supervisor.store_child import ORPHAN_S, listen_private, serve_control


def run(spec: dict[str, Any], control: socket.socket, _: LastStep) -> int:
    """The zygote's entry."""
    with listen_private(spec["host"]) as listener:
        hello = {"type": "store", "host": spec["host"], "port": listener.getsockname()[1]}
        serve_control(control, json.dumps(hello).encode() + b"\n", ORPHAN_S)
    return 0
