"""How this node reaches the others of a job: the relay of a handoff, and what a wire is measured to bring.

While the job trains undisturbed, each agent measures how it reads the next node of its world that has another address,
once an hour. The ladder counts with that before any handoff has measured more, and the service shows it.
"""

import asyncio
import logging
import random
from collections.abc import Callable, Coroutine
from urllib.parse import urlsplit
from uuid import UUID, uuid4

from agent.driver.node_context import Node
from agent.protocol.peer import WireAskedBody, WireOfferedBody
from agent.protocol.sync import JobOrder
from agent.protocol.values import utc
from agent.protocol.wires import WireFact, WireOffer
from agent.supervisor.stream_relays import RelayRefused
from agent.supervisor.wire_checks import WireError
from liver_core.layout import Roster

CALM_S, SPREAD_S = 10.0, 10.0
"""After a world began, or the last handoff ended, and as much again at random, so that not all measure at once."""
EVERY_S, AGAIN_S = 3_600.0, 600.0
ANSWER_S = 40.0
BYTES_MAX, LIMITED_BYTES_MAX = 256 << 20, 8 << 20
"""How much a measurement may read; and where the job file bounds what streams beside training."""
Send = Callable[[str, WireAskedBody | WireOfferedBody, str], None]
_log = logging.getLogger(__name__)


