"""Deadline and budget: what a job should run on so that it ends in time and within its money, and what is said."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from service.planner.decision import decide
from service.planner.goals import Alert, CountOption, Remaining, overspent, within_goals
from service.planner.inputs import PlanInputs, PlannerVerdict, World
from tests.service.planner.test_decision import job
from tests.service.planner.test_worth import MARGIN, fleet, priced

FOUR_NODES_USD_PER_STEP, TWO_NODES_USD_PER_STEP = 4 * 0.9 / 3600, 2 * 1.0 / 3600
HOUR_S = 3600.0
options = st.lists(
    st.tuples(st.integers(1, 20), st.floats(0.1, 10), st.floats(0.1, 5)),
    min_size=1,
    max_size=6,
    unique_by=lambda x: x[0],
).map(lambda found: [CountOption(nodes, f"PP{nodes}", step, nodes * usd) for nodes, step, usd in found])


def chosen(inputs: PlanInputs) -> int:
    world = inputs.world
    decision = decide(inputs)
    if decision.target is not None:
        return len(decision.target.node_ids())
    assert decision.verdict is PlannerVerdict.STAY and world is not None
    return len(world.node_ids())


def test_a_job_runs_on_fewer_nodes_where_its_budget_would_not_last_on_all_of_them():
    enough = Remaining(steps=10_000, usd=10_000 * FOUR_NODES_USD_PER_STEP * 1.01)
    assert decide(priced(None, remaining=enough)).verdict is PlannerVerdict.STAY
    short = replace(enough, usd=10_000 * FOUR_NODES_USD_PER_STEP * 0.9)
    decision = decide(priced(None, remaining=short))
    assert decision.target is not None and decision.target.node_ids() == ("a", "b") and decision.alerts == ()
    assert "2 of 4 nodes by what is left of its time and its budget" in decision.reason


def test_a_job_that_saves_does_not_save_so_much_that_it_ends_late():
    thrifty = priced(0.8 * MARGIN)
    assert chosen(thrifty) == 2
    assert chosen(replace(thrifty, remaining=Remaining(steps=3_600, deadline_in_s=1.2 * HOUR_S))) == 2
    assert chosen(replace(thrifty, remaining=Remaining(steps=3_600, deadline_in_s=1.02 * HOUR_S))) == 4


def test_what_cannot_be_reached_is_said_and_the_job_goes_on_as_well_as_it_can():
    late = decide(priced(None, remaining=Remaining(steps=3_600, deadline_in_s=0.5 * HOUR_S)))
    assert (late.verdict, late.alerts) == (PlannerVerdict.STAY, (Alert.LATE,))
    assert "its deadline will be missed: 0.9 h of steps in 0.5 h" in late.reason
    poor = decide(priced(None, remaining=Remaining(steps=3_600, usd=1.0)))
    assert poor.alerts == (Alert.OVER_BUDGET,) and "2.00 USD more are needed at least" in poor.reason
    both = decide(priced(None, remaining=Remaining(3_600, deadline_in_s=0.96 * HOUR_S, usd=2.2)))
    assert both.alerts == (Alert.LATE,) and "its budget does not pay for ending in time" in both.reason
    assert both.target is not None and len(both.target.node_ids()) == 2


def test_a_budget_that_cannot_be_planned_with_is_named():
    unpriced = priced(None, nodes=fleet(*"abcd", usd=None), remaining=Remaining(100, usd=1.0))
    decision = decide(unpriced)
    assert decision.alerts == (Alert.UNPRICED,) and "pool a has no price" in decision.reason


def test_spent_money_is_counted_to_the_last_cent():
    assert overspent(39.99, 40.0) == "" == overspent(1e9, None)
    assert overspent(40.0, 40.0) == "it has cost 40.00 USD of its budget_usd 40"


TWO, FOUR = CountOption(2, "PP2", 1.0, 2.0), CountOption(4, "PP4", 0.6, 4.0)
"""A thousand steps take 1000 s and 600 s; 3600 of them cost 2 and 2.40 dollars."""
FASTEST_IS_LATE = (Alert.LATE, "its deadline will be missed: 0.2 h of steps in 0.1 h")
DOES_NOT_PAY = (Alert.LATE, "its budget does not pay for ending in time")


def test_the_time_and_the_price_of_steps_by_hand():
    assert (TWO.ends_in_s(1_000), FOUR.ends_in_s(1_000)) == (1_000.0, 600.0)
    assert (TWO.usd_for(3_600), FOUR.usd_for(3_600)) == (2.0, pytest.approx(2.4))
    assert CountOption(2, "PP2", 1.0).usd_for(3_600) == 0.0


@pytest.mark.parametrize(
    ("left", "now", "counts", "alerts"),
    [
        (Remaining(1_000), None, {2, 4}, ()),
        # What the job would change to must leave a twentieth; what it runs on may use all.
        (Remaining(1_000, 1_053.0), None, {2, 4}, ()),
        (Remaining(1_000, 1_052.0), None, {4}, ()),
        (Remaining(1_000, 1_000.0), 2, {2, 4}, ()),
        (Remaining(1_000, 999.9), 2, {4}, ()),
        (Remaining(1_000, 632.0), None, {4}, ()),
        (Remaining(1_000, 500.0), None, {4}, (FASTEST_IS_LATE,)),
        (Remaining(1_000, 1.0), 2, {4}, ((Alert.LATE, "its deadline will be missed: 0.2 h of steps in 0.0 h"),)),
        (Remaining(1_000, 0.0), None, {4}, ((Alert.LATE, "its deadline has passed"),)),
        (Remaining(3_600, usd=2.53), None, {2, 4}, ()),
        (Remaining(3_600, usd=2.52), None, {2}, ()),
        (Remaining(3_600, usd=2.0), 2, {2}, ()),
        (
            Remaining(3_600, usd=1.99),
            2,
            {2},
            ((Alert.OVER_BUDGET, "its budget ends first: 2.00 USD more are needed at least"),),
        ),
        # In time on four only, and there is money for two only.
        (Remaining(3_600, 3_000.0, 2.2), None, {2}, (DOES_NOT_PAY,)),
        # Late on all, and there is money for two only: one alert says so.
        (Remaining(1_000, 500.0, 0.6), None, {2}, (FASTEST_IS_LATE,)),
        (
            Remaining(3_600, 3_000.0, 1.0),
            None,
            {2},
            ((Alert.OVER_BUDGET, "its budget ends first: 2.00 USD more are needed at least"), DOES_NOT_PAY),
        ),
    ],
)
def test_the_numbers_of_nodes_that_time_and_money_leave_by_hand(left, now, counts, alerts):
    for given_options in ((TWO, FOUR), (FOUR, TWO)):
        found = within_goals(given_options, left, now)
        assert (found.counts, found.alerts) == (counts, alerts)


def test_of_numbers_of_nodes_that_are_alike_the_smaller_is_taken():
    # As fast, and so as dear; the deadline has passed, and the budget too.
    alike = [CountOption(nodes, f"PP{nodes}", 1.0, 2.0) for nodes in (8, 6, 7)]
    assert within_goals(alike, Remaining(1_000, -1.0), None).counts == {6}
    assert within_goals(alike, Remaining(3_600, usd=-1.0), None).counts == {6}
    # One is fast and dear; of the others, which there is money for, the faster, and of those the smaller.
    paid = [CountOption(5, "PP5", 3.0, 0.1), CountOption(8, "PP8", 2.0, 0.2), CountOption(6, "PP6", 2.0, 0.2)]
    found = within_goals([CountOption(9, "PP9", 1.0, 90.0), *paid], Remaining(3_600, 4_000.0, 1.0), None)
    assert (found.counts, found.alerts) == ({6}, (DOES_NOT_PAY,))


def test_a_budget_is_left_out_where_one_price_is_not_known():
    unpriced = CountOption(4, "PP4", 0.6)
    assert within_goals([TWO, unpriced], Remaining(3_600, usd=0.1), None).counts == {2, 4}
    assert within_goals([TWO, FOUR], Remaining(3_600, usd=0.1), None).counts == {2}


@settings(deadline=None, max_examples=60)
@given(found=options, steps=st.integers(0, 10_000), time_s=st.floats(0, 1e5), usd=st.floats(0, 100), data=st.data())
def test_something_is_always_left_and_nothing_is_that_does_not_end_in_bounds_where_anything_does(
    found, steps, time_s, usd, data
):
    now = data.draw(st.sampled_from([None, *(option.nodes for option in found)]))
    within = within_goals(found, Remaining(steps, time_s, usd), now)
    left = [option for option in found if option.nodes in within.counts]
    assert left
    kinds = {kind for kind, _ in within.alerts}
    if Alert.OVER_BUDGET not in kinds:
        assert all(option.usd_for(steps) <= usd for option in left)
    if Alert.LATE not in kinds:
        assert all(option.ends_in_s(steps) <= time_s for option in left)


@settings(deadline=None, max_examples=20)
@given(four=st.floats(0.3, 1.5), steps=st.integers(100, 5_000), share=st.floats(0.3, 3.0), price=st.floats(0.1, 9.0))
def test_a_job_that_follows_its_decisions_ends_within_its_budget_wherever_it_could_and_seldom_moves(
    four, steps, share, price
):
    """Played to the end in thirty looks."""
    rules = job(layouts={"allowed": ["PP4", "PP2"]}, nodes={"min": 2, "max": 4})
    measured = {2: 1.0, 4: four}
    cost = {nodes: nodes * price * step / HOUR_S for nodes, step in measured.items()}
    usd, left, used = steps * cost[4] * share, float(steps), []
    measured_steps = tuple((f"TP1xPP{nodes}xDP1", step) for nodes, step in measured.items())
    inputs = PlanInputs(rules, fleet(*"abcd", usd=price), step_seconds=measured_steps)
    could = min(cost.values()) * steps <= 0.95 * usd
    for look in range(30):
        inputs = replace(inputs, remaining=Remaining(round(left), usd=max(0.0, usd)))
        target = decide(inputs).target
        if target is not None:
            inputs = replace(inputs, world=World(look + 1, target.layout, target.members))
            used.append(len(target.node_ids()))
        usd -= steps / 30 * cost[used[-1]]
        left -= steps / 30
    assert len(used) <= 3
    assert usd >= -2 * steps / 30 * cost[4] or not could
