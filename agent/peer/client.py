"""Sends envelopes to other agents of a job. Connections are reused; nothing is queued but the newest of each kind.

Handoff messages say a whole state, so an older one that could not be sent yet is worth nothing once a newer exists.
"""

import asyncio
import logging
import secrets
import time
from collections.abc import Callable
from typing import Any

import httpx

from agent.peer.server import STATUS_PATH
from agent.peer.signing import Request, sign
from agent.protocol.peer import PEER_PATH, Envelope

TIMEOUT_S = 2.0
_log = logging.getLogger(__name__)


class PeerUnreachable(Exception):
    """No answer, or not the hoped one; the text says what happened."""


class PeerClient:
    """`address_of(job_id, node_id)` gives URL and key, None where they are not known."""

    def __init__(self, address_of: Callable[[str, str], tuple[str, str] | None], timeout_s: float = TIMEOUT_S) -> None:
        self._address_of = address_of
        self._client = httpx.AsyncClient(
            timeout=timeout_s, trust_env=False, limits=httpx.Limits(max_connections=256, keepalive_expiry=60.0)
        )
        self._newest: dict[tuple[str, str, str], Envelope] = {}
        self._tasks: dict[tuple[str, str, str], asyncio.Task[None]] = {}
        self._unreachable: dict[tuple[str, str], float] = {}

    def send_newest(self, envelope: Envelope, subject: str) -> None:
        """Send without waiting. An envelope to the same node about the same subject that still waits is replaced."""
        key = (envelope.job_id, envelope.receiver, subject)
        self._newest[key] = envelope
        if key not in self._tasks:
            self._tasks[key] = asyncio.create_task(self._drain(key))

    async def send(self, envelope: Envelope) -> None:
        """Send and wait until it is taken. Raises PeerUnreachable."""
        body = envelope.model_dump_json(by_alias=True).encode()
        await self._request("POST", envelope.job_id, envelope.receiver, PEER_PATH, body)

    async def status(self, job_id: str, node_id: str) -> dict[str, Any]:
        """What the other agent says about a job. Raises PeerUnreachable."""
        return (await self._request("GET", job_id, node_id, STATUS_PATH, b"")).json()

    def unreachable_since(self, job_id: str) -> dict[str, float]:
        """Agents that did not answer the last time, and since when (seconds since 1970)."""
        return {node_id: since for (job, node_id), since in self._unreachable.items() if job == job_id}

    async def close(self) -> None:
        """Drop what waits and close the connections."""
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)
        await self._client.aclose()

    async def _drain(self, key: tuple[str, str, str]) -> None:
        try:
            while (envelope := self._newest.pop(key, None)) is not None:
                try:
                    await self.send(envelope)
                except PeerUnreachable as error:
                    _log.info("%s to %s was not taken: %s", envelope.kind, envelope.receiver, error)
        finally:
            del self._tasks[key]

    async def _request(self, method: str, job_id: str, node_id: str, path: str, body: bytes) -> httpx.Response:
        address = self._address_of(job_id, node_id)
        if address is None:
            raise PeerUnreachable(f"the address of {node_id} is not known")
        url, key = address
        request = Request(method, path, job_id, body)
        headers = sign(request, key, now=time.time(), nonce=secrets.token_hex(16))
        try:
            response = await self._client.request(method, url.rstrip("/") + path, content=body, headers=headers)
        except httpx.HTTPError as error:
            self._unreachable.setdefault((job_id, node_id), time.time())
            raise PeerUnreachable(f"{node_id} at {url}: {type(error).__name__}: {error}") from None
        self._unreachable.pop((job_id, node_id), None)
        if response.status_code >= 300:
            raise PeerUnreachable(f"{node_id} at {url} answered {response.status_code}: {response.text[:500]}")
        return response
