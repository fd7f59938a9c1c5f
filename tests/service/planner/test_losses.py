"""What is planned before it happens: losses of nodes, groups and zones, each as the planner would decide it."""

from dataclasses import replace
from itertools import combinations
from statistics import mean

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from liver_core.layout.parallel import ParallelLayout
from service.planner import losses
from service.planner.choices import Candidates, best_choice, step_times
from service.planner.decision import decide, seconds_of
from service.planner.feasibility import rule_violations
from service.planner.inputs import PlanInputs, PlannerVerdict, PlanNode, PoolMarket
from service.planner.losses import layouts_by_count, loss_plans, standing_plans, without
from tests.service.planner.test_decision import job, nodes, started

ZONED = tuple(PlanNode(f"{zone}{at}", 1, zone=zone) for zone in "xyz" for at in range(2))


@settings(deadline=None, max_examples=60)
@given(
    slots=st.lists(st.integers(1, 4), min_size=2, max_size=8),
    lost=st.sets(st.integers(0, 7), max_size=4),
    measured=st.lists(st.tuples(st.sampled_from(["PP2", "DP2", "TP2", "PP4", "TP2xPP2"]), st.floats(0.1, 9))),
)
def test_a_loss_is_planned_from_the_list_of_all_nodes_as_it_is_from_those_that_are_left(slots, lost, measured):
    fleet = tuple(PlanNode(f"n{at}", count) for at, count in enumerate(slots))
    times = tuple((str(ParallelLayout.parse(name)), seconds) for name, seconds in dict(measured).items())
    inputs = PlanInputs(job(nodes={"min": 1, "max": 8}), fleet, step_seconds=times)
    left = without(inputs, tuple(f"n{at}" for at in lost))
    assert decide(left, Candidates.of(inputs)) == decide(left)


def test_the_loss_of_a_zone_has_a_plan_that_takes_nothing_there():
    rules = job(nodes={"min": 2, "max": 5}, layouts={"allowed": ["DP5", "DP4", "DP3"]}, global_batch=60)
    inputs = started(PlanInputs(rules, ZONED[:5]))
    assert inputs.world is not None
    plans = {plan.leaving: plan for plan in standing_plans(inputs)}
    members = inputs.world.node_ids()
    assert all((name,) in plans for name in members)
    for zone in "xy":
        there = tuple(name for name in members if name[0] == zone)
        plan = plans[there]
        assert plan.target is not None and not {name for name in plan.target.node_ids() if name[0] == zone}
    # One node of a zone is a loss of one node; there is one plan for it.
    assert ("z0",) in plans and sum(len(leaving) > 1 for leaving in plans) == 2


def pooled(count: int, pool: str = "a") -> tuple[PlanNode, ...]:
    return tuple(PlanNode(f"{pool}{at}", 1, pool=pool) for at in range(count))


def test_groups_that_a_pool_loses_at_once_have_plans_the_likeliest_first_and_bounded(monkeypatch):
    rules = job(nodes={"min": 1, "max": 6}, layouts={"allowed": ["DP6", "DP5", "DP4", "DP3", "DP2"]}, global_batch=60)
    inputs = started(PlanInputs(rules, (*pooled(4), *pooled(2, "b"))))
    assert inputs.world is not None
    singles = tuple((name,) for name in inputs.world.node_ids())
    pools = (("a0", "a1", "a2", "a3"), ("b0", "b1"))
    plain = replace(inputs, markets=(PoolMarket("a", life_s=3_600.0, group_sizes=((1, 1.0),)),))
    assert [plan.leaving for plan in standing_plans(plain)] == [*singles, *pools]
    # Of four triples each is lost more often than each of six pairs; so is all of a pool than any of its parts.
    seen = PoolMarket("a", life_s=3_600.0, group_sizes=((1, 0.4), (2, 0.3), (3, 0.3)))
    plans = standing_plans(replace(inputs, markets=(seen,)))
    assert [plan.leaving for plan in plans] == [
        *singles, *pools, *combinations(pools[0], 3), *combinations(pools[0], 2)
    ]  # fmt: skip
    for plan in plans:
        expected = decide(without(inputs, plan.leaving))
        assert (plan.target, plan.reason) == (expected.target, expected.reason) and plan.target is not None
        assert "per step" in plan.reason, "with its estimate"
    monkeypatch.setattr(losses, "GROUPS_IN_PLANS_MAX", 5)
    assert [plan.leaving for plan in standing_plans(replace(inputs, markets=(seen,)))] == [
        plan.leaving for plan in plans[: len(singles) + len(pools) + 5]
    ]


