"""The rank's side of the link to its agent: a unix socket that listens already, one JSON object per line.

The newest connection is the agent. Messages wait in a bounded queue until a thread has sent them, so a slow agent slows
no step. Each agent that connects gets the latest stage of every handoff first, and the latest facts. The reader's
thread takes commands; it only leaves them for the loop.
"""

from __future__ import annotations

import contextlib
import socket
import sys
import threading
from collections import OrderedDict, deque
from collections.abc import Callable

from pydantic import ValidationError

from agent.protocol.rank import FACTS, LINE_BYTES_MAX, Hello, RankCommand, StageReport, decode_command, encode_line
from agent.protocol.values import Message

_WAITING_MAX = 4_096
_STAGES_MAX = 8


def log(text: str) -> None:
    """Write one line to standard output, which is this rank's log file."""
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


class ControlSocket:
    """`hello` makes the first line of a connection; `on_command` is called with each command."""

    def __init__(
        self, listener: socket.socket, hello: Callable[[], Message], on_command: Callable[[RankCommand], None]
    ) -> None:
        self._listener = listener
        self._hello = hello
        self._on_command = on_command
        self._changed = threading.Condition()
        self._agent: socket.socket | None = None
        self._greets = False
        self._sending = False
        self._waiting: deque[Message] = deque(maxlen=_WAITING_MAX)
        self._stages: OrderedDict[str, StageReport] = OrderedDict()
        self._facts: dict[type[Message], Message] = {}

    def start(self) -> None:
        """Accept agents from now on."""
        threading.Thread(target=self._accept, name="control", daemon=True).start()
        threading.Thread(target=self._write, name="reports", daemon=True).start()

    def say(self, message: Message) -> None:
        """Have the message sent, or kept for the next agent. Never waits for the agent."""
        with self._changed:
            if isinstance(message, StageReport):
                key = str(message.handoff_id)
                self._stages[key] = message
                self._stages.move_to_end(key)
                while len(self._stages) > _STAGES_MAX:
                    self._stages.popitem(last=False)
            if isinstance(message, FACTS):
                self._facts[type(message)] = message
            self._waiting.append(message)
            self._changed.notify_all()

    def facts(self) -> tuple[Message, ...]:
        """The latest fact of each kind, told or not: the agent that heard it may end before it passes it on."""
        with self._changed:
            return tuple(self._facts.values())

    def flush(self, timeout_s: float) -> bool:
        """Wait until the agent has been sent everything, while there is one. False if something is left."""

        def left() -> bool:
            return bool(self._waiting or self._greets or self._sending)

        with self._changed:
            self._changed.wait_for(lambda: self._agent is None or not left(), timeout_s)
            return not left()

    def _write(self) -> None:
        """Send whatever waits. Nothing is sent with the lock, which `say` needs."""
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._agent is not None and (self._greets or self._waiting))
                agent, messages = self._agent, self._next()
                self._sending = True
            assert agent is not None
            try:
                agent.sendall(b"".join(encode_line(message) for message in messages))
                gone = False
            except OSError:
                gone = True
            with self._changed:
                self._sending = False
                if gone:
                    self._disconnect(agent, messages)
                self._changed.notify_all()

    def _next(self) -> list[Message]:
        """With the lock: what to send next. A new agent gets hello and the latest stage of every handoff, and after
        what waits the facts, of which the agent before it may not have told."""
        if not self._greets:
            return [self._waiting.popleft()]
        self._greets = False
        older = [message for message in self._waiting if not isinstance(message, StageReport)]
        self._waiting.clear()
        self._waiting.extend((*older, *(fact for fact in self._facts.values() if fact not in older)))
        return [self._hello(), *self._stages.values()]

    def _disconnect(self, agent: socket.socket, unsent: list[Message]) -> None:
        """With the lock: this agent is gone. Keep for the next one what it is not told anyway."""
        agent.close()
        if self._agent is agent:
            self._agent = None
        kept = [message for message in unsent if not isinstance(message, Hello | StageReport)]
        if len(self._waiting) + len(kept) <= _WAITING_MAX:
            self._waiting.extendleft(reversed(kept))

    def _accept(self) -> None:
        while True:
            connection, _ = self._listener.accept()
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, b"\x05" + b"\0" * 15)
            with self._changed:
                if self._agent is not None:
                    with contextlib.suppress(OSError):
                        self._agent.shutdown(socket.SHUT_RDWR)
                self._agent, self._greets = connection, True
                self._changed.notify_all()
            threading.Thread(target=self._read, args=(connection,), name="commands", daemon=True).start()

    def _read(self, connection: socket.socket) -> None:
        with contextlib.suppress(OSError), connection.makefile("rb") as lines:
            while line := lines.readline(LINE_BYTES_MAX):
                try:
                    command = decode_command(line)
                except ValidationError as error:
                    log(f"rejected a command of the agent: {error}")
                    continue
                if command.type == "status":
                    with self._changed:
                        self._greets = True
                        self._changed.notify_all()
                else:
                    self._on_command(command)
        with self._changed:
            if self._agent is connection:
                self._agent = None  # It has ended.
                self._changed.notify_all()
