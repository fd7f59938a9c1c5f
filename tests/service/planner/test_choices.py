"""The layouts that a job could run in: which there are, in which order, and on how many nodes each."""

from dataclasses import replace

import pytest

from agent.protocol.jobfile import JobFile
from liver_core.layout import Member, ParallelLayout
from service.planner import choices as module
from service.planner.by_count import BestByCount, GrowingFleet
from service.planner.choices import (
    Candidates,
    Choice,
    best_choice,
    choices,
    fitting_layouts,
    lies_near,
    most_nodes,
    step_times,
)
from service.planner.inputs import LayoutUse, PlanInputs, PlanNode, World
from service.planner.step_time import DeviceRates, StepEstimate, rates_of
from tests.service.fake_agent import JOB
from tests.service.planner.test_decision import job, nodes

TIMES = (("TP1xPP4xDP1", 1.0), ("TP1xPP2xDP1", 3.0), ("TP1xPP1xDP2", 2.0))
ALLOWED = {"allowed": ["PP2", "PP4", "DP2"]}


def members(*names: str) -> tuple[Member, ...]:
    return tuple(Member(name[:-1], int(name[-1])) for name in names)


def named(found: tuple[ParallelLayout, ...]) -> list[str]:
    return [str(layout) for layout in found]


def test_candidates_are_sorted_by_their_steps_and_fit_the_nodes_that_the_job_may_use():
    inputs = PlanInputs(job(layouts=ALLOWED), nodes(*"abcd"), step_seconds=TIMES)
    found = Candidates.of(inputs)
    assert [(step.seconds, str(layout)) for step, layout in found.by_step] == [
        (1.0, "TP1xPP4xDP1"), (2.0, "TP1xPP1xDP2"), (3.0, "TP1xPP2xDP1"),
    ]  # fmt: skip
    assert named(tuple(layout for _, layout in found.only("TP1xPP2xDP1").by_step)) == ["TP1xPP2xDP1"]
    assert found.only("TP1xPP3xDP1").by_step == ()
    three = replace(inputs, job=job(layouts=ALLOWED, nodes={"min": 2, "max": 3}))
    assert (most_nodes(inputs), most_nodes(three), most_nodes(replace(inputs, nodes=nodes("a", "b")))) == (4, 3, 2)
    assert [str(layout) for _, layout in Candidates.of(three).by_step] == ["TP1xPP1xDP2", "TP1xPP2xDP1"]


def test_choices_are_those_with_a_slot_for_every_rank_the_fastest_first():
    inputs = PlanInputs(job(layouts=ALLOWED), nodes(*"abc"), step_seconds=TIMES)
    known = Candidates.of(replace(inputs, nodes=nodes(*"abcd")))
    measured = [Choice(ParallelLayout.parse(name), StepEstimate(seconds, 0.0, True), 3, 1) for name, seconds in TIMES]
    assert choices(inputs, known) == [measured[2], measured[1]]
    assert best_choice(inputs, known) == measured[2]
    assert best_choice(replace(inputs, nodes=nodes("a")), known) is None


def test_a_spread_group_counts_with_its_slower_links_and_may_so_come_after_others():
    """TP2 is predicted to be the faster one where its groups lie on one node; here none does."""
    model = JOB["model"] | {"hidden_size": 1_024, "num_layers": 2, "seq_length": 512}
    inputs = PlanInputs(
        job(layouts={"allowed": ["TP2", "PP2"]}, model=model),
        tuple(PlanNode(name, 1, device="H100") for name in "ab"),
    )
    known = Candidates.of(inputs)
    assert [str(layout) for _, layout in known.by_step] == ["TP2xPP1xDP1", "TP1xPP2xDP1"]
    times = step_times(inputs)
    two, spread = choices(inputs, known)
    assert (str(two.layout), two.spread, two.step) == ("TP1xPP2xDP1", "", times.of_layout(two.layout))
    assert (str(spread.layout), spread.near) == ("TP2xPP1xDP1", 1)
    assert spread.step == times.of_layout(spread.layout, near=1)
    assert known.by_step[0][0].seconds < known.by_step[1][0].seconds < spread.step.seconds
    assert best_choice(inputs, known) == two


