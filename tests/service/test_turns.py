"""One at a time for each name, the newest next."""

import asyncio

import pytest

from service import turns
from service.turns import LostTurn, Turns


async def at_work(all_turns: Turns, name: str, done: list[str], mark: str, leave: asyncio.Event) -> None:
    async with all_turns.of(name, asyncio.get_running_loop().create_future()):
        done.append(mark)
        await leave.wait()


async def a_moment() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


def test_one_is_at_work_the_newest_waits_and_other_names_are_not_concerned() -> None:
    async def run() -> None:
        all_turns, done, leave = Turns(), [], asyncio.Event()
        tasks = []
        for name, mark in (("a", "a1"), ("a", "a2"), ("b", "b1"), ("a", "a3")):
            tasks.append(asyncio.create_task(at_work(all_turns, name, done, mark, leave)))
            await a_moment()
        assert done == ["a1", "b1"]
        with pytest.raises(LostTurn, match="a newer report of node a waits"):
            await tasks[1]
        leave.set()
        await asyncio.gather(tasks[0], *tasks[2:])
        assert done == ["a1", "b1", "a3"]
        await at_work(all_turns, "a", done, "a4", leave)

    asyncio.run(run())


def test_who_waits_too_long_or_has_gone_loses_its_turn_and_the_next_gets_it(monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        all_turns, done, leave = Turns(), [], asyncio.Event()
        first = asyncio.create_task(at_work(all_turns, "a", done, "a1", leave))
        await a_moment()
        gone = asyncio.get_running_loop().create_future()
        gone.set_result(None)
        with pytest.raises(LostTurn, match="its agent has gone"):
            async with all_turns.of("a", gone):
                pass
        monkeypatch.setattr(turns, "WAIT_S", 0.0)
        with pytest.raises(LostTurn, match="is still being stored"):
            await at_work(all_turns, "a", done, "a2", leave)
        monkeypatch.undo()
        cancelled = asyncio.create_task(at_work(all_turns, "a", done, "a3", leave))
        await a_moment()
        leave.set()
        await first
        cancelled.cancel()  # In the very moment in which it gets its turn.
        await asyncio.gather(cancelled, return_exceptions=True)
        await asyncio.wait_for(at_work(all_turns, "a", done, "a4", leave), timeout=10.0)
        assert done[0] == "a1" and done[-1] == "a4"

    asyncio.run(run())
