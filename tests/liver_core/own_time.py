"""A limit on the processor time of this thread, without the collector's.

So neither a busy machine nor what other tests left in the process (threads, garbage) can fail a test that uses it.
"""

import gc
import time
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def at_most(seconds: float) -> Iterator[None]:
    gc.disable()
    try:
        started = time.thread_time()
        yield
        taken = time.thread_time() - started
    finally:
        gc.enable()
    assert taken < seconds, f"took {taken:.2f} s of processor time, and at most {seconds} s are allowed"
