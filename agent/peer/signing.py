"""Signatures of the peer endpoint: HMAC-SHA256 with the job's key over method, path, job, time, nonce and body.

Pure: time and nonces are arguments. A request is accepted once, within seconds of its signing time. The answer tells
the time by the receiver's clock, signed for this request with the same key: a sender whose clock differs signs again,
by that time. While a job's key changes, it has two.
"""

import hashlib
import hmac
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

JOB_HEADER = "x-liver-job"
TIME_HEADER = "x-liver-time-ms"
NONCE_HEADER = "x-liver-nonce"
SIGNATURE_HEADER = "x-liver-signature"
WINDOW_S = 5.0
"""Longer than a sender waits for an answer. It knows by how much the receiver's clock differs from its own."""

NONCES_MAX = 100_000
NONCE_CHARS = range(16, 65)


@dataclass(frozen=True, slots=True)
class Request:
    """What is signed. `path` is without host and query."""

    method: str
    path: str
    job_id: str
    body: bytes


class SignatureRefused(Exception):
    """The request is rejected; the text names the broken rule, never the key."""


def sign(request: Request, key: str, *, now: float, nonce: str) -> dict[str, str]:
    """The headers that go with the request."""
    time_ms = str(int(now * 1_000))
    return {
        JOB_HEADER: request.job_id,
        TIME_HEADER: time_ms,
        NONCE_HEADER: nonce,
        SIGNATURE_HEADER: _signature(request, key, time_ms, nonce),
    }


class SignatureStale(SignatureRefused):
    """It was signed with a key of the job, but too long ago or too far ahead."""

    def __init__(self, text: str, key: str) -> None:
        super().__init__(text)
        self.key = key


def tell_time(request: Request, nonce: str, key: str, *, now: float) -> dict[str, str]:
    """The headers of the answer to a request with this nonce, which was signed with `key`."""
    time_ms = str(int(now * 1_000))
    return {TIME_HEADER: time_ms, SIGNATURE_HEADER: _signature(_answer_to(request), key, time_ms, nonce)}


def told_time(request: Request, nonce: str, key: str, headers: Mapping[str, str]) -> float | None:
    """Seconds since 1970 by the receiver's clock; None where the answer does not tell, or somebody else made it."""
    time_ms = headers.get(TIME_HEADER, "")
    if not time_ms.isdigit() or len(time_ms) > 16:
        return None
    expected = _signature(_answer_to(request), key, time_ms, nonce)
    is_genuine = hmac.compare_digest(expected.encode(), headers.get(SIGNATURE_HEADER, "").encode())
    return int(time_ms) / 1_000 if is_genuine else None


def _answer_to(request: Request) -> Request:
    """What is signed of an answer. Its method is none of HTTP, so that it passes for no request."""
    return Request("TIME", request.path, request.job_id, b"")


class ReplayWindow:
    """Remembers recent nonces, oldest first, so that removing old ones is cheap."""

    def __init__(self) -> None:
        self._nonces: OrderedDict[tuple[str, str], float] = OrderedDict()

    def verify(self, request: Request, headers: Mapping[str, str], keys: Sequence[str], now: float) -> str:
        """The one of `keys` that it is signed with. Raises SignatureRefused unless the request is fresh, new and signed
        with one; SignatureStale if only its time is wrong."""
        time_ms, nonce = headers.get(TIME_HEADER, ""), headers.get(NONCE_HEADER, "")
        if not time_ms.isdigit() or len(time_ms) > 16 or len(nonce) not in NONCE_CHARS:
            raise SignatureRefused("the signature headers are missing or malformed")
        given = headers.get(SIGNATURE_HEADER, "").encode()
        for key in keys:
            if hmac.compare_digest(_signature(request, key, time_ms, nonce).encode(), given):
                break
        else:
            raise SignatureRefused("the signature does not match")
        age_s = now - int(time_ms) / 1_000
        if abs(age_s) > WINDOW_S:
            text = f"signed {age_s:.1f} s ago by this node's clock, at most {WINDOW_S:g} s are allowed"
            raise SignatureStale(text, key)
        self._remember((request.job_id, nonce), now)
        return key

    def _remember(self, key: tuple[str, str], now: float) -> None:
        # Keep a nonce for twice the window: a request signed by a clock that is ahead stays fresh for that long.
        while self._nonces and next(iter(self._nonces.values())) < now - 2 * WINDOW_S:
            self._nonces.popitem(last=False)
        if key in self._nonces:
            raise SignatureRefused("this request was accepted before")
        if len(self._nonces) >= NONCES_MAX:
            raise SignatureRefused(f"more than {NONCES_MAX} requests within {2 * WINDOW_S:g} s")
        self._nonces[key] = now


def _signature(request: Request, key: str, time_ms: str, nonce: str) -> str:
    digest = hashlib.sha256(request.body).hexdigest()
    text = "\n".join((request.method, request.path, request.job_id, time_ms, nonce, digest))
    return hmac.new(key.encode(), text.encode(), hashlib.sha256).hexdigest()
