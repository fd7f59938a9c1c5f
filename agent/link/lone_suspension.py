"""Agents suspend a job by themselves where nothing fits without the nodes that go, and the service cannot be heard.

Who leads says when to all members, again and again. Ranks end behind a step only when all of them are asked to, so that
an agent that hears of it late delays the end and loses nothing. Where the service has named a time, that one counts.
"""

import logging
from collections.abc import Callable, Mapping
from datetime import datetime, timedelta

from agent.protocol.peer import SuspensionBody
from agent.protocol.values import utc
from liver_core.handoff import FailedPart, FailureCause, Reason
from liver_core.handoff.suspending import COMMITTED_S, EndTimes, begins_at
from liver_core.layout import Roster
from liver_core.layout.limits import fitting
from liver_core.steady_clock import Clock

ALONE_AFTER_S = 5.0
"""Since the last answered report, which agents of a job that trains send every second. The service may be about to say
what is to be done."""
AGAIN_S, AGAIN_FOR_S = 2.0, 60.0
"""How often it is said again, and for how long after the time that it names, or after it was called off."""
_log = logging.getLogger(__name__)


class LoneSuspension:
    """Of one job on this node. `heard_ago`: seconds since the service answered; `tell` sends to the agent of a node."""

    def __init__(
        self,
        node_id: str,
        job_id: str,
        *,
        now: Clock,
        heard_ago: Callable[[], float],
        tell: Callable[[str, SuspensionBody], None],
    ) -> None:
        self._node_id, self._job_id = node_id, job_id
        self._now, self._heard_ago, self._tell = now, heard_ago, tell
        self._wanted: SuspensionBody | None = None
        self._said: SuspensionBody | None = None
        self._others: tuple[str, ...] = ()
        self._again_at, self._again_until = float("-inf"), float("-inf")

    def at(self, generation: int | None) -> datetime | None:
        """When the ranks of this world are to end by what the agents decided, None if they are not."""
        return _time_of(self._wanted, generation)

    @property
    def reason(self) -> Reason:
        """Why the ranks are ended: what the node that goes first is the cause of."""
        text, node = ("", "") if self._wanted is None else (self._wanted.reason, self._wanted.goes)
        return Reason(text, "suspend", node=node, cause=FailureCause(FailedPart.NODE))

    async def take(self, body: SuspensionBody) -> None:
        """The agent that leads says when, or that it is called off."""
        if body != self._wanted:
            _log.warning("job %s: its suspension without the service %s", self._job_id, self._when(body))
        self._wanted = body

    def _when(self, body: SuspensionBody) -> str:
        if body.at_utc is None:
            return "is called off"
        at = "at once" if body.at_utc <= utc(self._now()) else f"at {body.at_utc:%H:%M:%S} UTC"
        return f"begins {at}: {body.reason}"

    async def plan(self, world: Roster, going: Mapping[str, datetime | None], times: EndTimes, why: str) -> None:
        """This agent leads, and nothing fits without the nodes that are `going`, each by a deadline if one is known.
        Called about twice a second."""
        now, said = utc(self._now()), _time_of(self._said, world.generation)
        if said is not None and said <= now + timedelta(seconds=COMMITTED_S):
            return
        if self._heard_ago() < ALONE_AFTER_S:
            return await self.call_off()
        at = begins_at(tuple(going.values()), times, said) or now
        if at == said:
            return
        reason = fitting(f"{why}; the service is not heard")
        first = min(going, key=lambda node: (going[node] or now, node))
        body = SuspensionBody(generation=world.generation, at_utc=at, reason=reason, goes=first)
        await self._say(body, world.node_ids())

    async def call_off(self) -> None:
        """This agent sees another way by now, or the service does. Too late where some may have begun."""
        said = self._said
        if said is None or said.at_utc is None or said.at_utc <= utc(self._now()) + timedelta(seconds=COMMITTED_S):
            return
        await self._say(said.model_copy(update={"at_utc": None}), (*self._others, self._node_id))

    def tick(self) -> None:
        """Say it again to the others; one of them may have been away."""
        if self._said is not None and self._again_at <= self._now() < self._again_until:
            self._again_at = self._now() + AGAIN_S
            for name in self._others:
                self._tell(name, self._said)

    def end(self) -> None:
        """The ranks have ended here, or another world has come: what was said is over."""
        self._wanted = self._said = None

    async def _say(self, body: SuspensionBody, members: tuple[str, ...]) -> None:
        self._said, self._others = body, tuple(name for name in members if name != self._node_id)
        self._again_at = float("-inf")
        self._again_until = max(self._now(), body.at_utc.timestamp() if body.at_utc else 0.0) + AGAIN_FOR_S
        await self.take(body)
        self.tick()


def _time_of(body: SuspensionBody | None, generation: int | None) -> datetime | None:
    return body.at_utc if body is not None and body.generation == generation else None
