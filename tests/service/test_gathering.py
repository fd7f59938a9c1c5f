"""Requests that are done together: each gets its own answer, one alone waits for nobody, an error stops no other."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence

import pytest

from service.gathering import Gathering


def run(test: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(test(), 10))


class Work:
    """Doubles numbers; the first call ends when `goes_on` is set."""

    def __init__(self) -> None:
        self.calls: list[list[int]] = []
        self.begun, self.goes_on = asyncio.Event(), asyncio.Event()

    async def __call__(self, numbers: Sequence[int]) -> Sequence[int]:
        self.calls.append(list(numbers))
        self.begun.set()
        if len(self.calls) == 1:
            await self.goes_on.wait()
        if 13 in numbers:
            raise ValueError("13")
        return [2 * number for number in numbers]


async def begun(work: Work, numbers: Sequence[int], **options) -> list[asyncio.Task[int]]:
    """What was asked, the first of it at work and the rest waiting."""
    gathering = Gathering(work, **options)
    asked = [asyncio.create_task(gathering.ask(number)) for number in numbers]
    await work.begun.wait()
    return asked


def test_what_comes_while_another_is_at_work_is_done_together_and_each_gets_its_own_answer():
    async def test() -> None:
        work = Work()
        gathering = Gathering(work)
        asked = [asyncio.create_task(gathering.ask(1))]
        await work.begun.wait()
        asked += [asyncio.create_task(gathering.ask(number)) for number in (2, 3, 4)]
        work.goes_on.set()
        assert await asyncio.gather(*asked) == [2, 4, 6, 8]
        assert work.calls == [[1], [2, 3, 4]]

    run(test)


@pytest.mark.parametrize(("most", "calls"), [(64, [[1, 2, 3, 4, 5]]), (2, [[1, 2], [3, 4], [5]])])
def test_at_most_so_many_are_done_at_once(most, calls):
    async def test() -> None:
        work = Work()
        work.goes_on.set()
        asked = await begun(work, range(1, 6), most=most, every_s=0.0)
        assert await asyncio.gather(*asked) == [2, 4, 6, 8, 10]
        assert work.calls == calls

    run(test)


def test_an_error_is_the_error_of_those_that_were_done_with_it_only():
    async def test() -> None:
        work = Work()
        work.goes_on.set()
        asked = await begun(work, [12, 13, 14], most=2, every_s=0.0)
        found = await asyncio.gather(*asked, return_exceptions=True)
        assert [str(each) for each in found] == ["13", "13", "28"]

    run(test)


def test_who_waits_no_longer_holds_up_nobody():
    async def test() -> None:
        work = Work()
        asked = await begun(work, [1, 2, 3], most=1, every_s=0.0)
        asked[0].cancel()
        asked[1].cancel()
        work.goes_on.set()
        assert await asked[2] == 6

    run(test)


def test_one_alone_does_not_wait_and_several_are_waited_for_a_little():
    async def test() -> None:
        now_s = asyncio.get_running_loop().time
        work = Work()
        work.goes_on.set()
        gathering = Gathering(work, every_s=0.3)
        started = now_s()
        for number in range(5):
            assert await gathering.ask(number) == 2 * number
        assert now_s() - started < 0.3, "one after the other, none waits"
        await asyncio.gather(gathering.ask(1), gathering.ask(2))
        started = now_s()
        await gathering.ask(3)
        assert now_s() - started > 0.2, "two came at once: others are waited for"

    run(test)


def test_a_gathering_whose_loop_ends_serves_the_next():
    work: list[Sequence[int]] = []

    async def doubled(numbers: Sequence[int]) -> Sequence[int]:
        work.append(numbers)
        return [2 * number for number in numbers]

    gathering = Gathering(doubled)

    async def two() -> Sequence[int]:
        return await asyncio.gather(gathering.ask(1), gathering.ask(2))

    for _ in range(2):
        assert list(asyncio.run(two())) == [2, 4]
