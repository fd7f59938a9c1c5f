"""The rank's side of the link to its agent: a unix socket, one JSON object per line.

The newest connection is the agent. While there is none, steps and checkpoints wait in a bounded queue. Each agent that
connects gets the latest stage of every handoff. The reader's thread takes commands; it only leaves them for the loop.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import threading
from collections import OrderedDict, deque
from collections.abc import Callable

from pydantic import ValidationError

from agent.protocol.rank import LINE_BYTES_MAX, RankCommand, StageReport, decode_command, encode_line
from agent.protocol.values import Message

_WAITING_MAX = 4_096
_STAGES_MAX = 8


def log(text: str) -> None:
    """Write one line to standard output, which is this rank's log file."""
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


class ControlSocket:
    """Listens on `path`. `hello` makes the first line of a connection; `on_command` is called with each command."""

    def __init__(self, path: str, hello: Callable[[], Message], on_command: Callable[[RankCommand], None]) -> None:
        self._path = path
        self._hello = hello
        self._on_command = on_command
        self._lock = threading.Lock()
        self._agent: socket.socket | None = None
        self._waiting: deque[Message] = deque(maxlen=_WAITING_MAX)
        self._stages: OrderedDict[str, StageReport] = OrderedDict()

    def start(self) -> None:
        """Listen. From now on an agent of this user, and of no other, can connect."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._path)
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        mask = os.umask(0o077)
        try:
            listener.bind(self._path)
        finally:
            os.umask(mask)
        listener.listen(4)
        threading.Thread(target=self._accept, args=(listener,), name="control", daemon=True).start()

    def say(self, message: Message) -> None:
        """Send the message, or keep it for the next agent. Blocks no longer than the socket's send timeout."""
        with self._lock:
            if isinstance(message, StageReport):
                key = str(message.handoff_id)
                self._stages[key] = message
                self._stages.move_to_end(key)
                while len(self._stages) > _STAGES_MAX:
                    self._stages.popitem(last=False)
            if not self._send(message) and not isinstance(message, StageReport):
                self._waiting.append(message)

    def _send(self, message: Message) -> bool:
        if self._agent is None:
            return False
        try:
            self._agent.sendall(encode_line(message))
        except OSError:
            self._agent.close()
            self._agent = None
            return False
        return True

    def _accept(self, listener: socket.socket) -> None:
        while True:
            connection, _ = listener.accept()
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, b"\x05" + b"\0" * 15)
            with self._lock:
                if self._agent is not None:
                    with contextlib.suppress(OSError):
                        self._agent.shutdown(socket.SHUT_RDWR)
                self._agent = connection
                self._greet()
            threading.Thread(target=self._read, args=(connection,), name="commands", daemon=True).start()

    def _greet(self) -> None:
        """Send hello, the latest stage of every handoff, then the queued messages."""
        self._send(self._hello())
        for stage in self._stages.values():
            self._send(stage)
        while self._waiting and self._send(self._waiting[0]):
            self._waiting.popleft()

    def _read(self, connection: socket.socket) -> None:
        with contextlib.suppress(OSError), connection.makefile("rb") as lines:
            while line := lines.readline(LINE_BYTES_MAX):
                try:
                    command = decode_command(line)
                except ValidationError as error:
                    log(f"rejected a command of the agent: {error}")
                    continue
                if command.type == "status":
                    with self._lock:
                        self._greet()
                else:
                    self._on_command(command)