def test_pinned_layouts_go_from_the_most_nodes_to_the_least_that_the_job_must_use():
    pins = [{"nodes": 1, "layout": "TP2"}, {"nodes": 2, "layout": "TP2"}, {"nodes": 4, "layout": "PP4"}]
    inputs = PlanInputs(
        job(layouts={"pinned": pins}),
        nodes(*"abcde", slots=2),
        step_seconds=(("TP1xPP4xDP1", 9.0), ("TP2xPP1xDP1", 0.1)),
    )
    assert Candidates.of(inputs) == Candidates(())
    found = choices(inputs, Candidates(()))
    assert [(str(each.layout), each.most, each.step.seconds) for each in found] == [
        ("TP1xPP4xDP1", 4, 9.0), ("TP2xPP1xDP1", 2, 0.1),
    ]  # fmt: skip
    assert best_choice(inputs, Candidates(())) == found[0]
    three = choices(replace(inputs, nodes=nodes(*"abc", slots=2)), Candidates(()))
    assert [each.most for each in three] == [2]


def test_a_list_that_was_cut_is_made_anew_where_nothing_of_it_fits(monkeypatch):
    large = Candidates.of(PlanInputs(job(layouts={"allowed": ["PP4", "DP4"]}), nodes(*"abcd")))
    small = PlanInputs(job(layouts=ALLOWED), nodes("a", "b"), step_seconds=TIMES)
    monkeypatch.setattr(module, "CANDIDATES_MAX", 3)
    assert best_choice(small, large) is None
    monkeypatch.setattr(module, "CANDIDATES_MAX", 2)
    found = best_choice(small, large)
    assert found is not None and str(found.layout) == "TP1xPP1xDP2"


@pytest.mark.parametrize(
    ("world", "history", "degrees"),
    [
        (None, (), {1, 2, 4}),
        (ParallelLayout(tp=2), (), {2}),
        (ParallelLayout(tp=2), ("PP2", "TP4"), {2}),
        (None, ("PP2", "TP4"), {4}),
        (None, ("TP4", "PP2"), {1}),
    ],
)
def test_a_job_that_keeps_its_tp_keeps_that_of_its_world_or_else_its_last(world, history, degrees):
    names = ("a0", "b0", "c0", "d0")
    inputs = PlanInputs(
        job(layouts={"allowed": ["TP4", "TP2", "PP2"]}, policy={"keep_tp": True}),
        nodes(*"abcd"),
        None if world is None else World(1, world, members(*names[: world.world_size])),
        history=tuple(LayoutUse(2, str(ParallelLayout.parse(name))) for name in history),
    )
    assert {layout.tp for layout in fitting_layouts(inputs, 4)} == degrees
    assert {layout.tp for _, layout in Candidates.of(inputs).by_step} == degrees
    free = replace(inputs, job=job(layouts={"allowed": ["TP4", "TP2", "PP2"]}, policy={}))
    assert {layout.tp for layout in fitting_layouts(free, 4)} == {1, 2, 4}


FIRST, SECOND = "TP2xPP2xDP1", "TP2xPP1xDP2"
ON_FOUR = World(1, ParallelLayout.parse(FIRST), members("a0", "b0", "c0", "d0"))
ON_THREE = World(1, ParallelLayout.parse("PP3"), members("a0", "b0", "c0"))


@pytest.mark.parametrize(
    ("world", "history", "fleet", "layout"),
    [
        (None, (), "abcd", FIRST),
        (None, (FIRST,), "abcd", SECOND),
        # On its own nodes it keeps the layout that it has.
        (ON_FOUR, (FIRST,), "abcd", FIRST),
        (ON_FOUR, (FIRST,), "abcde", FIRST),
        (ON_FOUR, (), "abcd", FIRST),
        (replace(ON_FOUR, layout=ParallelLayout.parse(SECOND)), (FIRST, SECOND), "abcd", SECOND),
        # With another node for one of them, or from another number of nodes, it changes.
        (ON_FOUR, (FIRST,), "abce", SECOND),
        (ON_THREE, (FIRST, "TP1xPP3xDP1"), "abcd", SECOND),
    ],
)
def test_a_pinned_layout_is_changed_only_with_the_nodes(world, history, fleet, layout):
    uses = tuple(LayoutUse(ParallelLayout.parse(name).world_size, name) for name in history)
    inputs = PlanInputs(JobFile.model_validate(JOB), nodes(*fleet), world, history=uses)
    assert named(fitting_layouts(inputs, 4)) == [layout]


