"""What the planner says for a decision, word for word, and the list of what it decided among."""

from dataclasses import replace

import pytest

from liver_core.layout import Member, ParallelLayout
from service.planner import decision as module
from service.planner.choices import step_times
from service.planner.decision import alternatives, decide, seconds_of
from service.planner.inputs import Alternative, OtherNodes, PlanInputs, PlannerVerdict, PlanNode, World
from service.planner.step_time import StepEstimate
from tests.service.planner.test_decision import job, nodes, started

PP2, PP4, DP4 = "TP1xPP2xDP1", "TP1xPP4xDP1", "TP1xPP1xDP4"


def running(layout: ParallelLayout, *names: str, **changes) -> PlanInputs:
    """On one slot of each of these nodes."""
    return PlanInputs(nodes=nodes(*names), world=World(3, layout, tuple(Member(name, 0) for name in names)), **changes)


def test_seconds_are_shown_in_three_digits_with_their_error_where_they_are_predicted():
    assert seconds_of(StepEstimate(1.23456, 0.5, measured=True)) == "1.23 s measured"
    assert seconds_of(StepEstimate(0.0123456, 0.154)) == "0.0123 s (+-15%) predicted"


def test_a_start_and_a_move_say_where_and_how_fast():
    times = ((PP2, 2.0), (PP4, 1.0))
    inputs = PlanInputs(job(layouts={"allowed": ["PP2", "PP4"]}), nodes(*"abcde"), step_seconds=times)
    start = decide(inputs)
    assert (start.verdict, start.reason) == (
        PlannerVerdict.START, f"start {PP4} on 4 of 5 nodes, 1 s measured per step",
    )  # fmt: skip
    two = running(ParallelLayout(pp=2), "a", "b", job=inputs.job, step_seconds=times)
    move = decide(replace(two, nodes=inputs.nodes))
    assert (move.verdict, move.reason) == (
        PlannerVerdict.MOVE, f"{PP4} on 4 of 5 nodes, 1 s measured per step instead of {PP2} at 2 s measured",
    )  # fmt: skip


def test_of_many_nodes_that_are_lost_or_at_risk_eight_are_named_and_the_others_counted():
    names = [f"n{at:02}" for at in range(12)]
    rules = job(layouts={"allowed": ["DP12", "DP2"]}, nodes={"min": 2, "max": 12})
    all_of_them = running(ParallelLayout(dp=12), *names, job=rules, step_seconds=(("TP1xPP1xDP2", 2.0),))
    lost = decide(replace(all_of_them, nodes=nodes(*names[10:])))
    assert (lost.verdict, lost.reason) == (
        PlannerVerdict.MOVE,
        f"without {', '.join(names[:8])} and 2 more: TP1xPP1xDP2 on 2 of 2 nodes, 2 s measured per step",
    )
    risky = tuple(PlanNode(name, 1, is_at_risk=name != "n01") for name in [*reversed(names), "other"])
    start = decide(PlanInputs(rules, risky, step_seconds=(("TP1xPP1xDP12", 2.0),)))
    others = [name for name in names if name != "n01"][:8]
    assert f"2 s measured per step (the cloud may soon take {', '.join(others)} and 3 more)" in start.reason


def test_a_node_at_risk_that_the_target_does_not_use_is_not_named():
    rules = job(layouts={"allowed": ["PP2"]}, nodes={"min": 2, "max": 2})
    fleet = (PlanNode("a", 1), PlanNode("b", 1), PlanNode("c", 1, is_at_risk=True))
    assert "the cloud" not in decide(PlanInputs(rules, fleet)).reason


@pytest.mark.parametrize(
    ("changes", "count", "others", "reason"),
    [
        (
            {"nodes": {"min": 4, "max": 4}},
            1,
            OtherNodes(taken=2, silent=1),
            "3 nodes are ready (2 taken by other jobs, 1 silent), the job needs at least nodes.min 4",
        ),
        ({"layouts": {"allowed": ["PP12"]}}, 3, OtherNodes(), "no allowed layout fits 3 nodes with 6 slots"),
        (
            {"layouts": {"pinned": [{"nodes": 3, "layout": "PP12"}]}},
            3,
            OtherNodes(leaving=1),
            "no pinned layout fits 3 nodes with 6 slots (1 announced to go)",
        ),
        ({"device_bytes": 1}, 3, OtherNodes(), "no possible layout fits 3 nodes with 6 slots"),
        (
            {"layouts": {"allowed": ["PP1", "PP2"]}, "nodes": {"min": 3, "max": 3}},
            3,
            OtherNodes(other_pool=2),
            "TP1xPP2xDP1 has 2 ranks, too few to use nodes.min 3 nodes (2 in other pools)",
        ),
    ],
)  # fmt: skip
def test_why_a_job_is_suspended_by_hand(changes, count, others, reason):
    found = decide(PlanInputs(job(**changes), nodes(*"abc"[:count], slots=2), others=others))
    assert (found.verdict, found.reason, found.target) == (PlannerVerdict.SUSPEND, reason, None)