@settings(deadline=None, max_examples=100)
@given(
    members=st.integers(1, 6),
    others=st.integers(0, 4),
    weights=st.lists(st.integers(1, 5), min_size=1, max_size=6),
)
def test_the_chances_of_all_sets_sum_to_that_of_losing_any_member(members, others, weights):
    """Every loss takes so many of ours, each as likely: by counting all of them."""
    ours = members + others
    sizes = tuple((size, weight / sum(weights)) for size, weight in enumerate(weights[:ours], start=1))
    market = PoolMarket("a", life_s=10.0, ours=ours, group_sizes=sizes)
    for count in range(1, members + 1):
        given_set = set(range(count))
        hits = sum(
            share * mean(set(lost) & set(range(members)) == given_set for lost in combinations(range(ours), size))
            for size, share in sizes
        )
        assert losses._chance_of_set(market, members, count) == pytest.approx(hits / 10.0)


def test_a_group_is_named_with_its_share_of_the_losses_and_what_would_be_left():
    rules = job(nodes={"min": 1, "max": 6}, layouts={"allowed": ["DP6", "DP5", "DP4", "DP3", "DP2"]}, global_batch=60)
    seen = PoolMarket("a", life_s=3_600.0, group_sizes=((1, 0.7), (3, 0.3), (9, 0.0)))
    inputs = replace(started(PlanInputs(rules, (*pooled(4), *pooled(2, "b")))), markets=(seen,))
    found = {plan.what: (plan.nodes_lost, plan.layout) for plan in loss_plans(inputs)}
    assert found["3 nodes of pool a, 30% of its losses"] == (3, "TP1xPP1xDP3")
    assert found["pool b"] == (2, "TP1xPP1xDP4") and found["pool a"] == (4, "TP1xPP1xDP2")
    assert not any("9 nodes" in what for what in found)


def test_no_more_plans_are_made_than_may_travel_and_one_always_is(monkeypatch):
    inputs = started(PlanInputs(job(), nodes("a", "b", "c", "d")))
    monkeypatch.setattr(losses, "SEATS_IN_PLANS_MAX", 9)
    assert [plan.leaving for plan in standing_plans(inputs)] == [("a",), ("b",)]
    monkeypatch.setattr(losses, "SEATS_IN_PLANS_MAX", 8)
    assert len(standing_plans(inputs)) == 2, "four seats in each"
    monkeypatch.setattr(losses, "SEATS_IN_PLANS_MAX", 1)
    assert len(standing_plans(inputs)) == 1


def test_each_kind_of_loss_is_estimated_once_with_its_error_or_says_why_nothing_is_left():
    fleet = (PlanNode("a", 2), *nodes("b", "c", "d"))
    measured = (("TP1xPP4xDP1", 1.0), ("TP1xPP3xDP1", 1.5))
    rules = job(layouts={"allowed": ["PP5", "PP4", "PP3"]}, nodes={"min": 3, "max": 4}, model=MODEL)
    inputs = replace(started(PlanInputs(rules, fleet)), step_seconds=measured)
    found = {plan.what: plan for plan in loss_plans(inputs)}
    assert list(found) == ["one of 1 nodes with 2 slots", "one of 3 nodes with 1 slots", "any 2 nodes"]
    large, small, two = found.values()
    assert (large.layout, large.step_s, large.step_error) == ("TP1xPP3xDP1", 1.5, 0.0)
    assert small.layout == "TP1xPP4xDP1" and large.times_slower is not None and small.times_slower is not None
    assert large.times_slower == pytest.approx(1.5 * small.times_slower)
    assert (two.layout, two.nodes_lost, two.reason) == (None, 2, "2 nodes are left, the job needs at least nodes.min 3")
    assert loss_plans(PlanInputs(rules, fleet)) == ()


MODEL = {
    "num_layers": 60, "hidden_size": 128, "num_attention_heads": 4, "padded_vocab_size": 264, "seq_length": 128,
}  # fmt: skip


