"""The sync loop and the wake stream. Nothing in the agent ever waits for either of them."""

import asyncio
import logging
import math
import random
import ssl
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from datetime import datetime
from enum import StrEnum

import httpx
from pydantic import ValidationError

from agent.link.kept_orders import answered_of, brought, known_of, whole
from agent.protocol import PROTOCOL_VERSION
from agent.protocol.errors import REPLACED, VERSION_MISMATCH
from agent.protocol.joining import JOIN_PATH
from agent.protocol.sync import SyncOrders, SyncReport
from agent.protocol.wake_up import WakeEvent, WakeOrders
from liver_core.retries import doubled_s

SYNC_PATH = "/agent/v1/sync"
WAKE_PATH = "/agent/v1/wake"
TIMEOUT_S = 10.0
BACKOFF_FIRST_S = 0.5
BACKOFF_MAX_S = 5.0
AFTER_TIMEOUT_S = 1.0
"""A service that did not answer in time may still work on that report: the next one would only wait behind it."""
POLL_LEAST_S, AWAKE_LEAST_S = 0.05, 0.01
"""News within this time goes into one report. The second: the least time from one sync to the next where the service
wakes the agent, since there are orders to fetch."""
SPACING_S, CALM_S = 0.25, 1.0
"""Least time between two syncs: SPACING_S if only this agent has news; if it has only progress to report CALM_S, or the
period that the service asks for. A sync takes processor time from ranks that train on the same cores."""
POLL_MOST_S = 60.0
WAKE_SILENCE_S = 60.0
ORDERS_BYTES_MAX = 64 * 1024 * 1024

_log = logging.getLogger(__name__)


class LinkState(StrEnum):
    """How the last sync went."""

    STARTING = "starting"
    CONNECTED = "connected"
    AWAY = "away"
    REFUSED = "refused"


class LinkRefused(Exception):
    """Service and agent cannot work together: another version, a wrong token, an unreadable report or answer."""


class LinkReplaced(LinkRefused):
    """Another agent serves this node now. This one is of no more use to anybody."""


class ServiceAway(Exception):
    """The service does not answer, or asks to retry later: not before `least_s`, also when it wakes the agent."""

    def __init__(self, text: str, *, least_s: float = 0.0) -> None:
        super().__init__(text)
        self.least_s = least_s


