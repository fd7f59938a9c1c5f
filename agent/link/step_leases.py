"""Gives the ranks of one job on this node step leases (`liver_core.rank.step_lease`).

The service may start a job elsewhere when it has heard none of its nodes for a while, which the orders state. So each
answer of the service gives a lease for a good part of that time. When answers stop, either the service is away, and
then nobody starts anything, or this node is cut off or was stopped. The other agents of the job tell which.
"""

import asyncio
import logging
import math
import random
import time
from collections.abc import Awaitable, Callable, Sequence

from agent.protocol.step_leases import ASK_SHARE, may_go_on
from agent.protocol.sync import LEASE_SHARE

PERIOD_S = 2.0
EXTENDED_S = 4.0
PEERS_MAX = 8
_log = logging.getLogger(__name__)

HeardAgo = Callable[[str], Awaitable[float | None]]
"""Seconds since the service answered another agent, -inf where that one knows of a newer start; None if it gives no
answer."""


class StepLeases:
    """`reaches_service`: whether its machine can be reached, whatever runs there. `look_again`: sync now, since the
    service is there. `give` sends a lease to the ranks of the job here that still belong to it."""

    def __init__(
        self,
        job_id: str,
        *,
        heard_ago: HeardAgo,
        reaches_service: Callable[[], Awaitable[bool]],
        look_again: Callable[[], None],
        give: Callable[[float], Awaitable[None]],
    ) -> None:
        self._job_id = job_id
        self._heard_ago = heard_ago
        self._reaches_service = reaches_service
        self._look_again = look_again
        self._give = give
        self._heard_at = self._there_at = -math.inf
        self._next_at = 0.0
        self._task: asyncio.Task[None] | None = None
        self._is_refused = False

    def take_answer(self, at: float) -> None:
        """The service answered a report of this node sent at `at` (time.monotonic), and its orders name the job."""
        self._heard_at, self._there_at = at, -math.inf

    def renew_now(self) -> None:
        """A rank has connected: give it a lease at the next tick."""
        self._next_at = 0.0

    def tick(self, peers: Sequence[str], lost_after_s: float) -> None:
        """Renew the leases if it is time. Never waits. `peers`: the other agents of the job; `lost_after_s`: when no
        member is heard for so long, the service may start the job elsewhere."""
        now = time.monotonic()
        if now >= self._next_at and (self._task is None or self._task.done()):
            self._next_at = now + PERIOD_S
            self._task = asyncio.create_task(self.renew(peers, lost_after_s))

    async def close(self) -> None:
        """Give no more leases."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def renew(self, peers: Sequence[str], lost_after_s: float) -> None:
        """Give the leases that may be given now; arguments as for `tick`."""
        now, recent_s = time.monotonic(), ASK_SHARE * lost_after_s
        if now - self._heard_at <= recent_s:
            self._say(is_refused=False)
            await self._give(self._heard_at + LEASE_SHARE * lost_after_s)
            return
        asked = random.sample(list(peers), min(PEERS_MAX, len(peers)))
        answers = await asyncio.gather(*(self._heard_ago(name) for name in asked))
        known = [ago for ago in answers if ago is not None]
        reaches = bool(known) or not asked or await self._reaches_service()
        # What an agent has told counts also when that one is gone; of a newer start, until the service answers here.
        self._there_at = max(self._there_at, *(now - ago for ago in known), -math.inf)
        is_there = now - self._there_at <= recent_s
        if is_there:
            self._look_again()
        if may_go_on(is_there=is_there, reaches_anybody=reaches):
            self._say(is_refused=False)
            await self._give(time.monotonic() + EXTENDED_S)
            return
        if now - self._heard_at > LEASE_SHARE * lost_after_s:
            self._say(is_refused=True)
        if math.isfinite(self._heard_at):
            # What its last answer is worth; also where that is over, for a rank that was never given one needs none.
            await self._give(self._heard_at + LEASE_SHARE * lost_after_s)

    def _say(self, *, is_refused: bool) -> None:
        if is_refused and not self._is_refused:
            _log.warning(
                "job %s: the service has not answered this node for a while, but may be there for others and start the "
                "job elsewhere: ranks wait before their next step, unless another node of the job is heard",
                self._job_id,
            )
        elif self._is_refused and not is_refused:
            _log.info("job %s: ranks go on", self._job_id)
        self._is_refused = is_refused
