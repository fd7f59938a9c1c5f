"""What a rank that is source and target still does in the pause when its own reads run to their limit."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from liver_core.handoff import Cutover, CutoverDeadlines
from liver_core.handoff.cutover import BoundaryAgreed, Level, ReadState, StateRead

pytestmark = pytest.mark.real

STARTED, TARGET_S = 100.0, 20.0
UNTIL = STARTED + TARGET_S


class Clock:
    def __init__(self) -> None:
        self.now = STARTED

    def __call__(self) -> float:
        return self.now


class SlowPeer:
    """A transport whose peer never answers: each read ends at its deadline. Also a stream that never catches up."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock

    def read(self, reads: Any, deadline: float) -> None:
        from liver_core.transport.protocol import Call, TransportTimeout

        self.clock.now = deadline
        raise TransportTimeout(Call.READ, "still waiting")

    def finish(self, version: int, until: float) -> None:
        from liver_core.rank.stream.target_stream import StreamFailed

        self.clock.now = until
        raise StreamFailed("still behind")


class Source:
    """The part of this rank in the source world. Keeps the seconds left when its collectives begin."""

    broken = None

    def __init__(self, run: Any) -> None:
        self.run = run
        self.boundary: dict[str, Any] = {}
        self.left_s: list[float] = []

    def publish_state(self, version: int, kinds: Any) -> None:
        pass

    def publish_gradients(self) -> None:
        self.left_s.append(self.run.pause.left_s)

    def publish_lost(self, reason: Any) -> None:
        pass

    def finish_certificate(self) -> None:
        pass


@pytest.mark.parametrize("streams", [False, True])
def test_a_read_that_runs_to_its_limit_leaves_time_for_the_collectives_of_the_source_world(streams: bool):
    from liver_core.rank.cutover.cutover_run import CutoverRun

    clock = Clock()
    following: Any = SimpleNamespace(
        request=SimpleNamespace(source=object(), handoff_id="h"),
        manifest=SimpleNamespace(kinds=()),
        boundary={},
        source_rank=None,
        target_rank=0,
        streams=streams,
        target_stream=SlowPeer(clock),
        transport=SlowPeer(clock),
        world=object(),
        live=object(),
        plan=SimpleNamespace(local=None),
        reads=lambda kinds: ["read"],
    )
    deadlines = CutoverDeadlines(target_s=TARGET_S, source_s=30.0, store_s=60.0)
    machine = Cutover(
        rank=0, in_source=True, in_target=True, deadlines=deadlines, boundary=BoundaryAgreed(5), now=STARTED
    )
    run = CutoverRun(following, None, machine, boundary_of=dict, clock=clock)
    run.source = source = Source(run)  # type: ignore[assignment]
    event = run._carry_out(ReadState(5, until=UNTIL))
    assert isinstance(event, StateRead) and event.level is Level.NOTHING
    assert source.left_s and source.left_s[0] >= 0.1 * TARGET_S, "the others time out in a collective that waits for it"
    assert run.pause.until < UNTIL, "comparing and the barrier need time too"
