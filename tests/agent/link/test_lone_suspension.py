"""When agents suspend a job by themselves: only where the service is not heard, all of them, and at one time."""

import asyncio
from collections.abc import Coroutine
from datetime import datetime
from typing import Any

import pytest

from agent.link.lone_suspension import AGAIN_FOR_S, AGAIN_S, ALONE_AFTER_S, LoneSuspension
from agent.protocol.peer import SuspensionBody
from agent.protocol.values import utc
from liver_core.handoff import FailedPart, FailureCause, Reason
from liver_core.handoff.suspending import COMMITTED_S, TAKES_S, EndTimes
from liver_core.layout import Member, ParallelLayout, Roster

START_S = 1_000_000_000.0
WORLD = Roster("j", 3, ParallelLayout(dp=3), tuple(Member(name, 0) for name in "abc"))
TIMES = EndTimes(step_s=1.0, save_s=2.0)
NEEDS_S = TAKES_S + 3 * 1.0 + 2 * 2.0


def at(after_s: float) -> datetime:
    return utc(START_S + after_s)


class Scene:
    """Node a leads; what it tells is kept."""

    def __init__(self) -> None:
        self.now, self.unheard_s = START_S, ALONE_AFTER_S
        self.told: list[tuple[str, SuspensionBody]] = []
        self.alone = LoneSuspension(
            "a",
            "j",
            now=lambda: self.now,
            heard_ago=lambda: self.unheard_s,
            tell=lambda name, body: self.told.append((name, body)),
        )

    def plan(self, *deadlines: datetime | None, times: EndTimes = TIMES, world: Roster = WORLD) -> None:
        """Nodes b and c go by these."""
        going = dict(zip("bc", deadlines or (at(120),), strict=False))
        run(self.alone.plan(world, going, times, "b will go, and nothing fits"))

    def after(self, seconds: float) -> "Scene":
        """Later, with nothing told since."""
        self.now, self.told = self.now + seconds, []
        return self


def run(work: Coroutine[Any, Any, None]) -> None:
    asyncio.run(work)


def test_all_members_are_told_the_time_at_which_the_end_fits_before_the_first_node_goes() -> None:
    scene = Scene()
    scene.plan(at(200), at(120))
    body = SuspensionBody(
        generation=3, at_utc=at(120 - NEEDS_S), reason="b will go, and nothing fits; the service is not heard", goes="c"
    )
    assert scene.told == [("b", body), ("c", body)]
    assert scene.alone.at(3) == at(120 - NEEDS_S)
    assert scene.alone.reason == Reason(body.reason, "suspend", node="c", cause=FailureCause(FailedPart.NODE))
    assert scene.alone.at(2) is None and scene.alone.at(None) is None, "no other world is meant"


def test_nothing_is_planned_while_the_service_is_heard() -> None:
    scene = Scene()
    scene.unheard_s = ALONE_AFTER_S - 0.1
    scene.plan()
    assert scene.told == [] and scene.alone.at(3) is None


@pytest.mark.parametrize(
    ("deadline", "times"),
    [(at(NEEDS_S - 1), TIMES), (None, TIMES), (at(120), EndTimes(0.0, 2.0))],
    ids=["no time is left", "it may go at any time", "no step was timed"],
)
def test_it_begins_at_once_where_waiting_may_lose_steps(deadline: datetime | None, times: EndTimes) -> None:
    scene = Scene()
    scene.plan(deadline, times=times)
    assert (scene.alone.at(3) or at(1)) <= at(0)


def test_a_time_that_was_said_stays_while_it_is_about_right_and_a_nearer_end_moves_it() -> None:
    scene = Scene()
    scene.plan(at(120))
    scene.after(1.0).plan(at(123))
    assert scene.told == []
    scene.plan(at(60))
    assert scene.alone.at(3) == at(60 - NEEDS_S) and [name for name, _ in scene.told] == ["b", "c"]


def test_it_is_said_again_to_who_may_have_been_away_for_a_while() -> None:
    scene = Scene()
    scene.plan()
    said = scene.told
    scene.after(AGAIN_S / 2).alone.tick()
    assert scene.told == []
    scene.after(AGAIN_S / 2).alone.tick()
    assert scene.told == said
    scene.after(120 - NEEDS_S + AGAIN_FOR_S - AGAIN_S - 0.1).alone.tick()
    assert scene.told == said
    scene.after(AGAIN_S).alone.tick()
    assert scene.told == []


def test_it_is_called_off_when_the_service_is_heard_again_or_there_is_another_way_and_all_are_told() -> None:
    for by_service in (True, False):
        scene = Scene()
        scene.plan()
        scene.after(5.0)
        scene.unheard_s = 0.2 if by_service else ALONE_AFTER_S
        scene.plan() if by_service else run(scene.alone.call_off())
        assert [(name, body.at_utc) for name, body in scene.told] == [("b", None), ("c", None)]
        assert scene.alone.at(3) is None
        scene.unheard_s = ALONE_AFTER_S
        scene.plan()
        assert scene.alone.at(3) == at(120 - NEEDS_S), "the service is away once more"


def test_it_is_not_called_off_any_more_when_some_may_have_begun() -> None:
    scene = Scene()
    scene.plan()
    scene.after(120 - NEEDS_S - COMMITTED_S).unheard_s = 0.0
    scene.plan()
    run(scene.alone.call_off())
    assert scene.told == [] and scene.alone.at(3) == at(120 - NEEDS_S)


def test_who_only_hears_of_it_calls_nothing_off_and_the_newest_word_counts() -> None:
    scene = Scene()
    body = SuspensionBody(generation=3, at_utc=at(40), reason="c will go", goes="c")
    run(scene.alone.take(body))
    run(scene.alone.call_off())
    scene.alone.tick()
    assert scene.told == [] and scene.alone.at(3) == at(40)
    run(scene.alone.take(body.model_copy(update={"at_utc": None})))
    assert scene.alone.at(3) is None


def test_once_the_ranks_have_ended_nothing_is_left_of_it() -> None:
    scene = Scene()
    scene.plan()
    scene.alone.end()
    scene.after(AGAIN_S).alone.tick()
    assert scene.told == [] and scene.alone.at(3) is None


def test_a_new_world_gets_a_time_of_its_own() -> None:
    scene = Scene()
    scene.plan(at(120))
    scene.plan(at(123), world=Roster("j", 4, WORLD.layout, WORLD.members))
    assert scene.alone.at(4) == at(123 - NEEDS_S) and scene.alone.at(3) is None
