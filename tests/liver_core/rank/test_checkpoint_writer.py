"""Who is told what became of a checkpoint."""

from types import SimpleNamespace
from typing import Any, cast

import pytest

from liver_core.layout import Member, ParallelLayout, Roster
from liver_core.rank import checkpoint_writer
from liver_core.rank.checkpoint_writer import CheckpointWriter


def test_a_checkpoint_whose_world_was_handed_over_is_told_as_failed_by_every_rank(monkeypatch: pytest.MonkeyPatch):
    """Whoever was to tell may have left with that world, and one that was asked for would be waited for."""
    members = tuple(Member(node, 0) for node in "abcde")
    roster = Roster("job", 1, ParallelLayout(dp=5), members)
    world = SimpleNamespace(roster=roster, generation=1, retired=False, background=SimpleNamespace(rank=lambda: 4))

    def lost(*_: Any, **__: Any) -> None:
        world.retired = True
        raise RuntimeError("Connection closed by peer")

    told: list[tuple[Any, ...]] = []
    monkeypatch.setattr(checkpoint_writer, "write", lost)
    monkeypatch.setattr(checkpoint_writer, "snapshot", lambda *_: {})
    writer = CheckpointWriter(cast(Any, None), lambda *said: told.append(said), cast(Any, None))
    writer.start(cast(Any, SimpleNamespace(world=world, state=None)), {"step": 8}, {}, "/c/step-8", keep=2, asked=3)
    writer.close(10.0)
    text = "a handoff ended its world before it was complete (RuntimeError: Connection closed by peer)"
    assert told == [("/c/step-8", 8, text, 3)]
