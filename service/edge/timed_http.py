"""uvicorn's HTTP/1.1 by httptools, with limits on how long a connection may be open without a whole request head, and
on how large that may be.

The parser (llhttp) takes a third of h11's time, and is stricter: it refuses a header that goes on in another line, two
lengths, and whatever else RFC 9112 lets two readers understand differently. The limits it leaves to its user.
"""

import asyncio
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from agent.protocol import errors
from agent.protocol.errors import Problem
from service.edge.safe_headers import NO_PAGE
from service.problems import response

HEAD_S_MAX = 10.0
HEAD_BYTES_MAX = 32 * 1024


class TimedHttpProtocol(HttpToolsProtocol):
    """Closes a connection on which no request is under way and none becomes whole within `head_s_max`, however often
    bytes come. Idle connections end with `timeout_keep_alive` as before. A head of more than `HEAD_BYTES_MAX` is
    answered with 400."""

    head_s_max = HEAD_S_MAX
    _head_timer: asyncio.TimerHandle | None = None
    _in_head = True
    _heads = 0
    """That became whole."""
    _head_bytes = 0
    """Of the parts of a head that are whole."""
    _unfinished_bytes = 0
    """Of a head that is under way, but for what came in one piece with the request before it."""
    _refused = ""
    """Why the head that came last is refused, while others before it are being answered."""

    def connection_made(self, transport: Any) -> None:
        """The first head is awaited from now on."""
        super().connection_made(transport)
        self._watch_head()

    def data_received(self, data: bytes) -> None:
        """Bytes may complete a head; if none is under way, they begin one."""
        was_in_head, heads = self._in_head, self._heads
        super().data_received(data)
        if was_in_head and self._heads == heads and not self.transport.is_closing():
            self._unfinished_bytes += len(data)
            if self._unfinished_bytes > HEAD_BYTES_MAX:
                self.send_400_response("The head of the request is too large.")
        self._watch_head()

    def on_message_begin(self) -> None:
        """A head begins: with new bytes, or behind the body before it."""
        super().on_message_begin()
        self._head_bytes = 0

    def on_url(self, url: bytes) -> None:
        """The address, or a piece of it."""
        super().on_url(url)
        self._count(len(url))

    def on_header(self, name: bytes, value: bytes) -> None:
        """One whole header. The parser leaves what stands between a value and the end of its line."""
        super().on_header(name, value.rstrip(b" \t"))
        self._count(len(name) + len(value))

    def on_headers_complete(self) -> None:
        """The head is whole, and its request begins."""
        super().on_headers_complete()
        self._in_head, self._unfinished_bytes = False, 0
        self._heads += 1

    def on_message_complete(self) -> None:
        """What comes next is another head."""
        super().on_message_complete()
        self._in_head = True

    def on_response_complete(self) -> None:
        """The last answer before a head that is refused may be on its way now."""
        super().on_response_complete()
        if self._refused and self.cycle.response_complete:
            self._refuse(self._refused)

    def send_400_response(self, msg: str) -> None:
        """Not before the answers to the requests that came first: it would be taken for one of them."""
        if self._in_head and self.cycle is not None and not self.cycle.response_complete:
            self._refused = msg
            self.flow.pause_reading()
        else:
            self._refuse(msg)

    def _refuse(self, msg: str) -> None:
        """The answer to what is no request, which nobody else sees; then the connection ends."""
        problem = Problem(title="Bad request", status=400, code=errors.INVALID, detail=msg)
        answer = response(problem, headers={**NO_PAGE, "Connection": "close"})
        head = b"".join(b"%s: %s\r\n" % header for header in (*self.server_state.default_headers, *answer.raw_headers))
        self.transport.write(b"HTTP/1.1 400 Bad Request\r\n" + head + b"\r\n" + bytes(answer.body))
        self.transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        """Nothing is awaited any more."""
        super().connection_lost(exc)
        self._forget_timer()

    def _count(self, more: int) -> None:
        """Whatever is raised here is an invalid request for the parser."""
        self._head_bytes += more
        if self._head_bytes > HEAD_BYTES_MAX:
            raise ValueError("the head of the request is too large")

    def _watch_head(self) -> None:
        if self.cycle is not None and not self.cycle.response_complete:
            self._forget_timer()
        elif self._head_timer is None:
            self._head_timer = self.loop.call_later(self.head_s_max, self._close_late)

    def _forget_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _close_late(self) -> None:
        self._head_timer = None
        if (self.cycle is None or self.cycle.response_complete) and not self.transport.is_closing():
            self.transport.abort()
