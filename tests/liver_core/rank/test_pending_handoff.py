"""The threads of a rank's pending handoff: what each does and waits for. What is decided: test_pending.py."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast
from unittest import mock

import pytest

from liver_core.handoff import Agreement, BoundaryPhase, ready_tag
from liver_core.handoff.messages import Order, PreparePhase, RankStage, Reason
from liver_core.layout import Member
from tests.liver_core.handoff.samples import H1, H2, order

pytestmark = pytest.mark.real
WITHDRAWN = Reason("withdrawn", "abort")
PATIENCE_S = 5.0


class Recorder:
    """Hears what the rank reports; `heard` waits for a stage."""

    def __init__(self) -> None:
        self.said: list[tuple[str, RankStage, str]] = []
        self.changed = threading.Condition()

    def stage(self, request: Order, stage: RankStage, *, reason: Reason | None, **report: Any) -> None:
        with self.changed:
            self.said.append((request.handoff_id, stage, str(reason)))
            self.changed.notify_all()

    def heard(self, stage: RankStage, times: int = 1) -> bool:
        def has() -> bool:
            return sum(said == stage for _, said, _ in self.said) >= times

        with self.changed:
            return self.changed.wait_for(has, PATIENCE_S)

    def reasons(self) -> list[str]:
        return [reason for _, stage, reason in self.said if stage is RankStage.ABORTED]


class World(SimpleNamespace):
    """A next world that takes as long to be dropped as the test says."""

    def __init__(self, request: Order, **parts: Any) -> None:
        self.may_end = threading.Event()
        fixed = {"measures": {}, "streams": False, "lacks_communicators": False, "why_it_fell": None, "world": None}
        super().__init__(request=request, **(fixed | parts))

    def drop(self) -> None:
        assert self.may_end.wait(2 * PATIENCE_S)


class Rank:
    """A rank that trains; `build` does what its preparations do."""

    def __init__(self, build: Callable[[Order], Any]) -> None:
        from liver_core.rank.boundary_requests import BoundaryRequests
        from liver_core.rank.pending_handoff import PendingHandoff
        from liver_core.rank.reporter import StageReporter
        from liver_core.worlds.peer_deaths import PeerDeaths

        def make(request: Order, number: int) -> Any:
            self.began.append(request)
            return SimpleNamespace(request=request, run=lambda: build(request), deadline=time.monotonic() + PATIENCE_S)

        self.began: list[Order] = []
        self.listener = Recorder()
        reporter = StageReporter(cast(Any, self.listener))
        with mock.patch("liver_core.rank.pending_handoff.expect_quick_answers"):
            self.pending = PendingHandoff(Member("a", 0), BoundaryRequests(), reporter, make, PeerDeaths(), trains=True)

    def prepared(self) -> Rank:
        """It has built the next world."""
        with mock.patch("liver_core.rank.pending_handoff.expect_quick_answers"):
            self.pending.prepare(order())
            assert self.listener.heard(RankStage.PREPARED)
        return self


@pytest.mark.parametrize(
    ("phase", "shows"),
    [(PreparePhase.BUILD_MODEL, True), (PreparePhase.LOAD_STATE, True), (PreparePhase.ESTIMATE_MEMORY, False)],
)
def test_a_failure_in_the_users_code_shows_its_traceback(
    caplog: pytest.LogCaptureFixture, phase: PreparePhase, shows: bool
):
    from liver_core.rank.prepare.preparation import PrepareFailed

    def forget_a_layer(request: Order) -> None:
        try:
            raise KeyError("layer 7")
        except KeyError as error:
            raise PrepareFailed(phase, str(error)) from error

    rank = Rank(forget_a_layer)
    rank.pending.prepare(order())
    assert rank.listener.heard(RankStage.ABORTED)
    assert phase.replace("_", " ") in rank.listener.reasons()[0]
    assert ("forget_a_layer" in caplog.text) is shows


def test_training_does_not_wait_for_a_world_that_is_dropped_and_the_next_handoff_does():
    worlds: list[World] = []

    def build(request: Order) -> World:
        worlds.append(World(request))
        return worlds[-1]

    rank = Rank(build).prepared()
    rank.pending.abort(H1, WITHDRAWN)
    training = threading.Thread(target=rank.pending.maintain, daemon=True)
    training.start()
    training.join(PATIENCE_S)
    assert not training.is_alive(), "training waits for the world to be dropped"
    assert rank.pending.following is None
    assert not rank.listener.reasons(), "aborted is said before everything is dropped"
    assert rank.pending.handoff_id == H1
    rank.pending.prepare(order(handoff_id=H2))
    assert len(rank.began) == 1, "two next worlds take memory at once"
    worlds[0].may_end.set()
    assert rank.listener.heard(RankStage.ABORTED) and "withdrawn" in rank.listener.reasons()[0]
    assert rank.listener.heard(RankStage.PREPARING, times=2) and len(rank.began) == 2


def test_a_rank_that_ends_reports_why_a_handoff_was_aborted_although_its_world_is_still_being_dropped():
    """The reason is the first cause of what comes next: without it only what the other ranks felt would be known."""
    rank = Rank(World).prepared()
    world = rank.pending.following
    rank.pending.permit(H1, 1)
    rank.pending.word()
    assert rank.pending.settle(Agreement(BoundaryPhase.READY, ready_tag(H1, 1))) is world
    rank.pending.drop_beside_training(Reason("a source is gone", "read"))
    assert rank.listener.reasons() == []
    rank.pending.report_drop()
    assert rank.listener.reasons() == ["read: a source is gone"]
    cast(Any, world).may_end.set()


def test_the_limit_for_communicators_does_not_run_while_the_step_before_them_is_validated():
    from liver_core.rank.next_world import NextWorld

    ran_s: list[float] = []

    class Connects(World):
        connect: Any = NextWorld.connect

    def build(request: Order) -> World:
        nccl = SimpleNamespace(connect=lambda _, since: ran_s.append(time.monotonic() - since))
        world = SimpleNamespace(roster=order().target, nccl=nccl)
        return Connects(request, source_rank=1, connect_s=20.0, lacks_communicators=True, world=world)

    rank = Rank(build).prepared()
    rank.pending.permit(H1, 1)
    rank.pending.word()
    assert rank.pending.settle(Agreement(BoundaryPhase.CONNECT, ready_tag(H1, 1))) is None
    agreed_at = time.monotonic()
    with mock.patch.object(time, "monotonic", lambda: agreed_at + 60.0):  # It was validated, or waited for its lease.
        rank.pending.maintain()
    assert ran_s == [0.0]
