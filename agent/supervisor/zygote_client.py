"""The agent's client of the zygote: starts one or connects to a running one, requests forks, receives exits."""

import asyncio
import contextlib
import itertools
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agent.supervisor.job_user import JobUser, environment_for_jobs
from agent.supervisor.process import ProcessIdentity, is_alive, send_signal
from liver_core.layout.limits import COUNT_MAX, GENERATION_MAX

READY_S = 180.0
"""Importing torch and megatron from a cold disk on a busy machine takes a minute and more."""

ANSWER_S = 30.0
READ_S = 1.0
"""After a limit, to read what has come by then."""
CONNECT_RETRY_S = 0.05
LINE_BYTES_MAX = 8 * 1024 * 1024
GIVEN_UP_MAX = 64


class ZygoteError(Exception):
    """The zygote cannot be used, or it rejected a request; the text says why."""


@dataclass(frozen=True, slots=True)
class ForkRequest:
    """One process to fork, which gets a socket that listens at `socket_path`. A repeated request with the same `name`
    returns the process of the first."""

    name: str
    entry: str
    spec: dict[str, Any]
    log_path: str
    socket_path: str
    environment: dict[str, str]
    workdir: str | None = None


@dataclass(frozen=True, slots=True)
class Exited:
    """A process ended. `code` is negative for a signal, None if it could not be read. `last_step`: generation and
    number of the last step that a rank has made."""

    identity: ProcessIdentity
    code: int | None
    last_step: tuple[int, int] | None = None

    @classmethod
    def from_json(cls, message: dict[str, Any]) -> "Exited":
        """Of the zygote's message; what a job's code has written over the memory of its step is left out."""
        generation, step = message.get("last_step") or (0, 0)
        is_step = 1 <= generation <= GENERATION_MAX and 1 <= step <= COUNT_MAX
        identity = ProcessIdentity.from_json(message)
        return cls(identity, int(message["code"]), (generation, step) if is_step else None)


