"""A double of logind on a real D-Bus daemon of a test's own. Where a daemon cannot be had, the test is skipped."""

import asyncio
import contextlib
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

from dbus_fast import Message, MessageType, Variant
from dbus_fast.aio import MessageBus

from agent.notices.shutdown import LOGIND, LOGIND_PATH, MANAGER, SIGNAL
from tests.debian import needs

DELAY_S = 30


class Logind:
    """Answers as systemd-logind does, and knows which delay locks are held: a lock is a pipe, given back by closing."""

    def __init__(self, *, delay_s: int = DELAY_S) -> None:
        self._delay_s = delay_s
        self.asked: list[tuple[str, ...]] = []
        self.preparing = False
        self.refuses = False
        self._bus: MessageBus | None = None
        self._locks: list[int] = []

    async def start(self, address: str) -> None:
        self._bus = await MessageBus(bus_address=address, negotiate_unix_fd=True).connect()
        self._bus.add_message_handler(self._answer)
        await self._bus.request_name(LOGIND)

    def stop(self) -> None:
        assert self._bus is not None
        self._bus.disconnect()
        for lock in self._locks:
            os.close(lock)

    @property
    def held(self) -> int:
        """Locks whose other end is still open."""
        return sum(not _is_at_end(lock) for lock in self._locks)

    async def prepare(self, is_shutdown: bool) -> None:
        """Tell everyone that a shutdown begins, or that none comes."""
        assert self._bus is not None
        self.preparing = is_shutdown
        signal = Message(message_type=MessageType.SIGNAL, path=LOGIND_PATH, interface=MANAGER, member=SIGNAL,
                         signature="b", body=[is_shutdown])  # fmt: skip
        await self._bus.send(signal)

    def _answer(self, message: Message) -> Message | None:
        if message.message_type is not MessageType.METHOD_CALL or message.path != LOGIND_PATH:
            return None
        if self.refuses:
            return Message.new_error(message, "org.freedesktop.DBus.Error.AccessDenied", "not for you")
        if message.member == "Get":
            values = {"InhibitDelayMaxUSec": Variant("t", self._delay_s * 10**6),
                      "PreparingForShutdown": Variant("b", self.preparing)}  # fmt: skip
            return Message.new_method_return(message, "v", [values[message.body[1]]])
        self.asked.append(tuple(message.body))
        kept, given = os.pipe()
        os.set_blocking(kept, False)
        self._locks.append(kept)
        asyncio.get_running_loop().call_later(1.0, os.close, given)
        return Message.new_method_return(message, "h", [0], unix_fds=[given])


def _is_at_end(lock: int) -> bool:
    with contextlib.suppress(BlockingIOError):
        return os.read(lock, 1) == b""
    return False


@contextlib.contextmanager
def own_bus(folder: Path) -> Iterator[str]:
    """The address of a D-Bus daemon that nobody else knows, until the end of the block."""
    address = f"unix:path={folder / 'bus'}"
    command = [needs("dbus-daemon"), "--session", "--nofork", "--print-address", f"--address={address}"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as daemon:
        assert daemon.stdout is not None and daemon.stdout.readline().startswith("unix:path=")
        try:
            yield address
        finally:
            daemon.terminate()
