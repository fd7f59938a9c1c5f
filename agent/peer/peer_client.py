"""Sends envelopes to other agents of a job over reused connections. Only the newest envelope of each subject waits.

A handoff message contains a whole state, so a newer one replaces an older one that is not sent yet.
"""

import asyncio
import logging
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import httpx

from agent.peer.peer_server import STATUS_PATH
from agent.peer.signing import Request, sign, told_time
from agent.protocol.peer import PEER_PATH, Envelope, in_time_of
from liver_core.steady_clock import Clock

TIMEOUT_S = 2.0
RETRY_S = 1.0
CONNECTIONS_MAX = 256
SILENT_TRIES = 3
FRESH_S = 5.0
CLOCKS_APART_S = 5.0
"""Clocks that differ by no more count as the same: a message takes its time too."""
QUICK_S = 1.0
"""An answer that came so soon tells how far the clock of its sender is ahead, to half of this."""
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Silence:
    """An agent that does not answer: when the first and the last try failed, and the number of tries."""

    since: float
    last: float
    tries: int


@dataclass(slots=True)
class PeerClock:
    """The clock of another node, ahead of this node's by `measured_s`. `ahead_s` is by how much times are moved for it:
    nothing for one that is about right, and no other value before it has clearly changed."""

    measured_s: float = 0.0
    ahead_s: float = 0.0

    def take(self, told: float, sent: float, arrived: float) -> bool:
        """It was `told` between `sent` and `arrived` by the own clock. Whether times are moved differently now."""
        self.measured_s = told - (sent + arrived) / 2
        if arrived - sent > QUICK_S or abs(self.measured_s - self.ahead_s) <= CLOCKS_APART_S:
            return False
        self.ahead_s = self.measured_s if abs(self.measured_s) > CLOCKS_APART_S else 0.0
        return True

    def __str__(self) -> str:
        if not self.ahead_s:
            return "about the same as here again"
        how = "ahead of" if self.ahead_s > 0 else "behind"
        return f"{abs(self.ahead_s):.1f} s {how} this node's: times in messages to it are moved by that"


@dataclass(frozen=True, slots=True)
class PeerCall:
    """One request to another agent. `body`: where times in it are moved forward by so much."""

    method: str
    job_id: str
    node_id: str
    path: str
    body: Callable[[float], bytes]


class PeerUnreachable(Exception):
    """No answer, or an answer that is an error; the text says what happened."""


