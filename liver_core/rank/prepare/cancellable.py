"""For calls that cannot be interrupted, such as gloo's bring-up: a rank need not wait for their end."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import TypeVar

from liver_core.device.threads import background
from liver_core.rank.store_exchange import Cancelled

T = TypeVar("T")
POLL_S = 0.05
"""How late a cancellation is seen."""


def cancellable(action: Callable[[], T], cancelled: Callable[[], bool], *, undo: Callable[[T], None], name: str) -> T:
    """Run `action` in a thread of its own, and return its result or raise its error.

    If `cancelled` becomes True first, raises Cancelled at once. The thread then ends when `action` does, and `undo`
    takes back what it made.
    """
    future: Future[T] = Future()

    def work() -> None:
        try:
            future.set_result(action())
        except BaseException as error:
            future.set_exception(error)

    background(work, name=name).start()
    while not wait((future,), POLL_S).done:
        if cancelled():
            future.add_done_callback(lambda ended: None if ended.exception() else undo(ended.result()))
            raise Cancelled(f"aborted in: {name}")
    return future.result()
