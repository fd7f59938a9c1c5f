"""Waits for what another thread or process does."""

import threading
import time
from collections.abc import Callable

PAUSE_S = 0.05


def until(holds: Callable[[], object], what: object = "", *, within_s: float = 40.0) -> None:
    """Return once it holds; fails with `what`, or what that returns, if it does not in time."""
    end, pause = time.monotonic() + within_s, threading.Event()
    while not holds():
        assert time.monotonic() < end, (what() if callable(what) else what) or "it did not happen in time"
        pause.wait(PAUSE_S)
