"""Which version the ranks of a live handoff hash at, with modelled ranks: a certifier never waits, so time is a number.

Real ranks certify in `test_stream_random` and its like.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch.distributed as dist

from liver_core.handoff.messages import Rung
from liver_core.layout import Manifest
from liver_core.rank.active_world import Verdict
from liver_core.rank.store_exchange import Exchange
from liver_core.rank.stream.certify import ATTEMPTS_MAX, Answers, CertificateRefused, Certifier, read_verdict
from tests.liver_core.layout.models import KINDS, spec

TICK_S, TICKS_A_LOOK = 0.02, 2
MANIFEST = Manifest((spec("w", (4, 8), 1, layer=0),), 1, KINDS)
SUMS = [1, 2, 3]
"""Of each rank: a parameter's three kinds."""


@dataclass
class ModelTarget:
    """As much of `LiveTarget` as a certifier sees: it replays what the sources did `behind` steps ago."""

    step_s: float
    behind: int
    version: int = 0
    lag: int = 0
    converged: bool = True
    announced: dict[int, list[int] | int] = field(default_factory=dict)
    waiting: set[int] = field(default_factory=set)

    def follow(self, sources_at: int) -> None:
        self.version = max(self.version, sources_at - self.behind)
        self.lag = sources_at - self.version
        for version in [each for each in self.waiting if each <= self.version]:
            self.waiting.remove(version)
            self.announced[version] = SUMS if version == self.version else self.version - version

    def announce(self, version: int) -> None:
        self.waiting.add(version)

    def hashed(self, version: int) -> list[int] | int | None:
        return self.announced.get(version)


@dataclass
class World:
    """Two sources that step together, and hear of an announcement `hears_s` after it was made, but never in time unless
    `ever`. Two targets that hear at once; the first is `behind`. A source that hears late is the harder case.
    """

    step_s: float
    behind: int
    hears_s: float
    outlast: bool = False
    ever: bool = True
    source_sums: list[int] = field(default_factory=lambda: list(SUMS))

    def __post_init__(self) -> None:
        store = dist.HashStore()

        def exchange() -> Exchange:
            return Exchange(lambda *_: store, "h")

        self.exchange = exchange()
        self.targets = [ModelTarget(self.step_s, behind) for behind in (self.behind, 0)]
        self.certifiers = [
            Certifier(exchange(), target, MANIFEST, rank=rank, sources=2, targets=2, steps_outlast=self.outlast)  # type: ignore[arg-type]
            for rank, target in enumerate(self.targets)
        ]
        self.answers = [Answers(exchange(), {f"target/{rank}": target}) for rank, target in enumerate(self.targets)]
        self.heard: dict[int, float] = {}
        self.answered: set[int] = set()

    def run(self, limit_s: float) -> tuple[Verdict | None, int]:
        """The verdict, and how many versions were announced for it."""
        for tick in range(int(limit_s / TICK_S)):
            now = tick * TICK_S
            at = 5 + int(now / self.step_s)
            for target in self.targets:
                target.follow(at)
            if tick % TICKS_A_LOOK == 0:
                for part in (*self.answers, *self.certifiers):
                    part.advance()
            self._answer(now, at)
            if (verdict := read_verdict(self.exchange)) is not None:
                return verdict, len(self.heard)
        return None, len(self.heard)

    def _answer(self, now: float, at: int) -> None:
        """What the sources do."""
        for attempt in itertools.count(1):
            version: Any = self.exchange.peek(f"certify/{attempt}")
            if version is None:
                return
            heard = self.heard.setdefault(attempt, now + self.hears_s)
            if attempt not in self.answered and now >= heard and at >= version:
                self.answered.add(attempt)
                for rank in range(2):
                    answer = self.source_sums if at == version and self.ever else at - version + (not self.ever)
                    self.exchange.post(f"certified/{attempt}/source/{rank}", answer)


@pytest.mark.parametrize("outlast", [False, True])
@pytest.mark.parametrize("hears_s", [0.0, 0.1, 1.0, 3.0])
@pytest.mark.parametrize("behind", [0, 1, 2, 4])
@pytest.mark.parametrize("step_s", [0.02, 0.1, 0.4, 3.0])
def test_all_meet_a_version_however_far_the_first_target_is_behind(
    step_s: float, behind: int, hears_s: float, outlast: bool
):
    verdict, announced = World(step_s, behind, hears_s, outlast).run(120.0)
    assert verdict is not None and verdict.rung is Rung.LIVE, verdict
    assert announced <= ATTEMPTS_MAX
    if hears_s <= 0.1:
        assert announced <= 2, "being behind is known before anything is announced"


def test_a_version_that_nobody_can_meet_falls_to_stop_and_copy_and_says_who_was_late():
    verdict, announced = World(0.1, 0, 0.0, ever=False).run(60.0)
    assert verdict is not None and verdict.rung is Rung.STOP_AND_COPY
    assert announced == ATTEMPTS_MAX
    assert "no version was met by all ranks in 8 announcements" in verdict.reason
    assert "source/0 by " in verdict.reason and "target/" not in verdict.reason


def test_sums_that_differ_are_refused_by_name():
    with pytest.raises(CertificateRefused, match=r"1 differ at version \d+, first w/exp_avg$"):
        World(0.1, 0, 0.0, source_sums=[1, 9, 3]).run(10.0)


def test_a_rank_answers_for_its_source_and_its_target_each_when_it_knows():
    store = dist.HashStore()
    exchange = Exchange(lambda *_: store, "h")
    source, target = ModelTarget(1.0, 0), ModelTarget(1.0, 0)
    answers = Answers(exchange, {"source/1": source, "target/0": target})
    exchange.post("certify/1", 7)
    exchange.post("certify/2", 9)
    source.version = 6
    answers.advance()
    source.follow(7)
    answers.advance()
    assert exchange.peek("certified/1/source/1") == SUMS and exchange.peek("certified/1/target/0") is None
    target.follow(8)
    answers.advance()
    assert exchange.peek("certified/1/target/0") == 1, "missed by a step"
    assert not target.waiting, "the next version is not asked for before all of this one is said"
    answers.advance()
    assert source.waiting == target.waiting == {9}
