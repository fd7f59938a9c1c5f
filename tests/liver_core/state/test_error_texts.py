"""What a person reads of a checkpoint that was not written."""

import errno
import os
import queue
from typing import Any

import pytest

from liver_core.state import checkpoint

FULL = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_full_disk_is_told_as_such_and_not_as_what_torch_found_at_the_end_of_the_file(
    monkeypatch: pytest.MonkeyPatch,
):
    def torn(*_: Any, results_queue: Any, **__: Any) -> None:
        try:
            try:
                raise FULL
            finally:
                raise RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 704 vs 598")
        except RuntimeError as error:
            results_queue.put((0, error))

    monkeypatch.setattr(checkpoint._Writer, "write_preloaded_data", torn)
    results: Any = queue.SimpleQueue()
    checkpoint._write_in_this_thread([], [None], results)
    assert results.get() is FULL
