"""Replays in processes of their own, a few at a time and each with a limit: a long one keeps neither the event loop nor
a thread or connection from others, and cannot take the service's memory.
"""

import asyncio
import logging
import sys
from dataclasses import dataclass

from agent.protocol.errors import FieldProblem
from service.problems import ProblemError, invalid, too_many, unavailable
from service.what_if import child
from service.what_if.rules import Question

_log = logging.getLogger(__name__)
WHAT_TO_CHANGE = "give a shorter trace, or a job with a smaller nodes.max"
WITHOUT_MACHINES = f"{WHAT_TO_CHANGE}, or ask without machines"


@dataclass(slots=True)
class Replays:
    """Those of one service. In the event loop only. `at_once_max`: how many run at a time; `within_s`: for how long one
    may."""

    at_once_max: int
    within_s: float
    running: int = 0

    async def run(self, asked: Question) -> bytes:
        """The answer as JSON. Raises 429 where enough others run, 422 for what cannot be replayed, or not in time."""
        if self.running >= self.at_once_max:
            raise self._too_many()
        self.running += 1
        try:
            return await self._run(child.written(asked), WITHOUT_MACHINES if asked.machines else WHAT_TO_CHANGE)
        finally:
            self.running -= 1

    async def _run(self, question: bytes, what_to_change: str) -> bytes:
        # -I: nothing of the service's environment or folder, which may hold secrets, reaches it.
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-I", "-m", child.__name__, str(int(self.within_s) + 1), env={},
            stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
        )  # fmt: skip
        try:
            async with asyncio.timeout(self.within_s):
                answer, said = await process.communicate(question)
        except TimeoutError:
            raise self._too_long(what_to_change) from None
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
        status = process.returncode or 0
        if status == 0:
            return answer
        if status == child.REFUSED:
            raise invalid(child.problem_of(answer))
        if status < 0 or status == child.OUT_OF_MEMORY:
            raise self._too_long(what_to_change)
        _log.error("a replay ended with %s: %s", status, said.decode(errors="replace")[-4_000:])
        raise ProblemError(unavailable("the replay failed, and the service's log says how; nothing was changed"))

    def _too_long(self, what_to_change: str) -> ProblemError:
        rule = f"must be replayed within {self.within_s:g} s and {child.MEMORY_MAX >> 20} MiB: {what_to_change}"
        return invalid(FieldProblem(field="trace", rule=rule))

    def _too_many(self) -> ProblemError:
        detail = f"{self.running} replays run already, which is as many as this service runs at a time; try again soon"
        return too_many(detail, wait_s=max(1, int(self.within_s / 4)))