def test_layouts_by_count_of_a_fleet_that_is_not_there_yet_are_those_of_nodes_like_it():
    assert [choice.layout and str(choice.layout) for choice in layouts_by_count(PlanInputs(job(), nodes("a")))] == [
        str(choice.layout) for choice in layouts_by_count(PlanInputs(job(), nodes("a", "b")))
    ]


@settings(deadline=None, max_examples=80)
@given(
    slots=st.lists(st.integers(1, 5), min_size=1, max_size=9),
    least=st.integers(1, 4),
    measured=st.lists(st.tuples(st.sampled_from(["PP2", "DP2", "TP2", "PP4", "TP4", "TP2xPP2"]), st.floats(0.1, 9))),
    allowed=st.sampled_from([(), ("TP4",), ("TP4", "PP2", "DP4"), ("TP2xPP2", "TP4xPP2", "PP3")]),
)
def test_the_layouts_for_all_numbers_of_nodes_are_those_of_each_number_asked_alone(slots, least, measured, allowed):
    times = tuple((str(ParallelLayout.parse(name)), seconds) for name, seconds in dict(measured).items())
    rules = job(nodes={"min": least, "max": 9}, layouts={"allowed": list(allowed)})
    inputs = PlanInputs(rules, tuple(PlanNode(f"n{at}", count) for at, count in enumerate(slots)), step_seconds=times)
    for found in layouts_by_count(inputs):
        row = sorted([*slots, *[min(slots)] * (least - len(slots))])
        asked = (row[: found.nodes], row[-found.nodes :])
        fleets = (tuple(PlanNode(f"n{at:02}", count) for at, count in enumerate(row)) for row in asked)
        alone = [best_choice(replace(inputs, nodes=fleet), Candidates.of(inputs_of(inputs, row))) for fleet in fleets]
        best = next((choice for choice in alone if choice is not None), None)
        assert found.layout == (best.layout if best is not None else None)
        if best is not None:
            assert f"{best.layout}" in found.reason and seconds_of(best.step) in found.reason
            assert ("on nodes with" in found.reason) == (alone[0] is None)


def inputs_of(inputs: PlanInputs, slots: list[int]) -> PlanInputs:
    return replace(inputs, nodes=tuple(PlanNode(f"n{at:02}", count) for at, count in enumerate(slots)))


def test_the_layouts_of_a_thousand_nodes_are_not_looked_for_anew_at_each_number(monkeypatch):
    asked = []
    monkeypatch.setattr(losses, "best_choice", lambda inputs, known: asked.append(len(inputs.nodes)))
    rules = job(nodes={"min": 1, "max": 1_000}, layouts={"allowed": ["DP1", "DP2", "DP4"]})
    found = layouts_by_count(PlanInputs(rules, tuple(PlanNode(f"n{at:04}", 8) for at in range(1_000))))
    assert len(found) == 1_000 and asked == []


def test_a_job_that_keeps_its_tp_changes_pp_and_dp_only():
    rules = {"nodes": {"min": 2, "max": 8}}
    first = started(PlanInputs(job(**rules, layouts={"allowed": ["TP2xPP2"]}), nodes(*"abcd")))
    free = replace(first, job=job(**rules), nodes=nodes(*"abc"))
    kept = replace(free, job=job(**rules, policy={"keep_tp": True}))
    for inputs, degrees in ((free, {1}), (kept, {2})):
        moved = decide(inputs)
        assert moved.target is not None and {moved.target.layout.tp} == degrees
        again = decide(replace(inputs, world=None))
        assert again.target is not None and {again.target.layout.tp} == degrees, "a restart keeps it too"
    lost = standing_plans(replace(first, job=kept.job))
    assert {plan.target.layout.tp for plan in lost if plan.target} == {2}


def test_layouts_of_two_tp_in_a_job_that_keeps_its_tp_are_refused():
    (found,) = rule_violations(job(layouts={"allowed": ["TP2", "PP2"]}, policy={"keep_tp": True}))
    assert (found.field, found.rule) == (
        "policy.keep_tp", "all layouts named must have one TP, layouts have TP1 and TP2",
    )  # fmt: skip
    assert rule_violations(job(layouts={"allowed": ["TP2", "TP2xPP2"]}, policy={"keep_tp": True})) == ()


