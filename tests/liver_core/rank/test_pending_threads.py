"""The threads of a rank's pending handoff, attacked where they hand over: control, training, building, dropping.

One thread runs at a time, and a seed says who goes on at each lock, wait, start of a thread, report and phase of a
build. Not attacked here: the threads of a stream (tests/simulation/streaming.py has them), the writer of reports to the
agent (it only takes from a queue), and torch's own.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast
from unittest import mock

import pytest

from liver_core.handoff import Agreement, BoundaryPhase
from liver_core.handoff.messages import Order, RankStage, Reason
from liver_core.handoff.ready_tag import agreed, ready_tag
from liver_core.layout import Member
from tests.liver_core.handoff.samples import H1, H2, WHY, order
from tests.liver_core.rank.support.turns import SeededCondition, Stuck, Turns
from tests.tiers import sample

pytestmark = pytest.mark.real
SEEDS = 300
THOROUGH_SEEDS = 2000
STEPS, COMMANDS, PHASES = 12, 10, 3


class Run:
    """One seed: an agent that says anything, a rank that trains, and what must hold."""

    def __init__(self, seed: int, host: type[Any]) -> None:
        from liver_core.rank.boundary_requests import BoundaryRequests
        from liver_core.rank.reporter import StageReporter
        from liver_core.worlds.peer_deaths import PeerDeaths

        self.turns = Turns(seed)
        self.random = random.Random(f"commands of {seed}")
        self.worlds: set[int] = set()
        self.ordered: Counter[str] = Counter()
        self.said: list[tuple[str, RankStage]] = []
        requests = BoundaryRequests(changed=cast(Any, SeededCondition(self.turns)))
        self.pending = host(
            Member("a", 0), requests, StageReporter(cast(Any, self)), self.make, PeerDeaths(), trains=True
        )
        self.pending.turns = self.turns

    def play(self) -> None:
        self.turns.spawn("control", self.command)
        self.turns.spawn("training", self.train)
        with (
            mock.patch("liver_core.rank.pending_handoff.expect_quick_answers"),
            mock.patch("liver_core.rank.pending_handoff.settle"),
            mock.patch("liver_core.rank.pending_handoff.background", self.background),
        ):
            self.turns.run()
        assert not self.worlds, "a world is left behind"

    def background(self, action: Callable[..., None], *, name: str, args: tuple[Any, ...] = ()) -> Any:
        return SimpleNamespace(start=lambda: self.turns.spawn(name, lambda: action(*args)))

    # The rank's agent.

    def command(self) -> None:
        for _ in range(COMMANDS):
            handoff, revision = self.random.choice([H1, H1, H2]), self.random.randint(1, 3)
            request = order(handoff_id=handoff, plan_revision=revision, target_revision=(revision + 1) // 2)
            choices: list[Callable[[], None]] = [
                lambda request=request: self.prepare(request),
                lambda handoff=handoff, revision=revision: self.pending.permit(handoff, revision),
                lambda handoff=handoff: self.pending.withdraw(handoff),
                lambda handoff=handoff: self.pending.abort(handoff, WHY),
            ]
            self.random.choices(choices, (5, 5, 2, 1))[0]()
            self.turns.switch()

    def prepare(self, request: Order) -> None:
        self.ordered[request.handoff_id] += 1
        self.pending.prepare(request)

    # Building and dropping.

    def make(self, request: Order, build: int) -> Any:
        def run() -> Any:
            from liver_core.rank.store_exchange import Cancelled

            assert not self.worlds, "two next worlds take memory"
            self.worlds.add(build)
            for _ in range(PHASES):
                self.turns.switch()
                if self.pending.is_useless(build):
                    self.worlds.discard(build)
                    raise Cancelled("aborted")
            return made

        def drop() -> None:
            self.turns.switch()
            assert build in self.worlds, "a world is dropped twice"
            self.worlds.discard(build)

        fixed = {"measures": {}, "streams": False, "lacks_communicators": False, "why_it_fell": None, "world": None}
        made = SimpleNamespace(request=request, drop=drop, build=build, exchange=mock.Mock(), **fixed)
        return SimpleNamespace(
            request=request,
            run=run,
            aborted=lambda: self.pending.is_useless(build),
            deadline=1e9,
            made=None,
            amend=lambda newer: setattr(made, "request", newer),
        )

    # The rank's main thread.

    def train(self) -> None:
        for _ in range(STEPS):
            self.pending.maintain()
            self.turns.switch()
            word = self.pending.word()
            shown = agreed(word, word)
            self.turns.switch()
            all_agree = self.random.random() < 0.5
            following = self.pending.settle(shown if all_agree else None)
            if shown is None or not all_agree:
                assert following is None
                continue
            self.cut_over(shown, following)
        if self.pending.handoff_id is not None:
            self.pending.abort(self.pending.handoff_id, WHY)
        self.turns.wait(lambda: self.pending.preparation is None or self.pending.following is not None, 100.0)
        self.pending.maintain()
        self.pending.report_drop()

    def cut_over(self, shown: Agreement, following: Any) -> None:
        assert following is not None, "the others cut over, and this rank trains on"
        assert shown.phase is BoundaryPhase.READY
        request = following.request
        assert shown.tag == ready_tag(request.handoff_id, request.plan_revision), "it goes with another revision"
        assert following.build in self.worlds
        self.said.append((request.handoff_id, RankStage.CUTTING_OVER))
        self.turns.switch()
        if self.random.random() < 0.3:
            self.worlds.discard(following.build)
            self.said.append((request.handoff_id, RankStage.ACTIVE))
            self.pending.take()
        else:
            self.pending.drop_beside_training(WHY)

    # What the agent hears.

    def stage(self, request: Order, stage: RankStage, *, reason: Reason | None, **report: Any) -> None:
        last = next((said for handoff, said in reversed(self.said) if handoff == request.handoff_id), None)
        if stage in (RankStage.READY, RankStage.PREPARED):
            assert last is not RankStage.CUTTING_OVER, f"{stage} is said after the boundary"
        if stage is RankStage.ABORTED and "still preparing" not in str(reason):
            assert self.ordered[request.handoff_id] > 0, "the end is said twice"
            self.ordered[request.handoff_id] -= 1  # Another order may get another answer.
        if "still preparing" not in str(reason):
            self.said.append((request.handoff_id, stage))
        self.turns.switch()


def first_failure(host: type[Any], seeds: int) -> tuple[int, str] | None:
    for seed in range(seeds):
        try:
            Run(seed, host).play()
        except AssertionError as failure:
            return seed, str(failure)
    return None


def host() -> type[Any]:
    from liver_core.rank.pending_handoff import PendingHandoff

    return PendingHandoff


@pytest.mark.parametrize("seeds", sample([SEEDS, THOROUGH_SEEDS], SEEDS))
def test_whoever_of_its_threads_goes_on_a_rank_keeps_to_what_was_agreed(seeds: int):
    assert first_failure(host(), seeds) is None


def permit_beside_an_amendment() -> type[Any]:
    class Permits(host()):
        """Looks whether the revision is the newest, and then gives the permission."""

        def permit(self, handoff_id: str, plan_revision: int) -> None:
            current = self._machine.order
            if current is None or (current.handoff_id, current.plan_revision) != (handoff_id, plan_revision):
                return
            self.turns.switch()
            with self._changed:
                newest = self._machine.order
                if newest is not None and self.following is not None:
                    self._machine._permission = (newest.handoff_id, newest.plan_revision)
                    self._reporter.stage(current, RankStage.READY)

    return Permits


def abort_beside_the_boundary() -> type[Any]:
    class Aborts(host()):
        """Looks whether a boundary is agreed, and then drops the world."""

        def abort(self, handoff_id: str, reason: Reason) -> None:
            machine = self._machine
            if self.is_cutting_over or machine._shown or machine.order is None or machine.world is None:
                return super().abort(handoff_id, reason)
            self.turns.switch()
            with self._changed:
                if machine.order is not None and machine.order.handoff_id == handoff_id and machine.world is not None:
                    for effect in machine._drop(reason, beside=True):
                        self._carry_out(effect)

    return Aborts


def report_beside_the_end() -> type[Any]:
    class Reports(host()):
        """Looks whether the drop is reported, reports it, and then notes that."""

        def report_drop(self) -> None:
            dropping = self._machine._dropping
            if dropping is None or dropping.is_told:
                return
            self.turns.switch()
            self._reporter.stage(dropping.order, RankStage.ABORTED, reason=dropping.reason)
            dropping.is_told = True

    return Reports


@pytest.mark.parametrize("race", [permit_beside_an_amendment, abort_beside_the_boundary, report_beside_the_end])
def test_the_seeds_find_a_race_that_is_planted(race: Callable[[], type[Any]]):
    assert first_failure(race(), THOROUGH_SEEDS) is not None


def test_threads_that_wait_for_each_other_are_found():
    turns = Turns(0)
    turns.spawn("one", lambda: turns.wait(lambda: False))
    with pytest.raises(Stuck, match="these wait for each other: one"):
        turns.run()
