"""Which ranks get a step lease: by what the service and the other agents answer."""

import asyncio
import math
import time
from dataclasses import dataclass, field

import pytest

from agent.link.step_leases import EXTENDED_S, StepLeases
from agent.protocol.step_leases import lease_for, may_go_on
from agent.protocol.sync import LEASE_SHARE

LOST_S = 20.0


@dataclass
class Scene:
    """`heard_ago`: what other agents answer, None where there is no answer; `given`: the leases."""

    heard_ago: dict[str, float | None] = field(default_factory=dict)
    reaches: bool = True
    given: list[float] = field(default_factory=list)
    looks: int = 0

    def __post_init__(self) -> None:
        self.leases = StepLeases(
            "job", heard_ago=self._heard, reaches_service=self._reach, look_again=self._look, give=self._give
        )

    async def _heard(self, name: str) -> float | None:
        return self.heard_ago[name]

    async def _reach(self) -> bool:
        return self.reaches

    def _look(self) -> None:
        self.looks += 1

    async def _give(self, until: float) -> None:
        self.given.append(until)

    def run(self, *, answered_s_ago: float = math.inf) -> list[float]:
        """Seconds from now until which leases were given in one round."""

        async def once() -> None:
            if math.isfinite(answered_s_ago):
                self.leases.take_answer(time.monotonic() - answered_s_ago)
            await self.leases.renew(list(self.heard_ago), LOST_S)

        self.given.clear()
        asyncio.run(once())
        return [until - time.monotonic() for until in self.given]


def test_an_answer_of_the_service_gives_a_lease_that_ends_before_it_may_act():
    for ago in (0.0, 5.0):
        (left,) = Scene().run(answered_s_ago=ago)
        assert left == pytest.approx(LEASE_SHARE * LOST_S - ago, abs=0.5)
        assert left + ago < LOST_S


def test_an_agent_that_was_stopped_gives_none_before_it_has_heard_the_service_again():
    scene = Scene({"b": 0.8})
    (left,) = scene.run(answered_s_ago=34.0)
    assert left < 0, "a rank that has come since then must not think that it needs none"
    assert scene.looks == 1, "the service is there: it is asked at once"
    assert len(scene.run(answered_s_ago=0.1)) == 1


def test_a_rank_that_comes_while_an_agent_may_not_go_on_gets_what_is_left_of_its_own_lease():
    (left,) = Scene({"b": 0.8}).run(answered_s_ago=9.0)
    assert left == pytest.approx(LEASE_SHARE * LOST_S - 9.0, abs=0.5)


def test_while_the_service_answers_nobody_ranks_go_on():
    (left,) = Scene({"b": 31.0, "c": None}).run(answered_s_ago=30.0)
    assert left == pytest.approx(EXTENDED_S, abs=0.5)


def test_where_nobody_could_take_over_ranks_go_on():
    assert len(Scene().run(answered_s_ago=300.0)) == 1


@pytest.mark.parametrize(("reaches", "leases"), [(True, 1), (False, 0)])
def test_a_node_that_reaches_no_other_agent_goes_on_only_if_it_reaches_the_machine_of_the_service(reaches, leases):
    given = Scene({"b": None, "c": None}, reaches=reaches).run(answered_s_ago=30.0)
    assert len([left for left in given if left > 0]) == leases


def test_a_new_start_of_an_agent_knows_nothing_and_asks():
    assert Scene({"b": 1.0}).run() == []
    assert len(Scene({"b": 100.0}).run()) == 1


def test_what_an_agent_has_told_counts_for_a_while_when_that_agent_is_gone():
    scene = Scene({"b": 1.0, "c": 15.0})
    assert scene.run() == []
    scene.heard_ago["b"] = None
    assert scene.run() == [], "the service may be there all the same"
    assert len(Scene({"b": None, "c": 15.0}).run()) == 1


def test_where_another_agent_has_told_of_a_newer_start_no_rank_goes_on_until_the_service_answers():
    scene = Scene({"b": -math.inf})
    assert scene.run() == []
    scene.heard_ago["b"] = 100.0
    assert scene.run() == []
    assert len(scene.run(answered_s_ago=0.0)) == 1


def test_one_agent_that_hears_the_service_is_enough():
    assert not may_go_on(is_there=True, reaches_anybody=True)
    assert may_go_on(is_there=False, reaches_anybody=True)
    assert not may_go_on(is_there=False, reaches_anybody=False)


@pytest.mark.parametrize(
    ("generation", "steps_from", "lease"),
    [
        (2, None, None),
        (100_001, None, 50.0),
        (100_001, 1_000.0, 50.0),
        (100_001, 1_000.5, 40.0),
        (100_002, 1_000.5, 50.0),
    ],
    ids=["a replaced world", "the wanted one", "nobody steps beside it", "an older one may", "one made from it"],
)
def test_a_rank_steps_only_in_the_wanted_world_and_when_no_older_one_may(
    generation: int, steps_from: float | None, lease: float | None
):
    moment = {"until": 50.0, "at": 40.0, "now": 1_000.0}
    assert lease_for(generation, wanted=100_001, steps_from=steps_from, **moment) == lease
    assert lease_for(1, wanted=0, steps_from=None, **moment) == 50.0, "the service has told of none yet"


def test_a_lease_that_is_over_is_not_made_longer_for_a_world_that_waits():
    assert lease_for(1, wanted=1, steps_from=9.0, until=30.0, at=40.0, now=0.0) == 30.0


def test_older_orders_give_no_lease_to_ranks_of_a_newer_start():
    """They do not tell how long it waits for an older world. A handoff that agents have made waits for none."""
    told = {"steps_from": None, "until": 40.0, "at": 30.0, "now": 0.0}
    assert lease_for(100_001, wanted=3, **told) == 30.0
    assert lease_for(100_001, wanted=3, **(told | {"until": 20.0})) == 20.0
    assert lease_for(4, wanted=3, **told) == lease_for(100_002, wanted=100_001, **told) == 40.0