class ServiceLink:
    """`make_report(seq)` makes the next report. `take_orders` is called with each answer and with orders that a wake-up
    brings, `take_back` with the number of a report that the service refuses as a whole for what it holds. Call
    `sync_soon` for news that the service needs soon, `sync_with_progress` for progress."""

    def __init__(
        self,
        *,
        service_url: str,
        auth: httpx.Auth,
        tls_ca: str | None = None,
        node_id: str,
        make_report: Callable[[int], Awaitable[SyncReport]],
        take_orders: Callable[[SyncOrders], Awaitable[None]],
        take_back: Callable[[int], None] = lambda _report_seq: None,
    ) -> None:
        self.ends_on_first_refusal = True
        self.state = LinkState.STARTING
        self.reason = "no sync yet"
        self._node_id = node_id
        self._make_report = make_report
        self._take_orders = take_orders
        self._take_back = take_back
        self._client = httpx.AsyncClient(
            base_url=service_url,
            auth=auth,
            timeout=TIMEOUT_S,
            verify=ssl.create_default_context(cafile=tls_ca) if service_url.startswith("https://") else False,
        )
        self._news = asyncio.Event()
        self._prompt = asyncio.Event()
        self._awake = asyncio.Event()
        self._report_seq = 0
        self._orders: SyncOrders | None = None
        self._brought: WakeOrders | None = None
        self._answered: tuple[datetime, float] | None = None
        self._calm_s = CALM_S
        self._away_rounds = 0
        self._least_s = 0.0
        self.heard_at = -math.inf
        """When the last report was sent that the service has answered, by time.monotonic."""

    def is_there(self) -> bool:
        """Whether the last sync was answered."""
        return self.state is LinkState.CONNECTED

    def look_again(self) -> None:
        """The service answers others: do not wait for the end of the backoff."""
        self._awake.set()

    def sync_soon(self) -> None:
        """There is news to report or an order to fetch: sync soon."""
        self._prompt.set()
        self._news.set()

    def sync_with_progress(self) -> None:
        """There is progress to report: sync within about a second."""
        self._news.set()

    async def run(self) -> None:
        """Sync until cancelled. Raises LinkRefused only if the very first answer is a refusal, and LinkReplaced.

        An agent that adopted ranks sets `ends_on_first_refusal` to False, because the ranks need it.
        """
        wake = asyncio.create_task(self._listen())
        try:
            while True:
                began = time.monotonic()
                pause_s = await self._round()
                if self._least_s > 0.0:
                    await asyncio.sleep(random.uniform(self._least_s, 1.5 * self._least_s))
                # While the service does not answer, news does not shorten the backoff; only a wake-up does.
                news = self._news if self.state is LinkState.CONNECTED else self._awake
                try:
                    async with asyncio.timeout(pause_s):
                        await news.wait()
                except TimeoutError:
                    continue
                await self._take_brought()
                # Whoever is woken goes at once; only wake-ups that follow each other closely are taken together.
                is_awake = self._awake.is_set()
                await asyncio.sleep(max(0.0, began + AWAKE_LEAST_S - time.monotonic()) if is_awake else POLL_LEAST_S)
                for reason, spacing_s in ((self._prompt, self._calm_s), (self._awake, SPACING_S)):
                    with suppress(TimeoutError):
                        async with asyncio.timeout(max(0.0, began + spacing_s - time.monotonic())):
                            await reason.wait()
        finally:
            wake.cancel()
            await asyncio.gather(wake, return_exceptions=True)
            await self._client.aclose()

    async def check_token(self) -> None:
        """Ask for the wake stream once, before anything that takes long. Raises LinkRefused where the service does not
        take the token; that the service is away, or answers anything else, is for `run` to deal with."""
        try:
            async with self._client.stream("GET", WAKE_PATH, params={"node_id": self._node_id}) as response:
                if response.status_code not in (401, 403) and response.request.url.path != JOIN_PATH:
                    return
                await response.aread()
        except httpx.HTTPError as error:
            _log.warning("service %s does not answer: %s: %s", self._client.base_url, type(error).__name__, error)
            return
        refusal = _refusal(response)
        if isinstance(refusal, ServiceAway):
            _log.warning("service %s does not answer: %s", self._client.base_url, refusal)
        elif self.ends_on_first_refusal:
            raise refusal

    async def sync(self) -> SyncOrders:
        """One report, one answer. Raises LinkRefused or ServiceAway."""
        self._report_seq += 1
        # Before the report is dated: the answer must not seem to have come earlier than it did.
        answered = answered_of(self._answered, time.monotonic())
        made = await self._make_report(self._report_seq)
        report = made.model_copy(update=known_of(self._orders) | answered)
        body = report.model_dump_json(by_alias=True)
        try:
            response = await self._client.post(SYNC_PATH, content=body, headers={"Content-Type": "application/json"})
        except httpx.HTTPError as error:
            least_s = AFTER_TIMEOUT_S if isinstance(error, httpx.ReadTimeout) else 0.0
            raise ServiceAway(f"{type(error).__name__}: {error}", least_s=least_s) from None
        if response.status_code in (413, 422):
            self._take_back(report.report_seq)
        if response.status_code != 200:
            raise _refusal(response)
        if len(response.content) > ORDERS_BYTES_MAX:
            raise LinkRefused(f"the orders have {len(response.content)} bytes, at most {ORDERS_BYTES_MAX}")
        try:
            orders = SyncOrders.model_validate_json(response.content)
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(map(str, first["loc"]))
            raise LinkRefused(f"the orders cannot be read: {where}: {first['msg']}") from None
        if orders.protocol_version != PROTOCOL_VERSION:
            raise LinkRefused(
                f"the service has protocol version {orders.protocol_version}, this agent {PROTOCOL_VERSION}: "
                "install the same liver release on both"
            )
        self._answered = orders.issued_utc, time.monotonic()
        had, self._orders = self._orders, None  # What cannot be put together is asked for as a whole.
        try:
            self._orders = whole(orders, had)
        except ValueError as error:
            raise LinkRefused(str(error)) from None
        return self._orders

    async def _round(self) -> float:
        """Sync once and take the answer. Returns how long to wait for news."""
        self._news.clear()
        self._prompt.clear()
        self._awake.clear()
        self._least_s = 0.0
        await self._take_brought()
        began = time.monotonic()
        try:
            orders = await self.sync()
        except LinkReplaced:
            raise
        except LinkRefused as error:
            if self.state is LinkState.STARTING and self.ends_on_first_refusal:
                raise
            self._set_state(LinkState.REFUSED, str(error))
            return self._backoff_s()
        except ServiceAway as error:
            self._least_s = error.least_s
            self._set_state(LinkState.AWAY, str(error))
            return self._backoff_s()
        self._away_rounds, self.heard_at = 0, began
        self._set_state(LinkState.CONNECTED, "")
        await self._take_orders(orders)
        self._calm_s = max(CALM_S, min(POLL_MOST_S, orders.progress_s))
        return min(POLL_MOST_S, max(POLL_LEAST_S, orders.poll_s))

    async def _take_brought(self) -> None:
        """Take what the last wake-up brought, unless an answer since then says as much. Never while a report is under
        way: its answer may be older or newer."""
        orders, self._brought = self._brought, None
        taken = brought(orders, self._orders) if orders is not None else None
        if taken is not None:
            self._orders = taken
            await self._take_orders(taken)

    def _set_state(self, state: LinkState, reason: str) -> None:
        if (state, reason) != (self.state, self.reason):
            if state is LinkState.CONNECTED:
                _log.info("the service at %s is connected", self._client.base_url)
            else:
                how = "refuses this agent" if state is LinkState.REFUSED else "is away"
                _log.warning("the service at %s %s; trying again: %s", self._client.base_url, how, reason)
        self.state, self.reason = state, reason

    def _backoff_s(self) -> float:
        """Doubling with full jitter, so that ten thousand agents do not retry in the same second."""
        self._away_rounds += 1
        return random.uniform(BACKOFF_FIRST_S / 2, doubled_s(BACKOFF_FIRST_S, self._away_rounds, BACKOFF_MAX_S))

    async def _listen(self) -> None:
        """Sync at every event of the wake stream. The service sends one at the start of each connection too. What an
        event brings is taken before."""
        pause_s = BACKOFF_FIRST_S
        while True:
            try:
                timeout = httpx.Timeout(TIMEOUT_S, read=WAKE_SILENCE_S)
                query = {"node_id": self._node_id}
                async with self._client.stream("GET", WAKE_PATH, params=query, timeout=timeout) as response:
                    if response.status_code == 200:
                        pause_s = BACKOFF_FIRST_S
                        async for line in response.aiter_lines():
                            if line.startswith("data:"):
                                self._brought = _orders_in(line.removeprefix("data:")) or self._brought
                                self._awake.set()
                                self.sync_soon()
            except httpx.HTTPError:
                pass
            await asyncio.sleep(random.uniform(pause_s / 2, pause_s))
            pause_s = min(BACKOFF_MAX_S, pause_s * 2)


