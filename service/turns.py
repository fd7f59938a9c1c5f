"""One report of a node at a time. An agent whose report timed out sends the next while this one may still wait for a
lock; a report says the whole state, so that only the newest is worth waiting.

Used in the event loop only.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

WAIT_S = 5.0
"""Less than agents wait for an answer: they get to know why there is none."""


class LostTurn(Exception):
    """The report is not stored, and why. Nothing of it was begun."""


class Turns:
    """By node: which has a report at work, and what would come next."""

    def __init__(self) -> None:
        self._busy: set[str] = set()
        self._next: dict[str, asyncio.Future[bool]] = {}

    @asynccontextmanager
    async def of(self, node_id: str, gone: asyncio.Future[None]) -> AsyncIterator[None]:
        """Within it, no other report of this node is at work. Raises LostTurn. `gone`: done once nobody waits for the
        answer any more."""
        if node_id in self._busy:
            await self._wait(node_id, gone)
        self._busy.add(node_id)
        try:
            yield
        finally:
            self._end(node_id)

    async def _wait(self, node_id: str, gone: asyncio.Future[None]) -> None:
        older = self._next.get(node_id)
        mine = self._next[node_id] = asyncio.get_running_loop().create_future()
        if older is not None:
            older.set_result(False)
        try:
            await asyncio.wait((mine, gone), timeout=WAIT_S, return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            self._leave(node_id, mine)
            raise
        if mine.done() and mine.result():
            return
        self._leave(node_id, mine)
        if mine.done():
            raise LostTurn(f"a newer report of node {node_id} waits for its turn")
        if gone.done():
            raise LostTurn(f"a report of node {node_id} waited for its turn, and its agent has gone")
        raise LostTurn(f"an earlier report of node {node_id} is still being stored after {WAIT_S:.0f} s")

    def _leave(self, node_id: str, mine: asyncio.Future[bool]) -> None:
        """Give up waiting; a turn that came in the same moment goes on to the next."""
        if self._next.get(node_id) is mine:
            del self._next[node_id]
        if mine.done() and mine.result():
            self._end(node_id)

    def _end(self, node_id: str) -> None:
        following = self._next.pop(node_id, None)
        if following is None:
            self._busy.discard(node_id)
        else:
            following.set_result(True)
