"""The stream relays of one node: a process for each handoff in which other machines have a part.

A relay runs as the agent's user, so that job code never sees the handoff's key. It outlives the agent, and ends by
itself when no rank of this node is connected to it any more.
"""

import asyncio
import contextlib
import json
import logging
import os
import signal
import sys
import uuid
from collections import OrderedDict
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from agent.supervisor.zygote_client import python_path

REMEMBERED_MAX = 16
READY_S, END_S = 20.0, 5.0
LISTEN_S = 3.0
"""So long a relay tries to get its port, which the one before may be about to give up."""
BRIEF_S = 60.0
"""A relay of a measurement that nobody has used for so long ends, if its agent is gone."""
_log = logging.getLogger(__name__)


class RelayRefused(Exception):
    """No relay listens; the text says why."""


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
        self._processes: dict[str, asyncio.subprocess.Process] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._brief: set[asyncio.subprocess.Process] = set()
        self._launching = asyncio.Lock()

    def name_for(self, handoff_id: str, peer_keys: Sequence[str], stream_gbps_max: float | None = None) -> str:
        """The local name of the relay for this handoff, which is started at the first call; ranks wait for it to
        listen. Empty without a key. `stream_gbps_max`: as in the job file."""
        if not peer_keys:
            return ""
        if handoff_id not in self._names:
            self._names[handoff_id] = name = f"liver-relay-{uuid.uuid4()}"
            while len(self._names) > REMEMBERED_MAX:
                self._processes.pop(self._names.popitem(last=False)[0], None)
            task = asyncio.create_task(self._start(name, handoff_id, tuple(peer_keys), stream_gbps_max))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        return self._names[handoff_id]

    def expect_nobody(self, handoff_id: str) -> None:
        """This handoff is over: no rank comes to its relay any more, which ends once none is connected."""
        process = self._processes.pop(handoff_id, None)
        if process is not None and process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(signal.SIGUSR1)

    @contextlib.asynccontextmanager
    async def for_a_while(self, check_id: str, peer_keys: Sequence[str]) -> AsyncIterator[str]:
        """The local name of a relay that listens, for what can wait: it is ended as soon as a handoff needs one, which
        may need its port. Raises RelayRefused."""
        name = f"liver-relay-{uuid.uuid4()}"
        config = self._config(name, check_id, peer_keys) | {"unused_s": BRIEF_S}
        async with self._launching:
            process, said = await self._launch(config, brief=True)
        try:
            if "error" in said:
                raise RelayRefused(f"no stream relay: {said['error']}")
            yield name
        finally:
            if process is not None:
                await self._end_brief(process)

    async def close(self) -> None:
        """Relays keep running; those that are being started are left to themselves."""
        for task in tuple(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _start(self, name: str, handoff_id: str, peer_keys: Sequence[str], gbps_max: float | None) -> None:
        config = self._config(name, handoff_id, peer_keys) | {"stream_gbps_max": gbps_max, "listen_s": LISTEN_S}
        async with self._launching:
            await asyncio.gather(*map(self._end_brief, tuple(self._brief)))
            process, said = await self._launch(config)
        if process is not None and handoff_id in self._names:
            self._processes[handoff_id] = process
        if "error" in said:
            _log.warning(
                "handoff %s: no stream relay, other machines read this node's ranks over gloo in the pause: %s",
                *(handoff_id, said["error"]),
            )

    async def _end_brief(self, process: asyncio.subprocess.Process) -> None:
        self._brief.discard(process)
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.terminate()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(process.wait(), END_S)

    def _config(self, name: str, handoff_id: str, peer_keys: Sequence[str]) -> dict[str, Any]:
        return {
            "local": name,
            "host": self._settings.host,
            "ports": list(self._settings.ports),
            "handoff_id": handoff_id,
            "peer_keys": list(peer_keys),
            "uids": list(self._settings.uids),
        }

    def _log(self) -> BinaryIO:
        return open(self._settings.log_path, "ab")

    async def _launch(
        self, config: dict[str, Any], *, brief: bool = False
    ) -> tuple[asyncio.subprocess.Process | None, dict[str, object]]:
        """A new relay, and what it says first: where it listens, or the error."""
        process = None
        try:
            with self._log() as log:
                process = await asyncio.create_subprocess_exec(
                    *(sys.executable, "-P", "-m", "liver_core.transport.relay"),
                    stdin=asyncio.subprocess.PIPE,
                    stdout=asyncio.subprocess.PIPE,
                    stderr=log,
                    env={**os.environ, "PYTHONPATH": python_path()},
                    start_new_session=True,
                )
            if brief:
                self._brief.add(process)
            assert process.stdin is not None and process.stdout is not None
            process.stdin.write(json.dumps(config).encode() + b"\n")
            with contextlib.suppress(ConnectionError):
                await process.stdin.drain()
            process.stdin.close()
            async with asyncio.timeout(READY_S):
                line = await process.stdout.readline()
            return process, json.loads(line or b'{"error": "it ended before it listened"}')
        except asyncio.CancelledError:
            if brief and process is not None:
                await self._end_brief(process)
            raise
        except (OSError, TimeoutError, ValueError) as error:
            return process, {"error": str(error) or "it did not listen in time"}


def uids_of_ranks(job_uid: int | None) -> tuple[int, ...]:
    """The users that a relay answers: that of --job-user, else the agent's own."""
    return (os.getuid() if job_uid is None else job_uid,)