class ZygoteClient:
    """One connection. `on_exit` is called in the event loop for every child that ended, also before the connection."""

    def __init__(self, socket_path: str, on_exit: Callable[[Exited], None]) -> None:
        self.socket_path = socket_path
        self.hello: dict[str, Any] = {}
        self._on_exit = on_exit
        self._requests = itertools.count(1)
        self._waiting: dict[str, asyncio.Future[dict[str, Any]]] = {}
        self._given_up: dict[str, str] = {}
        """Sockets of forks whose answer did not come in time, by request; of at most `GIVEN_UP_MAX`."""
        self._writer: asyncio.StreamWriter | None = None
        self._reader_task: asyncio.Task[None] | None = None

    @property
    def connected(self) -> bool:
        """Whether requests can be sent."""
        return self._reader_task is not None and not self._reader_task.done()

    @property
    def identity(self) -> ProcessIdentity:
        """The zygote's process, from its hello."""
        return ProcessIdentity.from_json(self.hello)

    async def connect(self, process: ProcessIdentity, timeout_s: float = READY_S) -> None:
        """Wait for the socket and the hello. Raises ZygoteError when the process ends or time runs out."""
        try:
            async with asyncio.timeout(timeout_s):
                reader = await self._open(process)
                line = await reader.readline()
        except TimeoutError:
            raise ZygoteError(f"the zygote (pid {process.pid}) was not ready in {timeout_s:g} s") from None
        if not line:
            raise ZygoteError(f"the zygote (pid {process.pid}) ended while it was importing; see zygote.log")
        self.hello = json.loads(line)
        self._reader_task = asyncio.create_task(self._read(reader))

    async def fork(self, request: ForkRequest, timeout_s: float = ANSWER_S) -> ProcessIdentity:
        """The forked process, or the one that already runs under the name. One that is there only after this has been
        given up is ended, unless it has been asked for again by then."""
        self._given_up = {key: path for key, path in self._given_up.items() if path != request.socket_path}
        answer = await self._ask(
            {
                "op": "fork",
                "name": request.name,
                "entry": request.entry,
                "spec": request.spec,
                "log_path": request.log_path,
                "socket_path": request.socket_path,
                "environment": request.environment,
                "workdir": request.workdir,
            },
            timeout_s,
        )
        return ProcessIdentity.from_json(answer)

    async def forget(self, pids: list[int]) -> None:
        """These exits are stored; the zygote need not report them again."""
        await self._ask({"op": "forget", "pids": pids}, ANSWER_S)

    async def end(self) -> None:
        """End the zygote; its children keep running."""
        with contextlib.suppress(ZygoteError):
            await self._ask({"op": "end"}, ANSWER_S)
        await self.close()

    async def close(self) -> None:
        """Close the connection; the zygote keeps running."""
        if self._reader_task is not None:
            self._reader_task.cancel()
            await asyncio.gather(self._reader_task, return_exceptions=True)
        if self._writer is not None:
            self._writer.close()

    async def _open(self, process: ProcessIdentity) -> asyncio.StreamReader:
        while True:
            try:
                reader, self._writer = await asyncio.open_unix_connection(self.socket_path, limit=LINE_BYTES_MAX)
                return reader
            except (FileNotFoundError, ConnectionRefusedError):
                if not is_alive(process):
                    raise ZygoteError(f"the zygote (pid {process.pid}) has ended; see zygote.log") from None
                await asyncio.sleep(CONNECT_RETRY_S)

    async def _ask(self, request: dict[str, Any], timeout_s: float) -> dict[str, Any]:
        if self._writer is None or not self.connected:
            raise ZygoteError("the zygote is not connected")
        key = str(next(self._requests))
        waiting: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        self._waiting[key] = waiting
        try:
            async with asyncio.timeout(timeout_s):
                self._writer.write(json.dumps({**request, "request": key}).encode() + b"\n")
                await self._writer.drain()
                answer = await asyncio.shield(waiting)
        except TimeoutError:
            # An agent that stood still finds its limit over before it has read the answer that came meanwhile.
            await asyncio.wait([waiting], timeout=READ_S)
            if not waiting.done():
                if request["op"] == "fork" and len(self._given_up) < GIVEN_UP_MAX:
                    self._given_up[key] = request["socket_path"]
                raise ZygoteError(f"the zygote did not answer {request['op']} in {timeout_s:g} s") from None
            answer = waiting.result()
        except OSError as error:
            raise ZygoteError(f"the connection to the zygote is lost: {error}") from None
        finally:
            self._waiting.pop(key, None)
        if answer["op"] == "refused":
            raise ZygoteError(f"the zygote rejected {request['op']}: {answer['reason']}")
        return answer

    async def _read(self, reader: asyncio.StreamReader) -> None:
        try:
            while line := await reader.readline():
                message = json.loads(line)
                if message["op"] == "exited":
                    self._on_exit(Exited.from_json(message))
                elif (waiting := self._waiting.get(key := str(message.get("request")))) and not waiting.done():
                    waiting.set_result(message)
                elif (path := self._given_up.pop(key, None)) is not None and message["op"] != "refused":
                    _end_unwanted(ProcessIdentity.from_json(message), path)
        except (OSError, ValueError):
            pass
        finally:
            for waiting in self._waiting.values():
                if not waiting.done():
                    waiting.set_exception(ZygoteError("the zygote closed the connection"))


def _end_unwanted(process: ProcessIdentity, socket_path: str) -> None:
    """A process that was forked after its start had been given up: as after a standstill of the zygote."""
    send_signal(process, signal.SIGKILL)
    with contextlib.suppress(OSError):
        os.unlink(socket_path)


def python_path() -> str:
    """PYTHONPATH of a program of ours that may be started with -P, without the folder that the agent is in."""
    root = str(Path(__file__).resolve().parent.parent.parent)
    return os.pathsep.join(path for path in (root, os.environ.get("PYTHONPATH", "")) if path)


def start_zygote(
    socket_path: str, preload: str, log_path: Path, environment: dict[str, str], job_user: JobUser | None = None
) -> ProcessIdentity:
    """Start a zygote in a session of its own. It listens at once and is ready after its imports."""
    from agent.supervisor.process import read_start_time

    inherited, options = dict(os.environ), []
    command = [sys.executable, "-m", "agent.supervisor.zygote", "--socket", socket_path, "--preload", preload]
    if job_user is not None:
        # It is root's: it imports nothing from the folder that it happens to be started in.
        command.insert(1, "-P")
        inherited, options = environment_for_jobs(os.environ), ["--job-user", job_user.to_text()]
    with log_path.open("ab") as log:
        process = subprocess.Popen(
            [*command, *options],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
            env={**inherited, **environment, "PYTHONPATH": python_path()},
        )
    start_time = read_start_time(process.pid)
    if start_time is None:
        raise ZygoteError(f"the zygote ended at once; see {log_path}")
    # Nothing waits for the zygote, because it outlives the agent. With a return code set, Popen does not warn about it.
    process.returncode = 0
    return ProcessIdentity(process.pid, start_time)
