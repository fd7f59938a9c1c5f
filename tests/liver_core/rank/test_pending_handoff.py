"""A build that fails in the user's code leaves the user's traceback in the rank's log; our own refusals do not."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace
from typing import Any, ClassVar, cast
from unittest import mock

import pytest

from liver_core.handoff.messages import Order, PreparePhase, RankStage
from liver_core.layout import Member
from tests.liver_core.handoff.samples import order

pytestmark = pytest.mark.real


class Recorder:
    def __init__(self) -> None:
        self.reasons: list[str] = []
        self.aborted = threading.Event()

    def stage(self, request: Order, stage: RankStage, **report: Any) -> None:
        if stage is RankStage.ABORTED:
            self.reasons.append(str(report["reason"]))
            self.aborted.set()


@pytest.mark.parametrize(
    ("phase", "shows"),
    [(PreparePhase.BUILD_MODEL, True), (PreparePhase.LOAD_STATE, True), (PreparePhase.ESTIMATE_MEMORY, False)],
)
def test_a_failure_in_the_users_code_shows_its_traceback(
    caplog: pytest.LogCaptureFixture, phase: PreparePhase, shows: bool
):
    from liver_core.rank.boundary_requests import BoundaryRequests
    from liver_core.rank.pending_handoff import PendingHandoff
    from liver_core.rank.prepare.preparation import PrepareFailed
    from liver_core.rank.reporter import StageReporter
    from liver_core.worlds.peer_deaths import PeerDeaths

    def forget_a_layer() -> None:
        raise KeyError("layer 7")

    class Preparation:
        stage, superseded, deadline = RankStage.PREPARING, False, time.monotonic() + 5.0

        def __init__(self, request: Order) -> None:
            self.request = request

        def run(self) -> None:
            try:
                forget_a_layer()
            except KeyError as error:
                raise PrepareFailed(phase, str(error)) from error

    listener: Any = Recorder()
    make: Any = Preparation
    pending = PendingHandoff(
        Member("a", 0), BoundaryRequests(), StageReporter(listener), make, lambda: True, PeerDeaths()
    )
    pending.prepare(order())
    assert listener.aborted.wait(5.0)
    assert phase.replace("_", " ") in listener.reasons[0]
    assert ("forget_a_layer" in caplog.text) is shows


def test_training_does_not_wait_for_a_world_that_is_dropped_and_the_next_handoff_does():
    from liver_core.handoff.messages import Reason
    from liver_core.rank.boundary_requests import BoundaryRequests
    from liver_core.rank.pending_handoff import PendingHandoff
    from liver_core.rank.reporter import StageReporter
    from liver_core.worlds.peer_deaths import PeerDeaths

    may_end, builds = threading.Event(), threading.Event()

    class World:
        measures: ClassVar[dict[str, float]] = {}

        def __init__(self, request: Order) -> None:
            self.request = request

        def drop(self) -> None:
            assert may_end.wait(10.0)

    class Preparation:
        stage, superseded, deadline = RankStage.PREPARED, False, time.monotonic() + 5.0

        def __init__(self, request: Order) -> None:
            self.request = request

        def run(self) -> None:
            builds.set()

    listener, make, requests = Recorder(), Preparation, BoundaryRequests()
    pending = PendingHandoff(Member("a", 0), requests, StageReporter(listener), make, lambda: True, PeerDeaths())  # type: ignore[arg-type]
    pending.following = World(order())  # type: ignore[assignment]
    requests.abort(order().handoff_id, Reason("withdrawn", "abort"))
    dropping = threading.Thread(target=pending.maintain, daemon=True)
    dropping.start()
    dropping.join(5.0)
    assert not dropping.is_alive(), "training waits for the world to be dropped"
    assert pending.following is None
    assert not listener.reasons, "aborted is said before everything is dropped"
    pending.prepare(order())
    assert not builds.wait(0.2), "two next worlds take memory at once"
    may_end.set()
    assert listener.aborted.wait(5.0) and "withdrawn" in listener.reasons[0]
    assert builds.wait(5.0)


def test_a_rank_that_ends_reports_why_a_handoff_was_aborted_although_its_world_is_still_being_dropped():
    """The reason is the first cause of what comes next: without it only what the other ranks felt would be known."""
    from liver_core.handoff.messages import Reason
    from liver_core.rank.boundary_requests import BoundaryRequests
    from liver_core.rank.pending_handoff import PendingHandoff
    from liver_core.rank.reporter import StageReporter
    from liver_core.worlds.peer_deaths import PeerDeaths

    may_end, ended = threading.Event(), threading.Event()

    class World:
        request = order()
        measures: ClassVar[dict[str, float]] = {}

        def drop(self) -> None:
            assert may_end.wait(10.0)
            ended.set()

    listener: Any = Recorder()
    unused: Any = None
    pending = PendingHandoff(
        Member("a", 0), BoundaryRequests(), StageReporter(listener), unused, lambda: True, PeerDeaths()
    )
    pending.following = World()  # type: ignore[assignment]
    pending.drop_beside_training(Reason("a source is gone", "read"))
    assert listener.reasons == []
    pending.report_drop()
    assert listener.reasons == ["read: a source is gone"]
    may_end.set()
    assert ended.wait(5.0)
    pending.report_drop()
    assert len(listener.reasons) == 1


def test_the_limit_for_communicators_does_not_run_while_the_step_before_them_is_validated():
    from liver_core.handoff import Agreement, BoundaryPhase, ready_tag
    from liver_core.rank.boundary_requests import BoundaryRequests
    from liver_core.rank.next_world import NextWorld
    from liver_core.rank.pending_handoff import PendingHandoff
    from liver_core.rank.reporter import StageReporter
    from liver_core.worlds.peer_deaths import PeerDeaths

    ran_s: list[float] = []

    class World:
        request, source_rank, connect_s, lacks_communicators = order(), 1, 20.0, True
        measures: ClassVar[dict[str, float]] = {}
        world = SimpleNamespace(
            roster=order().target, nccl=SimpleNamespace(connect=lambda _, since: ran_s.append(time.monotonic() - since))
        )
        connect: Any = NextWorld.connect

    listener, unused = Recorder(), cast(Any, None)
    pending = PendingHandoff(
        Member("a", 0), BoundaryRequests(), StageReporter(cast(Any, listener)), unused, lambda: True, PeerDeaths()
    )
    pending.following = cast(Any, World())
    agreed = Agreement(BoundaryPhase.CONNECT, ready_tag(order().handoff_id, order().plan_revision))
    assert pending.settle(agreed) is None
    agreed_at = time.monotonic()
    with mock.patch.object(time, "monotonic", lambda: agreed_at + 60.0):  # It was validated, or waited for its lease.
        pending.maintain()
    assert ran_s == [0.0]
