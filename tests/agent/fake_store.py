"""A store child without torch: it listens and says where, and nobody ever asks it for anything."""

import json
from typing import Any

from agent.supervisor.store_child import ORPHAN_S, listen_private, serve_control
from agent.supervisor.zygote import listen


def run(spec: dict[str, Any]) -> int:
    """The zygote's entry."""
    with listen_private(spec["host"]) as listener:
        hello = {"type": "store", "host": spec["host"], "port": listener.getsockname()[1]}
        serve_control(listen(spec["socket_path"]), json.dumps(hello).encode() + b"\n", ORPHAN_S)
    return 0