class PeerClient:
    """`address_of(job_id, node_id)` gives the URL, None where it is not known; `keys_of(job_id)` the job's valid keys,
    the current one first."""

    def __init__(
        self,
        address_of: Callable[[str, str], str | None],
        keys_of: Callable[[str], Sequence[str]],
        *,
        timeout_s: float = TIMEOUT_S,
        connections_max: int = CONNECTIONS_MAX,
        now: Clock = time.time,
    ) -> None:
        self._address_of, self._keys_of = address_of, keys_of
        self._now = now
        self._clocks: dict[str, PeerClock] = {}
        self._client = httpx.AsyncClient(
            timeout=timeout_s,
            trust_env=False,
            limits=httpx.Limits(max_connections=connections_max, keepalive_expiry=60.0),
        )
        self._newest: dict[tuple[str, str, str], Envelope] = {}
        self._tasks: dict[tuple[str, str, str], asyncio.Task[None]] = {}
        self._silences: dict[tuple[str, str], Silence] = {}
        self._undelivered: dict[tuple[str, str], tuple[str, int]] = {}

    def send_newest(self, envelope: Envelope, subject: str, *, attempts: int = 1) -> None:
        """Send without waiting. Replaces an envelope to the same node about the same subject that still waits.

        One attempt is enough for a message that is repeated anyway; a message sent only once needs several.
        """
        key = (envelope.job_id, envelope.receiver, subject)
        self._newest[key] = envelope
        if key not in self._tasks:
            self._tasks[key] = asyncio.create_task(self._drain(key, attempts))

    async def send(self, envelope: Envelope) -> None:
        """Send and wait until the receiver has accepted it. Times in it are moved to the receiver's clock. Raises
        PeerUnreachable."""

        def body(ahead_s: float) -> bytes:
            return in_time_of(envelope, ahead_s).model_dump_json(by_alias=True).encode()

        await self._request(PeerCall("POST", envelope.job_id, envelope.receiver, PEER_PATH, body))

    async def status(self, job_id: str, node_id: str) -> dict[str, Any]:
        """The other agent's summary of a job. Raises PeerUnreachable."""
        return (await self._request(PeerCall("GET", job_id, node_id, STATUS_PATH, lambda _: b""))).json()

    def unreachable_since(self, job_id: str) -> dict[str, float]:
        """Agents that several requests did not reach, one of them just now; since when (seconds since 1970).

        An old failure does not count if nothing was sent to the agent since.
        """
        fresh = self._now() - FRESH_S
        return {
            node_id: silence.since
            for (job, node_id), silence in self._silences.items()
            if job == job_id and silence.tries >= SILENT_TRIES and silence.last >= fresh
        }

    def mark_reachable(self, job_id: str, node_id: str) -> None:
        """The agent sent something, so it is reachable: forget its failures."""
        self._silences.pop((job_id, node_id), None)

    async def close(self) -> None:
        """Drop what waits and close the connections."""
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)
        await self._client.aclose()

    async def _drain(self, key: tuple[str, str, str], attempts: int) -> None:
        try:
            while (envelope := self._newest.pop(key, None)) is not None:
                for attempt in range(1, attempts + 1):
                    try:
                        await self.send(envelope)
                        self._undelivered.pop((envelope.job_id, envelope.receiver), None)
                        break
                    except PeerUnreachable as error:
                        self._say_undelivered(envelope, str(error))
                    if attempt < attempts and key not in self._newest:
                        await asyncio.sleep(RETRY_S)
        finally:
            del self._tasks[key]

    def _say_undelivered(self, envelope: Envelope, why: str) -> None:
        """Orders are sent again and again to an agent that may be gone: the first time is logged, then the second, the
        fourth, and so on, until it is for another reason."""
        key = (envelope.job_id, envelope.receiver)
        known, times = self._undelivered.get(key, ("", 0))
        times = times + 1 if known == why else 1
        self._undelivered[key] = why, times
        if times.bit_count() == 1:
            again = f" ({times} times by now)" if times > 1 else ""
            what = (envelope.job_id, envelope.body.kind, envelope.receiver)
            _log.info("job %s: %s to node %s was not delivered%s: %s", *what, again, why)

    async def _request(self, call: PeerCall) -> httpx.Response:
        url = self._address_of(call.job_id, call.node_id)
        if url is None:
            # Whoever has left the job, so that orders do not name it any more, will never answer either.
            self._note_silence(call)
            raise PeerUnreachable(f"the address of {call.node_id} is not known")
        response = None
        # An agent that is cut off from the service may know only the key before the current one.
        for key in self._keys_of(call.job_id):
            response, has_key = await self._try(call, url.rstrip("/"), key)
            if response.status_code == 401 and has_key:
                # Again, with what the answer said of the receiver's clock.
                response, _ = await self._try(call, url.rstrip("/"), key)
            if response.status_code != 401 or has_key:
                break
        if response is None:
            raise PeerUnreachable(f"no key of job {call.job_id} is known")
        self.mark_reachable(call.job_id, call.node_id)
        if response.status_code >= 300:
            raise PeerUnreachable(f"{call.node_id} at {url} answered {response.status_code}: {response.text[:500]}")
        return response

    def _note_silence(self, call: PeerCall) -> None:
        now = self._now()
        known = self._silences.get((call.job_id, call.node_id), Silence(now, now, 0))
        self._silences[(call.job_id, call.node_id)] = Silence(known.since, now, known.tries + 1)

    async def _try(self, call: PeerCall, url: str, key: str) -> tuple[httpx.Response, bool]:
        """The answer to the call signed with this key, and whether it shows that the receiver has the key."""
        clock = self._clocks.setdefault(call.node_id, PeerClock())
        request = Request(call.method, call.path, call.job_id, call.body(clock.ahead_s))
        sent, nonce = self._now(), secrets.token_hex(16)
        headers = sign(request, key, now=sent + clock.measured_s, nonce=nonce)
        try:
            response = await self._client.request(call.method, url + call.path, content=request.body, headers=headers)
        except httpx.PoolTimeout:
            # Nothing was sent: it says that this agent has too much to say at once, and nothing of the other one.
            raise PeerUnreachable(
                f"{call.node_id} at {url} was not called: all connections of this agent are in use"
            ) from None
        except httpx.HTTPError as error:
            self._note_silence(call)
            raise PeerUnreachable(f"{call.node_id} at {url}: {type(error).__name__}: {error}") from None
        told = told_time(request, nonce, key, response.headers)
        if told is not None and clock.take(told, sent, self._now()):
            _log.warning("the clock of node %s is %s", call.node_id, clock)
        return response, told is not None
