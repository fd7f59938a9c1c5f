"""What a wake-up brings: the node's new orders, so that it need not ask for them. Made of committed rows only, for
nodes that have a part in the job by now; once for all of them, in one transaction for all that are woken together.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence
from datetime import datetime

from sqlalchemy.exc import SQLAlchemyError

from service.gathering import Gathering
from service.lanes import Lane
from service.pressing import Pressing
from service.problems import ProblemError
from service.sync.answers import KeptOrders, Rendered, StandingNow, ToldOrders, news_for, standing_nodes

WAIT_S = 0.5
"""Then the wake-up goes without: the agent asks at once."""
TOGETHER_MAX = 1_024
"""So many nodes are looked up at once: more than most jobs have."""
_Ask = tuple[str, str]
_Found = tuple[StandingNow, Rendered]
_log = logging.getLogger(__name__)


class News:
    """Of nodes whose last answer, by this process, was the order of one job. Used in the event loop only."""

    def __init__(
        self,
        lane: Lane,
        orders: KeptOrders,
        told: ToldOrders,
        clock: Callable[[], datetime],
        pressing: Pressing,
        *,
        lost_after_s: float,
    ) -> None:
        self._lane = lane
        self._orders = orders
        self._told = told
        self._clock = clock
        self._pressing = pressing
        self._lost_after_s = lost_after_s
        # What has changed since a look began needs another look: nobody waits for the time between two.
        self._gathering: Gathering[_Ask, _Found | None] = Gathering(self._look, most=TOGETHER_MAX, every_s=0.0)

    async def of(self, node_id: str) -> str | None:
        """New orders of the node as JSON of `WakeOrders`; None where there are none, where they did not come in time,
        and where only the answer to a report can say them."""
        told = self._told.of(node_id)
        if told is None:
            return None
        try:
            async with asyncio.timeout(WAIT_S):
                found = await self._gathering.ask((node_id, told.job_id))
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

    async def _look(self, asked: Sequence[_Ask]) -> Sequence[_Found | None]:
        found = await self._lane.run(self._made, frozenset(asked))
        return [found.get(ask) for ask in asked]

    def _made(self, asked: frozenset[_Ask]) -> dict[_Ask, _Found]:
        now, orders = self._clock(), {}
        with self._pressing.at_work(), self._lane.reading() as session:
            standing = standing_nodes(session, asked)
            jobs = {row.job_id: row for row in standing.values()}
            if len(jobs) > 1:
                self._orders.make(session, jobs.values(), lost_after_s=self._lost_after_s, now=now)
            for row in jobs.values():
                orders[row.job_id] = self._orders.of(session, row, lost_after_s=self._lost_after_s, now=now)
        made = ((ask, jobs[ask[1]], orders[ask[1]]) for ask in standing)
        return {ask: (row, rendered) for ask, row, rendered in made if isinstance(rendered, Rendered)}