class JobWires:
    """Of one job on this node. `send`: to the agent of a node, by a subject of which only the newest matters."""

    def __init__(
        self,
        node: Node,
        job_id: str,
        *,
        order: Callable[[], JobOrder | None],
        keys: Callable[[], tuple[str, ...]],
        send: Send,
    ) -> None:
        self._node, self._job_id = node, job_id
        self._order, self._keys, self._send = order, keys, send
        self._measured: dict[str, WireFact] = {}
        self._next_at: dict[str, float] = {}
        self._calm_since: tuple[int, float] | None = None
        self._asked: tuple[UUID, asyncio.Future[WireOfferedBody]] | None = None
        self._tasks: dict[str, asyncio.Task[None]] = {}

    def relay_of(self, handoff_id: str) -> str:
        """The local name of this node's relay for a handoff; empty where all of the job are at this address."""
        order = self._order()
        if order is None or not any(map(self._is_elsewhere, order.peers)):
            return ""
        return self._node.relays.name_for(handoff_id, self._keys(), order.spec.stream_gbps_max)

    @property
    def bytes_per_s(self) -> float | None:
        """What one node gets of another, by the newest measurement here; None without one."""
        speeds = [fact.speed.bytes_per_s for fact in self._measured.values() if fact.speed and fact.speed.bytes_per_s]
        return speeds[-1] if speeds else None

    def tick(self, active: Roster | None, *, is_calm: bool) -> None:
        """About twice a second. `is_calm`: the job trains in `active`, and no handoff or notice concerns this node."""
        now = asyncio.get_running_loop().time()
        if active is None or not is_calm:
            self._calm_since = None
            return
        if self._calm_since is None or self._calm_since[0] != active.generation:
            self._calm_since = active.generation, now + CALM_S + SPREAD_S * random.random()
        source = self._neighbour(active)
        if source is None or now < max(self._calm_since[1], self._next_at.get(source, 0.0)) or "measure" in self._tasks:
            return
        self._next_at = {source: now + EVERY_S}
        self._begin("measure", self._measure(source))

    async def take(self, sender: str, body: WireAskedBody | WireOfferedBody) -> None:
        """A message of another agent about a measurement."""
        if isinstance(body, WireOfferedBody):
            if self._asked is not None and self._asked[0] == body.check_id and not self._asked[1].done():
                self._asked[1].set_result(body)
        elif "offer" not in self._tasks and self._calm_since is not None:
            self._begin("offer", self._offer(sender, body.check_id))
        else:
            why = "it measures for another node" if "offer" in self._tasks else "a handoff or a notice concerns it"
            self._send(sender, WireOfferedBody(check_id=body.check_id, offer=None, reason=why), "wire/offered")

    async def close(self) -> None:
        """Leave what is being measured; its processes end by themselves."""
        for task in tuple(self._tasks.values()):
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)

    def _begin(self, name: str, work: Coroutine[None, None, None]) -> None:
        task = self._tasks[name] = asyncio.create_task(work)
        task.add_done_callback(lambda _: self._tasks.pop(name, None))

    def _is_elsewhere(self, node_id: str) -> bool:
        order = self._order()
        url = "" if order is None else order.peers.get(node_id, "")
        return bool(url) and urlsplit(url).hostname != self._node.private_address

    def _neighbour(self, active: Roster) -> str | None:
        """The next node in the order of ranks that is elsewhere: so each is read by one other."""
        nodes = active.node_ids()
        if self._node.node_id not in nodes:
            return None
        at = nodes.index(self._node.node_id)
        return next((name for name in (*nodes[at + 1 :], *nodes[:at]) if self._is_elsewhere(name)), None)

    async def _measure(self, source: str) -> None:
        check_id = uuid4()
        speed, failed = None, ""
        try:
            offer = await self._ask(source, check_id)
            order = self._order()
            is_limited = order is not None and order.spec.stream_gbps_max is not None
            bytes_max = LIMITED_BYTES_MAX if is_limited else BYTES_MAX
            async with self._node.relays.for_a_while(str(check_id), self._keys()) as relay:
                speed = await self._node.wires.measure(self._job_id, str(check_id), relay, offer, bytes_max)
        except (WireError, RelayRefused, TimeoutError) as error:
            if self._calm_since is None:  # What began meanwhile has ended it.
                self._next_at.clear()
                return
            failed = str(error) or f"{source} did not answer within {ANSWER_S:g} s"
            self._next_at = {source: asyncio.get_running_loop().time() + AGAIN_S}
        self._note(
            WireFact(
                job_id=self._job_id,
                source=source,
                target=self._node.node_id,
                speed=speed,
                failed=failed,
                measured_utc=utc(self._node.now()),
            )
        )

    async def _ask(self, source: str, check_id: UUID) -> WireOffer:
        """What `source` lets this node read. Raises WireError, TimeoutError."""
        answered: asyncio.Future[WireOfferedBody] = asyncio.get_running_loop().create_future()
        self._asked = check_id, answered
        self._send(source, WireAskedBody(check_id=check_id), "wire/asked")
        async with asyncio.timeout(ANSWER_S):
            answer = await answered
        if answer.offer is None:
            raise WireError(f"{source} offers nothing: {answer.reason}")
        return answer.offer

    async def _offer(self, reader: str, check_id: UUID) -> None:
        try:
            async with self._node.relays.for_a_while(str(check_id), self._keys()) as relay:
                offer, ended = await self._node.wires.offer(self._job_id, str(check_id), relay)
                self._send(reader, WireOfferedBody(check_id=check_id, offer=offer), "wire/offered")
                await ended
        except (WireError, RelayRefused) as error:
            answer = WireOfferedBody(check_id=check_id, offer=None, reason=str(error))
            self._send(reader, answer, "wire/offered")

    def _note(self, fact: WireFact) -> None:
        """Keep it, tell the service, and say once in the log what makes a wire slow."""
        before = self._measured.get(fact.source)
        self._measured = {fact.source: fact}
        self._node.outbox.put_wire(fact)
        said = _why_slow(fact)
        if said and (before is None or _why_slow(before) != said):
            _log.warning("job %s: %s", self._job_id, said)


def _why_slow(fact: WireFact) -> str:
    """Why state of that node is not streamed to this one; empty where it is."""
    if fact.speed is None:
        return f"the wire from {fact.source} could not be measured: {fact.failed}"
    if fact.speed.wire.is_live:
        return ""
    return (
        f"state of {fact.source} is copied here in the pause, over {fact.speed.wire}: {'; '.join(fact.speed.refused)}"
    )