@pytest.mark.parametrize(
    ("there_s", "errors", "moves"),
    [
        # Two standard errors of two steps that may be off by 3 and 4 %: a tenth.
        (0.901, (0.03, 0.04), False),
        (0.899, (0.03, 0.04), True),
        # Less than that the job's own least gain of 3 % counts.
        (0.971, (0.003, 0.004), False),
        (0.969, (0.003, 0.004), True),
        (0.969, (0.03, 0.0), False),
        (0.939, (0.0, 0.03), True),
        (0.941, (0.0, 0.03), False),
    ],
)
def test_a_gain_that_may_be_chance_is_no_reason_to_move(there_s, errors, moves):
    inputs = running(
        ParallelLayout(pp=4),
        *"abcd",
        job=job(layouts={"allowed": ["PP4", "DP4"]}),
        step_seconds=((PP4, 1.0), (DP4, there_s)),
        step_errors=((PP4, errors[0]), (DP4, errors[1])),
    )
    assert decide(inputs).verdict is (PlannerVerdict.MOVE if moves else PlannerVerdict.STAY)


def test_a_job_with_pinned_layouts_stays_on_as_many_nodes_however_fast_another_would_be():
    pins = {"pinned": [{"nodes": 4, "layout": "PP4"}, {"nodes": 2, "layout": "PP2"}]}
    times = ((PP4, 0.1), (DP4, 9.0), (PP2, 5.0), ("TP1xPP1xDP2", 0.1))
    stays = decide(running(ParallelLayout(dp=4), *"abcd", job=job(layouts=pins), step_seconds=times))
    assert (stays.verdict, stays.reason) == (
        PlannerVerdict.STAY, f"{PP4} on as many nodes gains too little over {DP4}",
    )  # fmt: skip
    two = running(ParallelLayout(dp=2), "a", "b", job=job(layouts=pins), step_seconds=times)
    moves = decide(replace(two, nodes=nodes(*"abcd")))
    assert (
        moves.reason
        == f"{PP4} on 4 of 4 nodes, 0.1 s measured per step instead of TP1xPP1xDP2 at 0.1 s measured"
        + ("; no faster, but pinned for so many nodes")
    )


def test_the_alternatives_are_what_could_be_chosen_with_what_was_measured_and_what_would_be_predicted(monkeypatch):
    times = ((PP2, 2.0), (PP4, 1.0))
    inputs = PlanInputs(
        job(layouts={"allowed": ["PP2", "PP4", "DP12"]}),
        nodes(*"abcd"),
        step_seconds=times,
        step_errors=((PP4, 0.05),),
    )
    predicted = {
        layout.pp: step_times(inputs).predicted(layout).seconds
        for layout in (ParallelLayout(pp=2), ParallelLayout(pp=4))
    }
    expected = (
        Alternative(PP4, 4, 1.0, True, 0.05, predicted[4]),
        Alternative(PP2, 2, 2.0, True, 0.0, predicted[2]),
    )
    assert alternatives(inputs) == expected
    assert alternatives(started(inputs)) == expected
    monkeypatch.setattr(module, "ALTERNATIVES_MAX", 1)
    assert alternatives(inputs) == expected[:1]


def test_an_alternative_whose_groups_are_spread_is_predicted_so():
    inputs = PlanInputs(job(layouts={"allowed": ["TP2"]}), nodes("a", "b"))
    spread = step_times(inputs).of_layout(ParallelLayout(tp=2), near=1)
    assert alternatives(inputs) == (Alternative("TP2xPP1xDP1", 2, spread.seconds, False, spread.error, spread.seconds),)
