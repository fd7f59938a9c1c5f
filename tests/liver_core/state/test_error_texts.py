"""What a person reads of a checkpoint that was not written."""

import errno
import os
import queue
from contextlib import nullcontext
from types import SimpleNamespace
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


@pytest.mark.parametrize(
    ("said", "limit"),
    [
        ("[unbound_buffer.cc:78] Timed out waiting 600000ms for recv operation to complete", "within 600 s"),
        ("Application timeout caused pair closure", "in time"),
    ],
)
def test_a_rank_that_is_not_done_in_time_is_told_as_such_instead_of_by_words_of_gloo(
    monkeypatch: pytest.MonkeyPatch, said: str, limit: str
):
    def waited_in_vain(*_: Any) -> None:
        raise RuntimeError(said)

    monkeypatch.setattr(checkpoint, "do_together", waited_in_vain)
    monkeypatch.setattr(checkpoint, "default_group", nullcontext)
    group: Any = SimpleNamespace(rank=lambda: 1, size=lambda: 1)
    with pytest.raises(TimeoutError) as raised:
        checkpoint.write({}, {}, "/c/step-8", group)
    assert str(raised.value) == f"checkpoint /c/step-8: not written, another rank was not done with its part {limit}"