def test_a_job_says_itself_for_which_gain_it_moves():
    at = started(PlanInputs(job(layouts={"allowed": ["PP4"]}), nodes(*"abcd")))
    times = (("TP1xPP4xDP1", 1.0), ("TP1xPP1xDP4", 0.9))
    for least, verdict in ((0.05, PlannerVerdict.MOVE), (0.2, PlannerVerdict.STAY)):
        rules = job(layouts={"allowed": ["PP4", "DP4"]}, policy={"gain_min": least})
        assert decide(replace(at, job=rules, step_seconds=times)).verdict is verdict


def test_after_a_loss_nothing_is_offered_and_fewer_nodes_of_the_pool_are_ours():
    markets = (
        PoolMarket("a", 1.0, offered=3, on_demand_offered=2, ours=5),
        PoolMarket("b", 2.0, offered=1, ours=1),
        PoolMarket("c", 3.0, on_demand_offered=4, ours=7),
        PoolMarket("d", 4.0, offered=9),
    )
    inputs = PlanInputs(job(), (*pooled(3), *pooled(3, "b"), *pooled(1, "d")), markets=markets)
    left = without(inputs, ("a0", "a2", "b0", "b1", "d0", "elsewhere"))
    assert [node.node_id for node in left.nodes] == ["a1", "b2"]
    assert left.markets == (
        PoolMarket("a", 1.0, ours=3), PoolMarket("b", 2.0, ours=0), PoolMarket("c", 3.0, ours=7), PoolMarket("d", 4.0),
    )  # fmt: skip


def test_of_several_nodes_the_largest_are_taken_to_be_lost():
    """Six ranks on nodes of one, two and three slots; what is left is what the others hold."""
    allowed = {"allowed": ["PP6", "PP5", "PP4", "PP3", "PP1"]}
    fleet = tuple(PlanNode(name, slots) for name, slots in zip("abc", (1, 2, 3), strict=True))
    inputs = started(PlanInputs(job(layouts=allowed, nodes={"min": 1, "max": 3}, model=MODEL), fleet))
    assert [(plan.what, plan.nodes_lost, plan.layout) for plan in loss_plans(inputs)] == [
        ("one of 1 nodes with 3 slots", 1, "TP1xPP3xDP1"),
        ("one of 1 nodes with 2 slots", 1, "TP1xPP4xDP1"),
        ("one of 1 nodes with 1 slots", 1, "TP1xPP5xDP1"),
        ("any 2 nodes", 2, "TP1xPP1xDP1"),
    ]


def test_what_a_loss_costs_in_steps_and_why_nothing_is_left_by_hand():
    rules = job(layouts={"allowed": ["PP5", "PP3"]}, nodes={"min": 2, "max": 5}, model=MODEL)
    first = started(PlanInputs(rules, nodes(*"abcde")))
    inputs = replace(first, step_seconds=(("TP1xPP5xDP1", 0.5), ("TP1xPP3xDP1", 2.0)))
    one, two, four = loss_plans(inputs)
    assert (one.what, one.layout, one.step_s, one.times_slower) == (
        "one of 5 nodes with 1 slots", "TP1xPP3xDP1", 2.0, 4.0,
    )  # fmt: skip
    assert one.reason == "TP1xPP3xDP1, 2 s measured per step"
    assert (two.what, two.nodes_lost, two.layout) == ("any 2 nodes", 2, "TP1xPP3xDP1")
    assert (four.what, four.nodes_lost, four.layout, four.step_s, four.times_slower) == (
        "any 4 nodes", 4, None, None, None,
    )  # fmt: skip
    assert four.reason == "1 nodes are left, the job needs at least nodes.min 2"
    large = replace(first, job=job(layouts={"allowed": ["PP5", "PP4"]}, nodes={"min": 2, "max": 5}, model=MODEL))
    assert [plan.reason for plan in loss_plans(large)][1] == "no layout fits the nodes that are left"


