"""Requests that are cheaper together: what comes while others are at work is done at once after them, as one.

One request alone does not wait. Where several come at a time, a little is waited for more: at most `every_s` after the
begin of the work before. Used in the event loop only.
"""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from typing import Generic, TypeVar

AskT = TypeVar("AskT")
AnswerT = TypeVar("AnswerT")
EVERY_S = 0.02
MOST = 256
"""One transaction for 64 reports took a third of a second while a fleet started. That is 190 reports a second; a
thousand agents send 200, and so they waited for seconds, for a minute."""


class Gathering(Generic[AskT, AnswerT]):
    """`work` gets what was asked, up to `most`, and returns an answer for each in the same order. An error of it is the
    error of all of them."""

    def __init__(
        self,
        work: Callable[[Sequence[AskT]], Awaitable[Sequence[AnswerT]]],
        *,
        most: int = MOST,
        every_s: float = EVERY_S,
    ) -> None:
        self._work = work
        self._most = most
        self._every_s = every_s
        self._waiting: deque[tuple[AskT, asyncio.Future[AnswerT]]] = deque()
        self._runner: asyncio.Task[None] | None = None

    async def ask(self, asked: AskT) -> AnswerT:
        """The answer. What was asked is worked on also if nobody waits for the answer any more."""
        mine: asyncio.Future[AnswerT] = asyncio.get_running_loop().create_future()
        self._waiting.append((asked, mine))
        if self._runner is None:
            self._runner = asyncio.create_task(self._run())
        return await mine

    async def _run(self) -> None:
        now_s = asyncio.get_running_loop().time
        try:
            while self._waiting:
                begun_s = now_s()
                taken = [self._waiting.popleft() for _ in range(min(self._most, len(self._waiting)))]
                await self._serve(taken)
                if len(taken) > 1 and len(self._waiting) < self._most:
                    await asyncio.sleep(max(0.0, begun_s + self._every_s - now_s()))
        finally:
            self._runner = None
            for _, answer in self._waiting:
                answer.cancel()
            self._waiting.clear()

    async def _serve(self, taken: Sequence[tuple[AskT, asyncio.Future[AnswerT]]]) -> None:
        try:
            answers = await self._work([asked for asked, _ in taken])
        except Exception as error:
            for _, waiting in taken:
                if not waiting.done():
                    waiting.set_exception(error)
            return
        for (_, waiting), answer in zip(taken, answers, strict=True):
            if not waiting.done():
                waiting.set_result(answer)
