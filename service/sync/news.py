"""What a wake-up brings: the node's new orders, so that it need not ask for them. Made of committed rows only, once for
all nodes of a job, in one transaction for all jobs that have changed at about the same time.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence
from datetime import datetime

from sqlalchemy.exc import SQLAlchemyError

from service.gathering import Gathering
from service.lanes import Lane
from service.problems import ProblemError
from service.sync.answers import KeptOrders, Rendered, StandingNow, ToldOrders, news_for, standing_jobs

WAIT_S = 0.5
"""Then the wake-up goes without: the agent asks at once."""
_log = logging.getLogger(__name__)


class News:
    """Of nodes whose last answer, by this process, was the order of one job. Used in the event loop only."""

    def __init__(
        self,
        lane: Lane,
        orders: KeptOrders,
        told: ToldOrders,
        clock: Callable[[], datetime],
        *,
        lost_after_s: float,
    ) -> None:
        self._lane = lane
        self._orders = orders
        self._told = told
        self._clock = clock
        self._lost_after_s = lost_after_s
        # What has changed since a look began needs another look: nobody waits for the time between two.
        self._gathering: Gathering[str, tuple[StandingNow, Rendered] | None] = Gathering(self._look, every_s=0.0)

    async def of(self, node_id: str) -> str | None:
        """New orders of the node as JSON of `WakeOrders`; None where there are none, where they did not come in time,
        and where only the answer to a report can say them."""
        told = self._told.of(node_id)
        if told is None:
            return None
        try:
            async with asyncio.timeout(WAIT_S):
                found = await self._gathering.ask(told.job_id)
        except (TimeoutError, SQLAlchemyError, ProblemError) as error:
            _log.debug("node %s is woken without its orders: %s", node_id, error)
            return None
        if found is None:
            return None
        standing, rendered = found
        news = news_for(node_id, told, standing, rendered, now=self._clock())
        if news is not None and self._told.of(node_id) is told:
            self._told.note(node_id, told._replace(orders_seq=standing.orders_seq))
        return news

    async def _look(self, job_ids: Sequence[str]) -> Sequence[tuple[StandingNow, Rendered] | None]:
        found = await self._lane.run(self._made, frozenset(job_ids))
        return [found.get(job_id) for job_id in job_ids]

    def _made(self, job_ids: frozenset[str]) -> dict[str, tuple[StandingNow, Rendered]]:
        now, found = self._clock(), {}
        with self._lane.sessions() as session:
            standing = standing_jobs(session, job_ids)
            if len(standing) > 1:
                self._orders.make(session, standing, lost_after_s=self._lost_after_s, now=now)
            for row in standing:
                rendered = self._orders.of(session, row, lost_after_s=self._lost_after_s, now=now)
                if rendered is not None:
                    found[row.job_id] = row, rendered
        return found
