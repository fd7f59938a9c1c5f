"""How this node reaches the others of a job: the relay of a handoff, and what a wire is measured to bring.

While the job trains undisturbed, each agent measures how it reads the next node of its world that has another address,
once an hour. The ladder counts with that before any handoff has measured more, and the service shows it.
"""

import asyncio
import ipaddress
import logging
import random
from collections.abc import Callable, Coroutine
from urllib.parse import urlsplit
from uuid import UUID, uuid4

from agent.driver.node_context import Node
from agent.protocol.peer import WireAskedBody, WireOfferedBody
from agent.protocol.sync import JobOrder
from agent.protocol.values import utc
from agent.protocol.wires import WireFact, WireOffer, WireSpeed
from agent.supervisor.stream_relays import RelayRefused
from agent.supervisor.wire_checks import WireError
from liver_core.layout import Roster
from liver_core.layout.limits import fitting

CALM_S, SPREAD_S, SPREAD_OF_NODE_S = 10.0, 10.0, 0.1
"""After a world began, or the last handoff ended; and at random as much again, and so much for each node of the world,
so that not all measure and report at once."""
EVERY_S, FAILED_S, BUSY_S = 3_600.0, 600.0, 60.0
"""Until the next measurement; after one that failed; and where the other end had no time."""
ANSWER_S = 100.0
OFFER_EVERY_S = 5.0
"""Who asks again sooner is told to wait."""
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
        self.bytes_per_s: float | None = None
        """What one node gets of another, by the newest measurement here that brought a figure."""
        self._handoff_id = ""
        self._said = ""
        self._next_at: dict[str, float] = {}
        self._offers_from = 0.0
        self._calm_since: tuple[int, float] | None = None
        self._asked: tuple[str, UUID, asyncio.Future[WireOfferedBody]] | None = None
        self._tasks: dict[str, asyncio.Task[None]] = {}

    def relay_of(self, handoff_id: str) -> str:
        """The local name of this node's relay for a handoff; empty where all of the job are at this address."""
        order = self._order()
        if order is None or not any(map(self._is_elsewhere, order.peers)):
            return ""
        if self._handoff_id != handoff_id:
            self._node.relays.expect_nobody(self._handoff_id)
        self._handoff_id = handoff_id
        return self._node.relays.name_for(handoff_id, self._keys(), order.spec.stream_gbps_max)

    def tick(self, active: Roster | None, *, is_calm: bool) -> None:
        """About twice a second. `is_calm`: the job trains in `active`, and no handoff or notice concerns this node."""
        now = _now()
        if active is None or not is_calm:
            self._calm_since = None
            for task in self._tasks.values():
                task.cancel()
            return
        if self._calm_since is None or self._calm_since[0] != active.generation:
            spread_s = SPREAD_S + SPREAD_OF_NODE_S * len(active.node_ids())
            self._calm_since = active.generation, now + CALM_S + spread_s * random.random()
        source = self._neighbour(active)
        if source is None or now < max(self._calm_since[1], self._next_at.get(source, 0.0)) or "measure" in self._tasks:
            return
        self._next_at = {source: now + EVERY_S}
        self._begin("measure", self._measure(source))

    async def take(self, sender: str, body: WireAskedBody | WireOfferedBody) -> None:
        """A message of another agent about a measurement."""
        if isinstance(body, WireOfferedBody):
            if self._asked is not None and self._asked[:2] == (sender, body.check_id) and not self._asked[2].done():
                self._asked[2].set_result(body)
        elif self._calm_since is None:
            self._refuse(sender, body.check_id, "a handoff or a notice concerns it", busy=True)
        elif "offer" in self._tasks or _now() < self._offers_from:
            self._refuse(sender, body.check_id, "it is being measured", busy=True)
        else:
            self._begin("offer", self._offer(sender, body.check_id))

    async def close(self) -> None:
        """End what is being measured."""
        for task in tuple(self._tasks.values()):
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)

    def _begin(self, name: str, work: Coroutine[None, None, None]) -> None:
        task = self._tasks[name] = asyncio.create_task(work)
        task.add_done_callback(lambda _: self._tasks.pop(name, None))

    def _is_elsewhere(self, node_id: str) -> bool:
        order = self._order()
        url = "" if order is None else order.peers.get(node_id, "")
        return bool(url) and _address_in(url) not in (None, _address(self._node.private_address))

    def _neighbour(self, active: Roster) -> str | None:
        """The next node in the order of ranks that is elsewhere: so each is read by one other."""
        nodes = active.node_ids()
        if self._node.node_id not in nodes:
            return None
        at = nodes.index(self._node.node_id)
        return next((name for name in (*nodes[at + 1 :], *nodes[:at]) if self._is_elsewhere(name)), None)

    async def _measure(self, source: str) -> None:
        try:
            self._take_speed(source, await self._speed_of(source))
        except _Busy:
            self._next_at = {source: _now() + BUSY_S}
        except asyncio.CancelledError:
            self._next_at.clear()  # What has begun meanwhile counts more.
            raise
        except Exception as error:
            if not isinstance(error, WireError | RelayRefused | TimeoutError):
                _log.exception("job %s: the wire from %s", self._job_id, source)
            self._next_at = {source: _now() + FAILED_S}
            why = str(error) or f"{source} did not answer within {ANSWER_S:g} s"
            self._say(f"the wire from {source} could not be measured: {why}")
            self._report(source, failed=fitting(why))

    async def _speed_of(self, source: str) -> WireSpeed:
        """Raises WireError, RelayRefused, TimeoutError; _Busy where it is to be asked again soon."""
        check_id, order = uuid4(), self._order()
        offer = await self._ask(source, check_id)
        is_limited = order is not None and order.spec.stream_gbps_max is not None
        bytes_max = LIMITED_BYTES_MAX if is_limited else BYTES_MAX
        async with self._node.relays.for_a_while(str(check_id), self._keys()) as relay:
            return await self._node.wires.measure(self._job_id, str(check_id), relay, offer, bytes_max)

    async def _ask(self, source: str, check_id: UUID) -> WireOffer:
        """What `source` lets this node read. Raises WireError, TimeoutError, _Busy."""
        answered: asyncio.Future[WireOfferedBody] = asyncio.get_running_loop().create_future()
        self._asked = source, check_id, answered
        self._send(source, WireAskedBody(check_id=check_id), "wire/asked")
        async with asyncio.timeout(ANSWER_S):
            answer = await answered
        if answer.busy:
            raise _Busy
        if answer.offer is None:
            raise WireError(f"{source} offers nothing: {answer.reason}")
        return answer.offer

    async def _offer(self, reader: str, check_id: UUID) -> None:
        """Be read, until that is over."""
        try:
            async with (
                self._node.relays.for_a_while(str(check_id), self._keys()) as relay,
                self._node.wires.offer(self._job_id, str(check_id), relay) as (offer, ended),
            ):
                self._send(reader, WireOfferedBody(check_id=check_id, offer=offer), "wire/offered")
                await ended
        except Exception as error:
            if not isinstance(error, WireError | RelayRefused):
                _log.exception("job %s: no wire is offered to %s", self._job_id, reader)
            self._refuse(reader, check_id, str(error), busy=False)
        finally:
            self._offers_from = _now() + OFFER_EVERY_S

    def _refuse(self, reader: str, check_id: UUID, reason: str, *, busy: bool) -> None:
        answer = WireOfferedBody(check_id=check_id, offer=None, reason=fitting(reason), busy=busy)
        self._send(reader, answer, "wire/offered")

    def _take_speed(self, source: str, speed: WireSpeed) -> None:
        self.bytes_per_s = speed.bytes_per_s or self.bytes_per_s
        if speed.wire.is_live:
            self._said = ""
        else:
            why = "; ".join(speed.refused)
            self._say(f"state of {source} is copied here in the pause, over {speed.wire}: {why}")
        self._report(source, speed)

    def _report(self, source: str, speed: WireSpeed | None = None, failed: str = "") -> None:
        said = {"source": source, "target": self._node.node_id, "speed": speed, "failed": failed}
        self._node.outbox.put_wire(WireFact(job_id=self._job_id, measured_utc=utc(self._node.now()), **said))

    def _say(self, text: str) -> None:
        """Once, until it is something else."""
        if text != self._said:
            _log.warning("job %s: %s", self._job_id, text)
        self._said = text


class _Busy(Exception):
    """The other end has no time now."""


def _now() -> float:
    return asyncio.get_running_loop().time()


def _address_in(url: str) -> str | None:
    """The host of a URL, one text for each address; None where the URL has none."""
    try:
        host = urlsplit(url).hostname
    except ValueError:
        return None
    return None if host is None else _address(host)


def _address(host: str) -> str:
    try:
        return str(ipaddress.ip_address(host))
    except ValueError:
        return host
