"""The demo's client of the service's REST API, like any other client, and of the metadata endpoints."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx

from deploy.local.processes import DemoFailed

POLL_S = 0.25
REQUEST_S = 20.0


class Api:
    """One service, with an operator's token."""

    def __init__(self, url: str, token_file: Path) -> None:
        token = token_file.read_text().strip()
        self._http = httpx.Client(base_url=url, headers={"Authorization": f"Bearer {token}"}, timeout=REQUEST_S)

    def get(self, path: str, **params: Any) -> Any:
        """GET as JSON. Raises DemoFailed with the service's error."""
        return self._answer(self._http.get(path, params=params))

    def post(self, path: str, body: Any = None) -> Any:
        """POST as JSON."""
        return self._answer(self._http.post(path, json=body))

    def put(self, path: str, body: Any) -> Any:
        """PUT as JSON."""
        return self._answer(self._http.put(path, json=body))

    def steps(self, job_id: str, *, after: int) -> list[dict[str, Any]]:
        """Step rows above a step."""
        return self.get(f"/api/v1/jobs/{job_id}/steps", after=after, limit=20_000)

    def handoffs(self, job_id: str) -> list[dict[str, Any]]:
        """Every attempt, oldest first."""
        return self.get("/api/v1/handoffs", job_id=job_id, limit=1_000)[::-1]

    def close(self) -> None:
        """Release connections."""
        self._http.close()

    def _answer(self, response: httpx.Response) -> Any:
        if response.status_code >= 400:
            raise DemoFailed(f"{response.request.method} {response.request.url.path}: {response.text[:500]}")
        return response.json()


def interrupt(imds_url: str, *, ends_in_s: float) -> None:
    """Make a metadata endpoint announce that its instance will be taken away."""
    body = {"do": "interrupt", "notice_in_s": 0, "ends_in_s": ends_in_s}
    response = httpx.post(f"{imds_url}/admin", json=body, timeout=REQUEST_S)
    if response.status_code != 200:
        raise DemoFailed(f"the metadata endpoint refused: {response.text}")


def until(
    what: str,
    timeout_s: float,
    condition: Callable[[], Any],
    check: Callable[[], None],
    *,
    poll_s: float = POLL_S,
) -> Any:
    """Wait for the condition's first true value. `check` is called before every try; it raises if waiting is useless.

    Raises DemoFailed with `what` when the time is over. A request without an answer counts as not yet.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        check()
        try:
            if value := condition():
                return value
        except httpx.TransportError:
            pass
        if time.monotonic() > deadline:
            raise DemoFailed(f"{what}: not within {timeout_s:.0f} s")
        time.sleep(poll_s)
