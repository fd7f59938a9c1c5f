"""The zygote: a process that has imported torch and megatron once and forks rank and store processes on request.

It lives in a session of its own, outlives the agent, and never starts a thread, since a fork copies only the thread
that calls it. Requests and answers are JSON lines on a unix socket, one request in flight per connection.

    python -m agent.supervisor.zygote --socket PATH --preload torch,megatron.core
"""

import argparse
import contextlib
import gc
import importlib
import json
import os
import selectors
import signal
import socket
import sys
import time
import traceback
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agent.supervisor.child_entry import LastStep, become_program, end_process, name_process, run_entry
from agent.supervisor.forkable import why_not_forked
from agent.supervisor.job_user import JobUser
from agent.supervisor.logs import cut_if_grown
from agent.supervisor.process import own_identity, read_start_time

REQUEST_BYTES_MAX = 4 * 1024 * 1024
CLIENTS_MAX = 16
CHILDREN_MAX = 1_024
EXITS_MAX = 4_096
TICK_S = 5.0
IDLE_EXIT_S = 600.0


@dataclass(slots=True)
class Child:
    """One process forked here. A repeated request with the same `name` forks no second one."""

    name: str
    pid: int
    start_time: float
    log_path: str
    last_step: LastStep

    def to_json(self) -> dict[str, Any]:
        return {"name": self.name, "pid": self.pid, "start_time": self.start_time, "log_path": self.log_path}


class ZygoteRefusal(Exception):
    """A request is rejected; the text is sent back to the agent."""


