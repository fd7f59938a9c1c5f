"""The threads of a source's stream: whatever ends one of them early is known to the rank."""

from __future__ import annotations

import threading
from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import pytest

from liver_core.layout import Manifest, ParallelLayout
from tests.liver_core.layout.models import KINDS, spec

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

    def sums(region: Any, kind: str) -> Any:
        raise error("layer 7")

    ring = SourceRing(torch.zeros(4), 2, version=-1)
    live: Any = SimpleNamespace(manifest=Manifest((spec("w", (4,), layer=0),), 1, KINDS), regions=defaultdict(list))
    plan: Any = SimpleNamespace(sums=sums)
    stream = SourceStream(live, plan, ring, rank=3, target=ParallelLayout())
    stream.after_step(0)
    stream.announce(0)
    with stream._changed:
        known = stream._changed.wait_for(lambda: stream.failure, 5.0)
    stream.close()
    assert known and error.__name__ in stream.failure and "layer 7" in stream.failure
    assert not ended
    assert "source rank 3" in caplog.text and "in sums" in caplog.text


def test_its_threads_sleep_until_there_is_something_to_do(monkeypatch: pytest.MonkeyPatch):
    """They share the interpreter with the steps, and live until the world that they serve is freed."""
    import torch

    from liver_core.rank.stream.source_stream import SourceStream
    from liver_core.streaming.ring import SourceRing

    waits: list[tuple[str, float | None]] = []
    wait = threading.Condition.wait

    def noted(self: threading.Condition, timeout: float | None = None) -> bool:
        waits.append((threading.current_thread().name, timeout))
        return wait(self, timeout)

    monkeypatch.setattr(threading.Condition, "wait", noted)
    ring = SourceRing(torch.zeros(4), 2, version=-1)
    live: Any = SimpleNamespace(manifest=Manifest((spec("w", (4,), layer=0),), 1, KINDS), regions=defaultdict(list))
    plan: Any = SimpleNamespace(sums=lambda region, kind: [len(kind)])
    stream = SourceStream(live, plan, ring, rank=3, target=ParallelLayout())
    stream.after_step(0)
    stream.announce(0)
    with stream._changed:
        assert stream._changed.wait_for(lambda: 0 in stream._hashes, 5.0)
    assert stream.hashed(0) == [len(kind) for kind in ("master", "exp_avg", "exp_avg_sq")]
    stream.close()
    stream._summing.join(5.0)
    of_threads = [timeout for name, timeout in waits if name.startswith("source-")]
    assert of_threads and set(of_threads) == {None}
