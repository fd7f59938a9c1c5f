"""A store that runs before the handoff that will need it: starting one takes longer than all else between a notice and
its decision. The agents that are first to lead keep one each; whichever opens the handoff uses its own.

It is the store of one generation, like any other. When that number is used elsewhere it is ended, and the next started.
"""

import asyncio
import contextlib
import logging

from agent.driver.node_context import Node
from agent.supervisor.records import StoreKey
from agent.supervisor.stores import StoreError

KEPT_BY = 2
"""So many agents keep one: the first to lead, and the next one where the first is what goes."""
RETRY_S = 10.0
_log = logging.getLogger(__name__)


class SpareStore:
    """Of one job on this node."""

    def __init__(self, node: Node, job_id: str) -> None:
        self.key: StoreKey | None = None
        self._node = node
        self._job_id = job_id
        self._starting: asyncio.Task[None] | None = None
        self._retry_at = float("-inf")

    @property
    def is_starting(self) -> bool:
        """Whether a store is on its way, which nobody else knows yet."""
        return self._starting is not None and not self._starting.done()

    async def keep(self, generation: int | None) -> None:
        """Have the store of this generation run, and no other; None: none is wanted. Waits for no start."""
        wanted = None if generation is None else StoreKey(self._job_id, generation)
        if self.is_starting:
            return
        if self.key is not None and self.key != wanted:
            key, self.key = self.key, None
            await self._node.stores.retire(key)
        if wanted is None or self.key == wanted or self._node.now() < self._retry_at:
            return
        self.key = wanted
        self._starting = asyncio.create_task(self._start(wanted))

    def use(self, generation: int) -> None:
        """The store of this generation is no spare any more: a handoff needs it from now on, or it died."""
        if self.key == StoreKey(self._job_id, generation):
            self.key = None

    async def close(self) -> None:
        """Stop starting one. What runs lives on, and the next agent ends it."""
        if self._starting is not None:
            self._starting.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._starting

    async def _start(self, key: StoreKey) -> None:
        try:
            await self._node.stores.host(key, self._node.private_address)
        except StoreError as error:
            _log.warning("job %s: no store is kept ready: %s", self._job_id, error)
            self._retry_at = self._node.now() + RETRY_S
            if self.key == key:
                self.key = None