class Zygote:
    """One run directory's zygote. `serve` returns after an end request, or when it has been idle for `idle_exit_s`.

    With a job user every child becomes that user before it runs any code of a job."""

    def __init__(
        self,
        listener: socket.socket,
        preload: tuple[str, ...],
        *,
        job_user: JobUser | None = None,
        idle_exit_s: float = IDLE_EXIT_S,
    ) -> None:
        self._listener = listener
        self._preload = preload
        self._job_user = job_user
        self._idle_exit_s = idle_exit_s
        self._selector = selectors.DefaultSelector()
        self._clients: dict[socket.socket, bytes] = {}
        self._children: dict[int, Child] = {}
        self._exits: deque[dict[str, Any]] = deque(maxlen=EXITS_MAX)
        self._problem = self._says_why = ""
        self._preload_s = 0.0
        self._idle_since = time.monotonic()
        self._ending = False
        self._signal_reader, self._signal_writer = socket.socketpair()

    def preload(self) -> None:
        """Import what every child needs. A failure is stored and rejects every fork."""
        started = time.monotonic()
        for name in self._preload:
            try:
                importlib.import_module(name)
            except Exception as error:
                traceback.print_exc()
                self._problem = f"cannot import {name}: {type(error).__name__}: {error}"
                break
        # Exclude these permanent objects from garbage collection, so that children do not copy their pages.
        gc.collect()
        gc.freeze()
        self._preload_s = time.monotonic() - started

    def serve(self) -> None:
        """Answer requests, reap children, keep logs bounded."""
        for end in (self._signal_reader, self._signal_writer):
            end.setblocking(False)
        signal.set_wakeup_fd(self._signal_writer.fileno(), warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        self._listener.setblocking(False)
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._selector.register(self._signal_reader, selectors.EVENT_READ)
        next_tick = time.monotonic() + TICK_S
        while not self._ending:
            for key, _ in self._selector.select(max(0.0, next_tick - time.monotonic())):
                self._handle_ready(key.fileobj)
            self._reap()
            if time.monotonic() >= next_tick:
                next_tick = time.monotonic() + TICK_S
                self._tick()

    def _handle_ready(self, ready: object) -> None:
        if ready is self._listener:
            self._accept()
        elif ready is self._signal_reader:
            with contextlib.suppress(BlockingIOError):
                self._signal_reader.recv(4_096)
        elif isinstance(ready, socket.socket) and ready in self._clients:
            self._read(ready)

    def _accept(self) -> None:
        with contextlib.suppress(BlockingIOError):
            client, _ = self._listener.accept()
            if len(self._clients) >= CLIENTS_MAX:
                client.close()
                return
            client.settimeout(5.0)
            self._clients[client] = b""
            self._selector.register(client, selectors.EVENT_READ)
            self._send(client, self._hello())
            for exited in self._exits:
                self._send(client, exited)

    def _hello(self) -> dict[str, Any]:
        return {
            "op": "hello",
            **own_identity().to_json(),
            "preloaded": list(self._preload),
            "preload_s": round(self._preload_s, 3),
            "problem": self._problem,
            "starts_programs": why_not_forked(),
            "children": [child.to_json() for child in self._children.values()],
        }

    def _read(self, client: socket.socket) -> None:
        try:
            data = client.recv(1 << 16)
        except OSError:
            data = b""
        buffer = self._clients[client] + data
        if not data or len(buffer) > REQUEST_BYTES_MAX:
            self._drop(client)
            return
        *lines, rest = buffer.split(b"\n")
        self._clients[client] = rest
        for line in lines:
            if client in self._clients:
                self._send(client, self._answer(line))

    def _answer(self, line: bytes) -> dict[str, Any]:
        request: dict[str, Any] = {}
        try:
            request = json.loads(line)
            match request.get("op"):
                case "fork":
                    return {"op": "forked", "request": request.get("request"), **self._fork(request)}
                case "forget":
                    self._forget(request)
                    return {"op": "forgotten", "request": request.get("request")}
                case "end":
                    self._ending = True
                    return {"op": "ending", "request": request.get("request")}
                case other:
                    raise ZygoteRefusal(f"op must be fork, forget or end, is {other!r}")
        except (ZygoteRefusal, OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            text = str(error) if isinstance(error, ZygoteRefusal) else f"{type(error).__name__}: {error}"
            asked = request.get("request") if isinstance(request, dict) else None
            return {"op": "refused", "request": asked, "reason": text}

    def _fork(self, request: dict[str, Any]) -> dict[str, Any]:
        """A child for `name`, or the one that already runs under it."""
        for child in self._children.values():
            if child.name == request["name"]:
                return {**child.to_json(), "existing": True}
        if self._problem:
            raise ZygoteRefusal(self._problem)
        if len(self._children) >= CHILDREN_MAX:
            raise ZygoteRefusal(f"{CHILDREN_MAX} children run already")
        why_program = why_not_forked()
        if why_program and not self._says_why:
            self._says_why = why_program
            sys.stdout.write(f"ranks and stores start as programs of their own: {why_program}\n")
        log_path = str(request["log_path"])
        sys.stdout.flush()
        sys.stderr.flush()
        last_step = LastStep.for_program() if why_program else LastStep()
        pid = os.fork()
        if pid == 0:
            _run_child(self._close_in_child, request, last_step, self._job_user, self._preload if why_program else None)
        start_time = read_start_time(pid)
        if start_time is None:
            # The child has already ended and is not reaped yet: nobody needs its start time any more.
            start_time = -1.0
        self._children[pid] = Child(str(request["name"]), pid, start_time, log_path, last_step)
        return {**self._children[pid].to_json(), "existing": False}

    def _close_in_child(self) -> None:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        self._selector.close()
        others = (child.last_step for child in self._children.values())
        for end in (self._listener, self._signal_reader, self._signal_writer, *self._clients, *others):
            end.close()

    def _forget(self, request: dict[str, Any]) -> None:
        """The agent has stored these exits: do not report them again."""
        pids = {int(pid) for pid in request["pids"]}
        kept = [exited for exited in self._exits if exited["pid"] not in pids]
        self._exits.clear()
        self._exits.extend(kept)

    def _reap(self) -> None:
        while self._children:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            child = self._children.pop(pid, None)
            if child is None:
                continue
            code = os.waitstatus_to_exitcode(status)
            exited = {"op": "exited", **child.to_json(), "code": code, "last_step": child.last_step.read()}
            child.last_step.close()
            self._exits.append(exited)
            for client in tuple(self._clients):
                self._send(client, exited)

    def _tick(self) -> None:
        for child in self._children.values():
            with contextlib.suppress(OSError):
                cut_if_grown(Path(child.log_path))
        if self._clients or self._children:
            self._idle_since = time.monotonic()
        elif time.monotonic() - self._idle_since > self._idle_exit_s:
            self._ending = True

    def _send(self, client: socket.socket, message: dict[str, Any]) -> None:
        try:
            client.sendall(json.dumps(message).encode() + b"\n")
        except OSError:
            self._drop(client)

    def _drop(self, client: socket.socket) -> None:
        if self._clients.pop(client, None) is not None:
            self._selector.unregister(client)
            client.close()


def _run_child(
    close: Callable[[], None],
    request: dict[str, Any],
    last_step: LastStep,
    job_user: JobUser | None,
    preload: tuple[str, ...] | None,
) -> None:
    """Never returns: a child that returned to the zygote's loop would answer requests in its place. With `preload` it
    becomes a program of its own that imports these modules."""
    code = 1
    try:
        close()
        os.setsid()
        _redirect(str(request["log_path"]), job_user)
        with contextlib.suppress(OSError):
            name_process(str(request["name"]))
        # While the process still may: the folder of the sockets is closed to a job's code.
        control = listen(str(request["socket_path"]))
        if job_user is not None:
            job_user.become()
            os.environ.update(job_user.environment())
            os.chdir(job_user.home)
        if preload is not None:
            become_program(request, control, last_step, preload)
        code = run_entry(request, control, last_step)
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        end_process(code)


def _redirect(log_path: str, job_user: JobUser | None) -> None:
    null = os.open(os.devnull, os.O_RDONLY)
    log = os.open(log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    if job_user is not None:
        # So that /dev/stdout can be opened; its folder stays closed.
        os.fchown(log, job_user.uid, job_user.gid)
    os.dup2(null, 0)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(null)
    os.close(log)
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]


def listen(path: str) -> socket.socket:
    """A listening unix socket at `path`, readable by its owner only; a stale file there is replaced."""
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    old_mask = os.umask(0o177)
    try:
        listener.bind(path)
    finally:
        os.umask(old_mask)
    listener.listen(16)
    return listener


def main(arguments: Sequence[str] | None = None) -> int:
    """Listen first, then import, so that an agent can connect at once and wait for the hello."""
    parser = argparse.ArgumentParser(prog="python -m agent.supervisor.zygote")
    parser.add_argument("--socket", required=True)
    parser.add_argument("--preload", default="", help="modules to import before the first fork, separated by commas")
    parser.add_argument("--job-user", type=JobUser.parse, help="whom children become, as JSON")
    parser.add_argument("--idle-exit-s", type=float, default=IDLE_EXIT_S)
    options = parser.parse_args(arguments)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    preload = tuple(name for name in options.preload.split(",") if name)
    zygote = Zygote(listen(options.socket), preload, job_user=options.job_user, idle_exit_s=options.idle_exit_s)
    zygote.preload()
    zygote.serve()
    return 0


if __name__ == "__main__":
    sys.exit(main())
