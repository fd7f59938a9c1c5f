"""What a layout's steps take now, from steps made at different times; and that a job does not wander for chance."""

import random

import pytest

from liver_core.layout import Member, ParallelLayout
from service.planner.decision import decide
from service.planner.inputs import PlanInputs, PlannerVerdict, PlanNode, World
from service.planner.measured_steps import EDGE_STEPS, WARM_UP_STEPS, WorldSteps, as_of_now
from tests.service.planner.test_decision import job


def seconds_by_layout(*worlds: WorldSteps) -> dict[str, float]:
    return {item.layout: item.seconds for item in as_of_now(worlds)}


def world(layout: str, *seconds: float, warm_up_s: float = 9.0) -> WorldSteps:
    """After its warm-up, each number ten times."""
    return WorldSteps(layout, (warm_up_s,) * WARM_UP_STEPS + tuple(each for each in seconds for _ in range(10)))


def test_the_first_steps_of_a_world_do_not_count_where_there_are_others():
    assert seconds_by_layout(world("TP1", 2.0)) == {"TP1": 2.0}
    assert seconds_by_layout(WorldSteps("TP1", (4.0, 4.0, 5.0))) == {"TP1": 4.0}, "better than nothing"
    assert seconds_by_layout(WorldSteps("TP1", (4.0, 4.0, 5.0)), world("TP1", 2.0)) == {"TP1": 2.0}
    assert seconds_by_layout(WorldSteps("TP1", (4.0, 4.0))) == {}


def test_a_machine_that_became_slower_is_slower_in_all_layouts():
    now = WorldSteps("B", (9.0,) * WARM_UP_STEPS + (1.0,) * 25 + (3.0,) * 25)
    assert seconds_by_layout(now, world("A", 1.5)) == pytest.approx({"A": 4.5, "B": 3.0})
    middle = WorldSteps("C", (9.0,) * WARM_UP_STEPS + (4.0,) * 25 + (2.0,) * 25)
    assert seconds_by_layout(now, middle, world("A", 1.5)) == pytest.approx({"A": 2.25, "B": 3.0, "C": 6.0})


def test_the_newest_world_stands_for_its_layout():
    assert seconds_by_layout(world("A", 2.0), world("B", 1.0), world("A", 7.0))["A"] == 2.0


def test_the_error_is_of_the_median_and_falls_with_the_number_of_steps():
    few, many = (
        as_of_now([WorldSteps("A", (9.0,) * WARM_UP_STEPS + (1.0, 1.1, 1.2) * times)])[0].error for times in (2, 8)
    )
    assert 0.0 < many < few < 0.1
    assert as_of_now([world("A", 1.0)])[0].error == 0.0


def test_the_step_and_its_error_by_hand():
    """The median absolute deviation of a normal spread is its standard deviation over 1.4826; the standard error of a
    median is 1.2533 times that of a mean."""
    steps = (2.0, 2.4, 1.6, 2.0, 2.2, 1.8, 2.0, 2.6, 1.4)  # Away from 2 by 0, 0, 0, 0.2, 0.2, 0.4, 0.4, 0.6, 0.6.
    [found] = as_of_now([WorldSteps("A", (9.0,) * 5 + steps)])
    assert (found.layout, found.seconds) == ("A", 2.0)
    assert found.error == pytest.approx(1.2533 * 1.4826 * 0.1 / 3)
    [early] = as_of_now([WorldSteps("A", (4.0, 5.0, 6.0))])
    assert early.error == pytest.approx(1.2533 * 1.4826 * 0.2 / 3**0.5)


