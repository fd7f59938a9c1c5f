"""The stream relays of one node: a process for each handoff in which other machines have a part.

A relay runs as the agent's user, so that job code never sees the handoff's key. It outlives the agent, and ends by
itself when no rank of this node is connected to it any more.
"""

import asyncio
import contextlib
import json
import logging
import os
import sys
import uuid
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

REMEMBERED_MAX = 16
READY_S = 20.0
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RelaySettings:
    """`ports`: on which a relay may listen, the first and the last; 0: any. `uids`: of the users that ranks run as."""

    host: str
    ports: tuple[int, int]
    uids: tuple[int, ...]
    log_path: Path


class StreamRelays:
    """Of all jobs of this node."""

    def __init__(self, settings: RelaySettings) -> None:
        self._settings = settings
        self._names: OrderedDict[str, str] = OrderedDict()
        self._tasks: set[asyncio.Task[None]] = set()

    def name_for(self, handoff_id: str, peer_keys: Sequence[str], stream_gbps_max: float | None = None) -> str:
        """The local name of the relay for this handoff, which is started at the first call; ranks wait for it to
        listen. Empty without a key. `stream_gbps_max`: as in the job file."""
        if not peer_keys:
            return ""
        if handoff_id not in self._names:
            self._names[handoff_id] = name = f"liver-relay-{uuid.uuid4()}"
            while len(self._names) > REMEMBERED_MAX:
                self._names.popitem(last=False)
            task = asyncio.create_task(self._start(name, handoff_id, tuple(peer_keys), stream_gbps_max))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        return self._names[handoff_id]

    async def close(self) -> None:
        """Relays keep running; those that are being started are left to themselves."""
        for task in tuple(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _start(self, name: str, handoff_id: str, peer_keys: Sequence[str], gbps_max: float | None) -> None:
        config = {
            "local": name,
            "host": self._settings.host,
            "ports": list(self._settings.ports),
            "handoff_id": handoff_id,
            "peer_keys": list(peer_keys),
            "uids": list(self._settings.uids),
            "stream_gbps_max": gbps_max,
        }
        try:
            said = await self._run(json.dumps(config).encode() + b"\n")
        except (OSError, TimeoutError, ValueError) as error:
            said = {"error": str(error) or "it did not listen in time"}
        if "error" in said:
            _log.warning(
                "handoff %s: no stream relay, other machines read this node's ranks over gloo in the pause: %s",
                *(handoff_id, said["error"]),
            )

    def _log(self) -> BinaryIO:
        return open(self._settings.log_path, "ab")

    async def _run(self, config: bytes) -> dict[str, object]:
        with self._log() as log:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "liver_core.transport.relay"),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=log,
                start_new_session=True,
            )
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write(config)
        with contextlib.suppress(ConnectionError):
            await process.stdin.drain()
        process.stdin.close()
        async with asyncio.timeout(READY_S):
            return json.loads(await process.stdout.readline() or b'{"error": "it ended before it listened"}')


def uids_of_ranks(job_uid: int | None) -> tuple[int, ...]:
    """The users that a relay answers: that of --job-user, else the agent's own."""
    return (os.getuid() if job_uid is None else job_uid,)
