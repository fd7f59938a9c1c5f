"""Who this node is to the service: joins once, keeps the node's key in a private file, fetches tokens with it.

The key's secret is made and stored before the first request, so that a join whose answer was lost is repeated with it.
"""

import asyncio
import contextlib
import json
import logging
import os
import secrets
from collections.abc import AsyncGenerator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import httpx
from pydantic import ValidationError

from agent.protocol.joining import JOIN_PATH, RENEW_PATH, JoinRequest, NodeToken

FILE_NAME = "node-key.json"
_log = logging.getLogger(__name__)


class KeyFileError(Exception):
    """The node's key cannot be stored; the text names the file."""


@dataclass(frozen=True, slots=True)
class NodeKey:
    """`key_id` is empty until the service knows the key."""

    node_id: str
    secret: str
    key_id: str = ""


class NodeAuth(httpx.Auth):
    """Signs each request with a token of this node, and fetches another one when the service no longer takes it. If it
    no longer takes the key either, the node joins again, where a join token is given."""

    def __init__(self, service_url: str, *, node_id: str, join_token: str, run_dir: Path) -> None:
        """Raises KeyFileError."""
        self._url = service_url.rstrip("/")
        self._join_token = join_token
        self._path = run_dir / FILE_NAME
        self._key = self._load(node_id)
        self._store()
        self._token = ""
        self._lock = asyncio.Lock()

    async def async_auth_flow(self, request: httpx.Request) -> AsyncGenerator[httpx.Request, httpx.Response]:
        """What httpx calls. Where no token can be had, the answer that says why is the answer to the request."""
        used = self._token
        if used:
            request.headers["Authorization"] = f"Bearer {used}"
            response = yield request
            if response.status_code != httpx.codes.UNAUTHORIZED:
                return
        async with self._lock:
            if self._token == used and self._key.key_id:
                response = yield self._renewal()
                if not await self._take(response):
                    if response.status_code != httpx.codes.UNAUTHORIZED:
                        return
                    _log.warning("the service no longer takes the key of node %s: joining again", self._key.node_id)
                    self._key = NodeKey(self._key.node_id, secrets.token_urlsafe(32))
                    self._store()
            if self._token == used:
                response = yield self._joining()
                if not await self._take(response):
                    return
                _log.info("node %s has joined", self._key.node_id)
        request.headers["Authorization"] = f"Bearer {self._token}"
        yield request

    def _renewal(self) -> httpx.Request:
        return self._post(RENEW_PATH, f"liver_{self._key.key_id}_{self._key.secret}", b"")

    def _joining(self) -> httpx.Request:
        wanted = JoinRequest(node_id=self._key.node_id, secret=self._key.secret)
        return self._post(JOIN_PATH, self._join_token, wanted.model_dump_json().encode())

    def _post(self, path: str, token: str, body: bytes) -> httpx.Request:
        headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}
        return httpx.Request("POST", self._url + path, content=body, headers=headers)

    async def _take(self, response: httpx.Response) -> bool:
        """Take the token in an answer; False if there is none."""
        await response.aread()
        if not response.is_success:
            return False
        try:
            answer = NodeToken.model_validate_json(response.content)
        except ValidationError:
            return False
        self._token = answer.token
        if answer.key_id != self._key.key_id:
            self._key = replace(self._key, key_id=answer.key_id)
            self._store()
        return True

    def _load(self, node_id: str) -> NodeKey:
        with contextlib.suppress(OSError, ValueError, TypeError):
            key = NodeKey(**json.loads(self._path.read_text()))
            if key.node_id == node_id:
                return key
        return NodeKey(node_id, secrets.token_urlsafe(32))

    def _store(self) -> None:
        """Whole or not at all, and readable for its owner only."""
        written = self._path.with_suffix(".new")
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            written.unlink(missing_ok=True)
            with os.fdopen(os.open(written, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
                json.dump(asdict(self._key), file)
                file.flush()
                os.fsync(file.fileno())
            written.replace(self._path)
        except OSError as error:
            raise KeyFileError(f"--run-dir: {self._path} cannot be written: {error.strerror}") from None
