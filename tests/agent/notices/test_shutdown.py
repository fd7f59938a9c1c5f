"""The last trigger, against a real D-Bus daemon of the test's own, with a double of logind on it."""

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Coroutine, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from agent.notices import shutdown
from agent.notices.shutdown import ShutdownSource, system_is_stopping
from agent.notices.source import Announced, Nothing, Observation, Unknown
from agent.protocol.sync import NoticeKind
from tests.agent.notices.logind_double import DELAY_S, Logind, own_bus
from tests.agent.waiting import eventually

NOON = datetime(2026, 11, 20, 12, 0, tzinfo=UTC)
pytestmark = pytest.mark.timeout(300)


@pytest.fixture
def bus(tmp_path: Path) -> Iterator[str]:
    with own_bus(tmp_path) as address:
        yield address


@contextlib.asynccontextmanager
async def watched(address: str, logind: Logind, work: list[str]) -> AsyncIterator[ShutdownSource]:
    """A source beside logind; it has something to do while `work` is not empty."""
    await logind.start(address)
    source = ShutdownSource(has_work=lambda: bool(work), now=lambda: NOON, address=address)
    try:
        yield source
    finally:
        await source.close()
        logind.stop()


async def announced(source: ShutdownSource) -> Observation:
    """What is seen next."""
    async with asyncio.timeout(20):
        return await source.observe()


def test_a_shutdown_is_announced_with_the_time_that_logind_leaves_and_waits_until_no_rank_is_here(bus: str) -> None:
    logind, work = Logind(), ["a rank"]

    async def run() -> None:
        async with watched(bus, logind, work) as source:
            assert await announced(source) == Nothing()
            ((what, who, why, mode),) = logind.asked
            assert (what, who, mode) == ("shutdown", "liver-agent", "delay") and why
            await eventually(lambda: logind.held == 1, "the lock is held")
            await logind.prepare(True)
            seen = await announced(source)
            assert isinstance(seen, Announced)
            (heard,) = seen.announcements
            assert heard.kind is NoticeKind.INTERRUPTION
            assert heard.deadline_utc == NOON + timedelta(seconds=DELAY_S)
            assert await announced(source) == seen and logind.held == 1, "while a rank is here logind has to wait"
            work.clear()
            assert await announced(source) == seen
            await eventually(lambda: logind.held == 0, "the lock is given back")
            assert len(logind.asked) == 1, "no other lock is taken while the machine goes down"

    asyncio.run(run())


def test_a_shutdown_that_is_called_off_is_withdrawn_and_the_next_one_is_waited_for(bus: str) -> None:
    logind = Logind()

    async def run() -> None:
        async with watched(bus, logind, ["a rank"]) as source:
            await announced(source)
            await logind.prepare(True)
            assert isinstance(await announced(source), Announced)
            await logind.prepare(False)

            async def is_quiet() -> bool:
                return await announced(source) == Nothing()

            await eventually(is_quiet, "the withdrawal")
            assert len(logind.asked) == 2
            await eventually(lambda: logind.held == 1, "only the second lock is held")

    asyncio.run(run())


def test_a_shutdown_that_had_begun_before_the_agent_is_due_at_once(bus: str) -> None:
    logind = Logind()
    logind.preparing = True

    async def run() -> Observation:
        async with watched(bus, logind, ["a rank"]) as source:
            return await announced(source)

    seen = asyncio.run(run())
    assert isinstance(seen, Announced) and seen.announcements[0].deadline_utc == NOON


def test_a_logind_that_refuses_is_unknown_with_its_words(bus: str) -> None:
    logind = Logind()
    logind.refuses = True

    async def run() -> Observation:
        async with watched(bus, logind, []) as source:
            return await announced(source)

    seen = asyncio.run(run())
    assert isinstance(seen, Unknown) and "AccessDenied" in seen.reason


def test_without_a_bus_or_without_logind_on_it_nothing_is_harmed(bus: str, tmp_path: Path) -> None:
    async def run(address: str) -> list[Observation]:
        source = ShutdownSource(has_work=lambda: True, now=lambda: NOON, address=address)
        first = await announced(source)
        source.announce_stop(20)
        second = await announced(source)
        await source.close()
        return [first, second]

    for address in (f"unix:path={tmp_path / 'nobody'}", bus):
        first, second = asyncio.run(run(address))
        assert isinstance(first, Unknown) and first.reason.startswith("logind does not announce shutdowns here: ")
        assert isinstance(second, Announced), "SIGTERM is heard even so"
        assert second.announcements[0].deadline_utc == NOON + timedelta(seconds=20)


def test_of_two_announcements_the_earlier_end_counts_whichever_comes_first(tmp_path: Path) -> None:
    async def run(*within_s: float) -> Observation:
        source = ShutdownSource(has_work=lambda: True, now=lambda: NOON, address=f"unix:path={tmp_path / 'nobody'}")
        for each in within_s:
            source.announce_stop(each)
        return await announced(source)

    for within_s in ((20, 60), (60, 20), (20, 20)):
        seen = asyncio.run(run(*within_s))
        assert isinstance(seen, Announced)
        (heard,) = seen.announcements
        assert heard.deadline_utc == NOON + timedelta(seconds=20)
        assert (heard.kind, heard.raw) == (NoticeKind.INTERRUPTION, "SIGTERM while the system stops")


def test_what_was_announced_is_waited_for_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is told again at every look; a source that did not wait between two would keep the agent busy."""
    waited: list[bool] = []
    wait_for = asyncio.wait_for

    async def noted(what: Coroutine[Any, Any, bool], within_s: float) -> bool:
        waited.append(within_s > 0.0 and not source._news.is_set())
        return await wait_for(what, min(within_s, 0.01))

    monkeypatch.setattr(shutdown.asyncio, "wait_for", noted)

    async def run() -> list[Observation]:
        return [await source.observe() for _ in range(3)]

    source = ShutdownSource(has_work=lambda: True, now=lambda: NOON, address=f"unix:path={tmp_path / 'nobody'}")
    source.announce_stop(20.0)
    seen = asyncio.run(run())
    assert all(isinstance(each, Announced) for each in seen)
    assert waited == [False, True, True]


@pytest.mark.parametrize(("said", "is_stopping"), [("stopping", True), ("running", False), ("degraded", False)])
def test_whether_the_whole_system_stops_is_asked_of_systemd(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: str, is_stopping: bool
) -> None:
    double = tmp_path / "systemctl"
    double.write_text(f'#!/bin/sh\n[ "$1" = is-system-running ] && echo {said}\nexit 1\n')
    double.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert asyncio.run(system_is_stopping(tmp_path)) is is_stopping
    assert asyncio.run(system_is_stopping(tmp_path / "not-booted-by-systemd")) is False