def test_on_fewer_nodes_than_the_world_has_the_layout_after_the_last_one_used_there_is_next():
    pins = [{"nodes": 3, "layout": "PP3"}, {"nodes": 3, "layout": "DP3"}]
    rules = job(layouts={"pinned": pins, "prefer_change": True})
    inputs = PlanInputs(rules, nodes(*"abcd"), ON_FOUR, history=(LayoutUse(3, "TP1xPP3xDP1"),))
    assert named(fitting_layouts(inputs, 3)) == ["TP1xPP1xDP3"]


def test_a_group_lies_near_where_all_of_its_ranks_are_on_one_node():
    two = ParallelLayout(tp=2, dp=2)
    assert lies_near(two, members("a0", "a1", "b0", "b1")) == 2
    assert lies_near(two, members("a0", "b0", "b1", "a1")) == 1
    assert lies_near(two, members("a0", "a1", "b0", "c0")) == 1
    assert lies_near(two, members("a0", "b0", "c0", "c1")) == 1
    assert lies_near(ParallelLayout(dp=4), members("a0", "b0", "c0", "d0")) == 1
    assert lies_near(ParallelLayout(tp=4), members("a0", "a1", "b0", "b1")) == 1
    assert lies_near(ParallelLayout(tp=2, dp=2, ep=4, etp=1), members("a0", "a1", "a2", "a3")) == 4
    assert lies_near(ParallelLayout(tp=2, dp=2, ep=4, etp=1), members("a0", "a1", "b0", "b1")) == 2


def test_it_is_said_which_groups_no_nodes_can_hold_whole():
    layout, step = ParallelLayout(tp=2, dp=2, ep=4, etp=1), StepEstimate(1.0, 0.0)
    said = [Choice(layout, step, 1, near).spread for near in (4, 2, 1)]
    assert ["each TP group" in text for text in said] == [False, False, True]
    assert ["each EP x ETP group" in text for text in said] == [False, True, False]


def test_experts_stay_cut_as_in_the_layout_in_use_where_the_job_file_has_no_limits():
    model = JOB["model"] | {"num_experts": 8}
    for limits, in_use, found in (
        ({}, None, {(1, 1), (1, 2), (1, 4)}),
        ({}, "TP2xDP2xEP4xETP1", {(4, 1)}),
        ({"expert_model_parallel": [2]}, "TP2xDP2xEP4xETP1", {(2, 1)}),
        ({"expert_model_parallel": [1, 2], "expert_tensor_parallel": [1]}, None, {(1, 1), (2, 1)}),
        ({"expert_model_parallel": [3]}, None, set()),
    ):
        inputs = PlanInputs(
            job(layouts={"limits": limits}, model=model),
            nodes("a", slots=4),
            history=(LayoutUse(1, in_use),) if in_use else (),
        )
        layouts = [layout for _, layout in Candidates.of(inputs).by_step]
        assert {(layout.ep, layout.expert_tp) for layout in layouts} == found


def test_the_device_is_that_of_the_first_node_that_tells_its():
    fleet = (PlanNode("a", 1), PlanNode("b", 1, device="NVIDIA H100 80GB"), PlanNode("c", 1, device="T4"))
    assert step_times(PlanInputs(job(), fleet)).rates == rates_of("H100") != rates_of("T4")
    assert step_times(PlanInputs(job(), fleet[:1])).rates == DeviceRates()