def _orders_in(event: str) -> WakeOrders | None:
    """What the event brings. One that cannot be read wakes all the same: the answer says it all."""
    try:
        return WakeEvent.model_validate_json(event).orders
    except ValidationError:
        return None


def _refusal(response: httpx.Response) -> LinkRefused | ServiceAway:
    try:
        problem = response.json()
        code, detail = str(problem.get("code", "")), str(problem.get("detail", ""))
    except ValueError:
        code, detail = "", response.text[:500]
    text = f"{response.status_code} {detail or response.reason_phrase}"
    if response.status_code >= 500 or response.status_code in (408, 425, 429):
        return ServiceAway(text, least_s=_retry_after_s(response))
    if code == REPLACED:
        return LinkReplaced(f"{detail}; its ranks go on, and liver-agent --stop-ranks with its --run-dir ends them")
    if code == VERSION_MISMATCH:
        return LinkRefused(f"the service runs another version: {detail}")
    if response.status_code in (401, 403):
        return LinkRefused(f"the service refuses the token: {text}")
    if response.request.url.path == JOIN_PATH:
        return LinkRefused(f"the service does not let this node join: {text}")
    return LinkRefused(f"the service refuses the report: {text}")


def _retry_after_s(response: httpx.Response) -> float:
    """What the service asks for, within our own bounds; 0 where it says nothing, or a date."""
    asked = response.headers.get("Retry-After", "")
    return min(BACKOFF_MAX_S, float(asked)) if asked.isascii() and asked.isdigit() else 0.0
