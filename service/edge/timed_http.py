"""uvicorn's HTTP/1.1, with a limit on how long a connection may be open without a whole request head.

A header that goes on in another line is refused, as RFC 9112 (5.2) asks of a server: h11 would join the lines, and what
stands before this service may have read them as two.
"""

import asyncio
import re
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

HEAD_S_MAX = 10.0
_FOLDED = re.compile(rb"\n[ \t]+[^ \t\r\n]")
_HEAD_ENDS = re.compile(rb"\n\r?\n")


class TimedH11Protocol(H11Protocol):
    """Closes a connection on which no request is under way and none becomes whole within `head_s_max`, however often
    bytes come. Idle connections end with `timeout_keep_alive` as before."""

    head_s_max = HEAD_S_MAX
    _head_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        """The first head is awaited from now on."""
        super().connection_made(transport)
        self._watch_head()

    def data_received(self, data: bytes) -> None:
        """Bytes may complete a head; if none is under way, they begin one."""
        super().data_received(data)
        self._watch_head()

    def handle_events(self) -> None:
        """Here each head begins: with new bytes, or after the answer to the request before it."""
        if self.conn.their_state is h11.IDLE and _is_folded(self.conn.trailing_data[0]):
            self.send_400_response("A header goes on in another line.")
        else:
            super().handle_events()

    def connection_lost(self, exc: Exception | None) -> None:
        """Nothing is awaited any more."""
        super().connection_lost(exc)
        self._forget_timer()

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


def _is_folded(data: bytes) -> bool:
    """Whether a header of the head that the data begins with goes on in another line."""
    folded, end = _FOLDED.search(data), _HEAD_ENDS.search(data)
    return folded is not None and (end is None or folded.start() < end.start())