@pytest.mark.parametrize(
    ("layout", "least", "holds", "whole"),
    [
        # Nodes of one, four and two slots: one, five and seven in all; no, two and three pairs of slots.
        ("DP1", 1, 1, 1),
        ("DP2", 1, 2, 2),
        ("DP5", 1, 2, 2),
        ("DP6", 1, 3, 3),
        ("DP7", 1, 3, 3),
        ("DP8", 1, None, None),
        ("TP2", 1, 2, 2),
        ("TP2xDP2", 1, 2, 2),
        ("TP2xDP3", 1, 3, 3),
        ("TP7", 1, 3, None),
        ("TP4", 1, 2, 2),
        # With at least two nodes: one rank is too few; one group too, though its ranks may be spread.
        ("DP1", 2, None, None),
        ("DP2", 2, 2, 2),
        ("TP2", 2, 2, None),
        ("TP2xDP2", 2, 2, 3),
        ("DP3", 3, 3, 3),
        ("TP2xDP3", 3, 3, None),
        ("DP2", 3, None, None),
    ],
)
def test_from_how_many_nodes_on_a_layout_fits_by_hand(layout, least, holds, whole):
    fleet, wanted = GrowingFleet((1, 4, 2), least), ParallelLayout.parse(layout)
    assert (fleet.holds_from(wanted), fleet.keeps_groups_from(wanted, wanted.tp)) == (holds, whole)


def test_the_best_layout_of_each_number_of_nodes_by_hand():
    inputs = PlanInputs(job(layouts=ALLOWED, nodes={"min": 1, "max": 5}), nodes(*"abcde"), step_seconds=TIMES)
    known, times = Candidates.of(inputs), step_times(inputs)
    found = BestByCount.of(known, (1, 1, 1, 1, 1), 1, times).choices
    assert {count: (str(best.layout), best.step.seconds, best.most, best.near) for count, best in found.items()} == {
        2: ("TP1xPP1xDP2", 2.0, 2, 1),
        3: ("TP1xPP1xDP2", 2.0, 3, 1),
        4: ("TP1xPP4xDP1", 1.0, 4, 1),
        5: ("TP1xPP4xDP1", 1.0, 5, 1),
    }
    assert list(BestByCount.of(known, (1, 1, 1, 1, 1), 3, times).choices) == [4, 5], "two ranks are on two nodes"
    alike = tuple((replace(step, seconds=1.0), layout) for step, layout in known.by_step)
    first = BestByCount.of(Candidates(alike), (4,), 1, times).choices[1]
    assert str(first.layout) == str(alike[0][1]), "of equal ones the first"


def test_a_spread_layout_is_the_best_of_a_number_of_nodes_until_a_node_can_hold_its_group():
    inputs = PlanInputs(job(layouts={"allowed": ["TP2"]}, nodes={"min": 1, "max": 3}), nodes(*"abc"))
    times, layout = step_times(inputs), ParallelLayout(tp=2)
    found = BestByCount.of(Candidates.of(replace(inputs, nodes=nodes("a", slots=2))), (1, 1, 2), 1, times).choices
    assert found == {
        2: Choice(layout, times.of_layout(layout, near=1), 2, 1),
        3: Choice(layout, times.of_layout(layout), 3, 2),
    }


def test_where_experts_talk_over_nodes_a_step_counts_their_slower_links_until_a_node_can_hold_a_group():
    model, layout = JOB["model"] | {"num_experts": 4}, ParallelLayout.parse("TP2xDP2xEP4xETP1")
    rules = job(layouts={"allowed": [str(layout)]}, model=model, nodes={"min": 1, "max": 5})
    inputs = PlanInputs(rules, nodes(*"abcde"))
    times, known = step_times(inputs), Candidates.of(replace(inputs, nodes=nodes("a", slots=4)))
    found = BestByCount.of(known, (1, 2, 1, 2, 4), 1, times).choices
    spread, pairs, whole = (times.of_layout(layout, near=near) for near in (1, 2, None))
    assert spread.seconds > pairs.seconds > whole.seconds
    assert found == {
        3: Choice(layout, spread, 3, 1),
        4: Choice(layout, pairs, 4, 2),
        5: Choice(layout, whole, 5, 4),
    }
    for count, best in found.items():
        held = tuple(PlanNode(name, slots) for name, slots in zip("abcde", (1, 2, 1, 2, 4), strict=True))[:count]
        assert best_choice(replace(inputs, nodes=held), known) == best
