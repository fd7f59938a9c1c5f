"""The last trigger: the machine itself shuts down. Heard from logind over D-Bus, which waits for our delay lock as long
as InhibitDelayMaxSec says, and from a SIGTERM that systemd sends while the whole system stops.

The power button that a cloud presses (ACPI) goes through logind. Without D-Bus or logind this source cannot be read and
harms nobody. https://systemd.io/INHIBITOR_LOCKS, org.freedesktop.login1(5).
"""

import asyncio
import contextlib
import os
from collections.abc import Callable
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

from dbus_fast import BusType, DBusFastError, Message, MessageType
from dbus_fast.aio import MessageBus

from agent.notices.metadata_read import Unreadable
from agent.notices.source import Announced, Announcement, MachineName, Nothing, Observation, Unknown
from agent.protocol.sync import NoticeKind

LOGIND = "org.freedesktop.login1"
LOGIND_PATH = "/org/freedesktop/login1"
MANAGER = "org.freedesktop.login1.Manager"
SIGNAL = "PrepareForShutdown"
CALLS_S = 5.0
"""For all the calls that take the lock."""
QUIET_S, RETRY_S, HOLD_S = 10.0, 30.0, 0.2
"""How soon to look again: while nothing is announced, while logind cannot be asked, while the lock is held back."""
BOOTED = Path("/run/systemd/system")
SYSTEMCTL_S = 2.0


class ShutdownSource:
    """`has_work`: whether something here still needs the machine; the lock is given back as soon as nothing does.
    `address`: of another bus than the system's."""

    name = "shutdown"
    interval_s = 0.0

    def __init__(
        self, *, has_work: Callable[[], bool], now: Callable[[], datetime], address: str | None = None
    ) -> None:
        self._has_work = has_work
        self._now = now
        self._address = address
        self._news = asyncio.Event()
        self._wait_s = 0.0
        self._said: Announcement | None = None
        self._bus: MessageBus | None = None
        self._lock: int | None = None
        self._delay_s = 0.0

    async def observe(self) -> Observation:
        """Wait for news, at most some seconds; the first time not at all."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._news.wait(), self._wait_s)
        self._news.clear()
        problem = await self._keep_lock()
        if self._said is not None:
            self._wait_s = HOLD_S
            if not self._has_work():
                self._release()
            return Announced((self._said,))
        self._wait_s = RETRY_S if problem else QUIET_S
        return Unknown(problem) if problem else Nothing()

    async def machine(self) -> MachineName | None:
        """logind does not know."""
        return None

    def announce_stop(self, within_s: float) -> None:
        """The system stops, and leaves this process so many seconds."""
        self._announce(within_s, "SIGTERM while the system stops")

    async def close(self) -> None:
        """Give the lock back and leave the bus."""
        self._release()
        if self._bus is not None:
            self._bus.disconnect()
            self._bus = None

    async def _keep_lock(self) -> str:
        """Have logind wait for this process when it shuts down. Why it cannot; empty where it does."""
        try:
            async with asyncio.timeout(CALLS_S):
                if self._bus is None or not self._bus.connected:
                    await self._connect()
                if self._lock is None and self._said is None:
                    await self._take_lock()
        except TimeoutError:
            problem = f"no answer in {CALLS_S:g} s"
        except (OSError, EOFError, ValueError, DBusFastError, Unreadable) as error:
            problem = f"{type(error).__name__}: {error}"
        else:
            return ""
        await self.close()
        return f"logind does not announce shutdowns here: {problem}"

    async def _connect(self) -> None:
        self._release()
        bus = MessageBus(bus_address=self._address, bus_type=BusType.SYSTEM, negotiate_unix_fd=True)
        self._bus = await bus.connect()
        bus.add_message_handler(self._take_message)
        rule = f"type='signal',sender='{LOGIND}',interface='{MANAGER}',member='{SIGNAL}',path='{LOGIND_PATH}'"
        await self._call("org.freedesktop.DBus", "/org/freedesktop/DBus", "org.freedesktop.DBus", "AddMatch", "s", rule)

    async def _take_lock(self) -> None:
        self._delay_s = await self._property("InhibitDelayMaxUSec") / 1e6
        what = "shutdown", "liver-agent", "ranks of training jobs move to other nodes", "delay"
        answer = await self._call(LOGIND, LOGIND_PATH, MANAGER, "Inhibit", "ssss", *what)
        self._lock = answer.unix_fds[answer.body[0]]
        # The signal of a shutdown that had begun before the match came is lost.
        if await self._property("PreparingForShutdown"):
            self._announce(0.0, "logind was already preparing a shutdown")

    async def _property(self, name: str) -> Any:
        properties = "org.freedesktop.DBus.Properties"
        answer = await self._call(LOGIND, LOGIND_PATH, properties, "Get", "ss", MANAGER, name)
        return answer.body[0].value

    async def _call(self, name: str, path: str, interface: str, member: str, signature: str, *body: str) -> Message:
        assert self._bus is not None
        message = Message(
            destination=name, path=path, interface=interface, member=member, signature=signature, body=list(body)
        )
        answer = await self._bus.call(message)
        if answer is None or answer.message_type is not MessageType.METHOD_RETURN:
            raise Unreadable(f"{member} failed: {'' if answer is None else answer.error_name} {answer and answer.body}")
        return answer

    def _take_message(self, message: Message) -> None:
        if message.message_type is not MessageType.SIGNAL or message.member != SIGNAL or message.signature != "b":
            return
        if message.body[0]:
            self._announce(self._delay_s, f"logind: {SIGNAL}, InhibitDelayMaxSec={self._delay_s:g}")
        else:
            self._said = None
            self._release()
            self._news.set()

    def _announce(self, within_s: float, raw: str) -> None:
        deadline = self._now() + timedelta(seconds=within_s)
        if self._said is None or self._said.deadline_utc is None or deadline < self._said.deadline_utc:
            self._said = Announcement(NoticeKind.INTERRUPTION, deadline, raw)
        self._news.set()

    def _release(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


async def system_is_stopping(booted: Path = BOOTED) -> bool:
    """Whether systemd stops the whole system, not just one unit. False where there is no systemd."""
    if not await asyncio.to_thread(booted.is_dir):
        return False
    try:
        asked = await asyncio.create_subprocess_exec(
            "systemctl", "is-system-running",
            stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL,
        )  # fmt: skip
    except OSError:
        return False
    try:
        async with asyncio.timeout(SYSTEMCTL_S):
            said, _ = await asked.communicate()
            return said.strip() == b"stopping"
    except TimeoutError:
        asked.kill()
        await asked.wait()
        return False