def test_three_steps_are_enough_and_of_more_than_25_the_newest_count():
    assert seconds_by_layout(WorldSteps("A", (9.0,) * 5 + (1.0, 2.0, 4.0))) == {"A": 2.0}
    assert seconds_by_layout(WorldSteps("A", (9.0,) * 5 + (1.0, 2.0))) == {"A": 9.0}, "all seven, as they are"
    # Of 25 steps the 13th decides: 13 of the last 25 are short.
    assert seconds_by_layout(WorldSteps("A", (9.0,) * 30 + (7.0,) * 12 + (1.0,) * 13)) == {"A": 1.0}
    assert seconds_by_layout(WorldSteps("A", (9.0,) * 30 + (7.0,) * 13 + (1.0,) * 12)) == {"A": 7.0}
    now = WorldSteps("B", (9.0,) * 5 + (1.0,) * 13 + (2.0,) * 12 + (3.0,) * 25)
    assert seconds_by_layout(now, WorldSteps("A", (2.0,) * 3)) == {"A": 6.0, "B": 3.0}
    later = WorldSteps("B", (9.0,) * 5 + (1.0,) * 12 + (2.0,) * 13 + (3.0,) * 25)
    assert seconds_by_layout(later, WorldSteps("A", (2.0,) * 3)) == {"A": 3.0, "B": 3.0}


def test_of_two_short_worlds_the_newer_stands_for_the_layout_and_no_change_is_seen_in_them():
    short = WorldSteps("A", (4.0, 4.0, 4.0)), WorldSteps("A", (7.0, 7.0, 7.0)), WorldSteps("B", (5.0, 5.0, 6.0))
    assert seconds_by_layout(*short) == {"A": 4.0, "B": 5.0}
    assert [item.layout for item in as_of_now([world("B", 1.0), world("A", 1.0)])] == ["A", "B"]


def nodes(count: int) -> tuple[PlanNode, ...]:
    return tuple(PlanNode(f"n{number}", 1) for number in range(count))


def inputs_of(layout: ParallelLayout, worlds: list[WorldSteps]) -> PlanInputs:
    """A job of one to three nodes, all there, in this layout, newest world first."""
    steps = as_of_now(worlds)
    members = tuple(Member(f"n{rank}", 0) for rank in range(layout.world_size))
    return PlanInputs(
        job(nodes={"min": 2, "max": 3}, layouts={"allowed": ["DP2", "DP3"]}),
        nodes(3),
        World(1, layout, members),
        step_seconds=tuple((item.layout, item.seconds) for item in steps),
        step_errors=tuple((item.layout, item.error) for item in steps),
    )


@pytest.mark.parametrize("seed", range(20))
def test_a_job_does_not_wander_between_layouts_that_are_alike_on_a_machine_whose_speed_changes(seed: int):
    """Steps of both layouts are equally long, vary by 10 %, and the machine becomes up to twice as slow and fast again.
    Without looking at steps side by side the job moves each time that it does."""
    rng = random.Random(seed)
    layout, moves, past, steps, speed = ParallelLayout(dp=2), 0, [], [], 1.0
    for step in range(1500):
        speed = min(2.0, max(0.5, speed * (1.02 if (step // 60) % 2 else 0.98)))
        steps.append(speed * rng.gauss(1.0, 0.1) * (2.0 if len(steps) < WARM_UP_STEPS else 1.0))
        if len(steps) < 8 or step % 10:
            continue
        present = WorldSteps(str(layout), (*steps[:EDGE_STEPS], *steps[EDGE_STEPS:][-EDGE_STEPS:]))
        decision = decide(inputs_of(layout, [present, *past][:12]))
        if decision.verdict is PlannerVerdict.MOVE:
            assert decision.target is not None
            layout, moves, past, steps = decision.target.layout, moves + 1, [present, *past], []
    assert moves <= 3


def test_a_layout_that_is_faster_beyond_chance_is_gone_to():
    slow = world("TP1xPP1xDP2", 1.0, 1.1, 0.9, 1.0)
    assert decide(inputs_of(ParallelLayout(dp=2), [slow, world("TP1xPP1xDP3", 0.8)])).verdict is PlannerVerdict.MOVE
    near = world("TP1xPP1xDP3", 0.96, 0.99, 0.93, 0.96)
    assert decide(inputs_of(ParallelLayout(dp=2), [slow, near])).verdict is PlannerVerdict.STAY