def test_a_loss_that_leaves_only_spread_groups_says_so():
    allowed = {"allowed": ["TP2xPP2", "TP2"]}
    rules = job(layouts=allowed, nodes={"min": 1, "max": 3})
    inputs = started(PlanInputs(rules, (*nodes("a", slots=2), *nodes("b", "c"))))
    reasons = {plan.what: plan.reason for plan in loss_plans(inputs)}
    assert reasons["one of 1 nodes with 2 slots"].endswith("; no nodes can hold each TP group whole")
    assert "whole" not in reasons["one of 2 nodes with 1 slots"]


def test_of_the_sizes_that_a_pool_has_lost_at_once_the_four_most_frequent_are_shown():
    allowed = {"allowed": [f"DP{count}" for count in range(1, 9)]}
    sizes = ((1, 0.5), (2, 0.05), (3, 0.1), (4, 0.15), (5, 0.1), (6, 0.05), (7, 0.03), (8, 0.02))
    rules = job(nodes={"min": 1, "max": 8}, layouts=allowed, global_batch=840)
    inputs = replace(started(PlanInputs(rules, pooled(8))), markets=(PoolMarket("a", group_sizes=sizes),))
    shown = [plan.what for plan in loss_plans(inputs) if "of its losses" in plan.what]
    assert shown == [
        f"{count} nodes of pool a, {share}% of its losses" for count, share in ((4, 15), (3, 10), (5, 10), (2, 5))
    ]
    assert [plan.what for plan in loss_plans(inputs)][:3] == [
        "one of 8 nodes with 1 slots", "any 2 nodes", "any 4 nodes",
    ]  # fmt: skip


def test_groups_have_plans_up_to_a_size_and_of_equal_ones_the_smaller_first(monkeypatch):
    allowed = {"allowed": [f"DP{count}" for count in range(1, 5)]}
    inputs = started(PlanInputs(job(nodes={"min": 1, "max": 4}, layouts=allowed, global_batch=840), pooled(4)))
    # Of six pairs each is lost as often as each of four triples: 0.375 / 6 = 0.25 / 4.
    market = PoolMarket("a", life_s=10.0, group_sizes=((2, 0.375), (3, 0.25)))

    def groups(market: PoolMarket) -> list[tuple[str, ...]]:
        return [plan.leaving for plan in standing_plans(replace(inputs, markets=(market,)))][4:]

    names = ("a0", "a1", "a2", "a3")
    assert groups(market) == [*combinations(names, 2), *combinations(names, 3)]
    assert groups(replace(market, group_sizes=((4, 1.0),))) == [names]
    assert groups(replace(market, life_s=None)) == []
    monkeypatch.setattr(losses, "GROUP_NODES_MAX", 2)
    assert groups(market) == [*combinations(names, 2)]


def test_a_loss_that_no_plan_names_has_a_layout_on_nodes_with_the_devices_that_the_job_has():
    inputs = PlanInputs(job(layouts={"allowed": ["PP2"]}), tuple(PlanNode(name, 1, device="H100") for name in "ab"))
    [two] = layouts_by_count(inputs)
    assert seconds_of(step_times(inputs).of_layout(ParallelLayout.parse("PP2"))) in two.reason
    [other] = layouts_by_count(replace(inputs, nodes=nodes("a", "b")))
    assert two.reason != other.reason


def test_a_loss_that_is_of_several_kinds_has_one_plan_and_those_after_it_have_theirs():
    """The zone x is the pool p, and y is q; of p pairs are lost too, and the pair of q is all of it."""
    here = tuple(PlanNode(f"a{at}", 1, zone="x", pool="p") for at in range(3))
    there = tuple(PlanNode(f"b{at}", 1, zone="y", pool="q") for at in range(2))
    rules = job(nodes={"min": 1, "max": 5}, layouts={"allowed": ["DP5", "DP3", "DP2"]}, global_batch=60)
    markets = (
        PoolMarket("q", life_s=1.0, group_sizes=((2, 1.0),)),
        PoolMarket("p", life_s=9.0, group_sizes=((2, 1.0),)),
    )
    inputs = replace(started(PlanInputs(rules, (*here, *there))), markets=markets)
    first, last = ("a0", "a1", "a2"), ("b0", "b1")
    assert [plan.leaving for plan in standing_plans(inputs)] == [
        *((name,) for name in (*first, *last)), first, last, *combinations(first, 2),
    ]  # fmt: skip
