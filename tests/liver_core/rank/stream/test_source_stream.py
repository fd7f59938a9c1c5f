"""The threads of a source's stream: whatever ends one of them early is known to the rank."""

from __future__ import annotations

import threading
from typing import Any

import pytest

pytestmark = pytest.mark.real


@pytest.mark.parametrize("error", [AssertionError, KeyError, MemoryError])
def test_a_thread_that_fails_says_so_whatever_it_fails_with(
    error: type[Exception], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    import torch

    from liver_core.rank.stream.source_stream import SourceStream
    from liver_core.streaming.ring import SourceRing

    ended: list[Any] = []
    monkeypatch.setattr(threading, "excepthook", ended.append)

    def connect() -> Any:
        raise error("layer 7")

    nothing: Any = None
    ring = SourceRing(4, 2, version=0, device=torch.device("cpu"))
    stream = SourceStream(nothing, nothing, ring, rank=3, connect=connect)
    with stream._changed:
        known = stream._changed.wait_for(lambda: stream.failure, 5.0)
    stream.close()
    assert known and error.__name__ in stream.failure and "layer 7" in stream.failure
    assert not ended
    assert "source rank 3" in caplog.text and "in connect" in caplog.text
