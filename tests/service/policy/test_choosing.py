"""LiveR's policy: what it may never do, whatever it is asked, and what it does in the cases that a user knows."""

from dataclasses import replace
from math import inf

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from service.policy.choosing import UtilityPolicy, decide
from service.policy.plain_policies import ReactivePolicy, UniformProgressPolicy
from service.policy.types import (
    Candidate,
    Goal,
    Market,
    Policy,
    PolicyInputs,
    PolicyKnobs,
    PolicyVerdict,
    PoolView,
    PriceHad,
    StandingWorld,
)
from service.policy.utility import WAIT_FACTOR, curve_of, tokens_of_one_loss, value_of_token

HOUR_S = 3_600.0
PLACES = ("a", "b")


@st.composite
def pools(draw: st.DrawFn) -> tuple[PoolView, ...]:
    found = []
    for index in range(draw(st.integers(1, 4))):
        market = draw(st.sampled_from(list(Market)))
        found.append(
            PoolView(
                pool=f"pool-{index}",
                place=draw(st.sampled_from(PLACES)),
                market=market,
                usd_per_hour=draw(st.floats(0.1, 10)),
                held=draw(st.integers(0, 4)),
                coming=draw(st.integers(0, 2)),
                offered=draw(st.integers(0, 4)),
                acquire_s=draw(st.sampled_from([0.0, 120.0])),
                life_s=inf if market is Market.ON_DEMAND else draw(st.floats(60, 1e6)),
                grows_in_s=draw(st.sampled_from([600.0, inf])),
                group_sizes=draw(st.sampled_from([((1, 1.0),), ((1, 0.5), (3, 0.5))])),
                move_usd=draw(st.sampled_from([0.0, 2.0])),
            )
        )
    return tuple(found)


candidates = st.lists(st.tuples(st.integers(1, 8), st.floats(0.5, 50)), min_size=0, max_size=6).map(
    lambda rows: tuple(
        Candidate(f"TP1xPP{index + 1}", nodes, step_s, 1_000, change_s=2.0)
        for index, (nodes, step_s) in enumerate(rows)
    )
)
goals = st.builds(
    Goal,
    usd_per_mtok=st.sampled_from([None, 100.0, 1e6]),
    tokens_left=st.sampled_from([inf, 1e6]),
    deadline_in_s=st.sampled_from([inf, 5e3, 1e6]),
    budget_left_usd=st.sampled_from([inf, 0.0]),
)
knobs = st.builds(
    PolicyKnobs, spares_max=st.integers(0, 3), releases=st.booleans(), on_demand=st.booleans(), start_s=st.just(60.0)
)


@st.composite
def asked(draw: st.DrawFn) -> PolicyInputs:
    found, layouts = draw(pools()), draw(candidates)
    standing = None
    if layouts and draw(st.booleans()):
        layout, pool = draw(st.sampled_from(layouts)), draw(st.sampled_from(found))
        standing = StandingWorld(
            layout.layout,
            layout.nodes,
            pool.place,
            ((pool.pool, min(layout.nodes, pool.held)),),
            pool.held >= layout.nodes,
        )
    return PolicyInputs(found, layouts, 5.0, standing=standing, goal=draw(goals), knobs=draw(knobs))


@settings(max_examples=80, deadline=None)
@given(asked())
def test_the_same_inputs_give_the_same_decision_with_a_reason(inputs: PolicyInputs) -> None:
    decision = decide(inputs)
    assert decision == decide(inputs)
    assert decision.reason
    found = [option.utility_usd_per_hour for option in decision.alternatives]
    assert found == sorted(found, reverse=True)


@settings(max_examples=80, deadline=None)
@given(asked())
def test_nothing_is_held_that_cannot_be_had_and_nothing_runs_on_nodes_that_are_not_up(inputs: PolicyInputs) -> None:
    decision = decide(inputs)
    have = {pool.pool: pool for pool in inputs.pools}
    for name, count in decision.hold:
        assert 0 < count <= have[name].held + have[name].coming + have[name].offered
    option = decision.option
    if decision.verdict is PolicyVerdict.MOVE and option is not None:
        assert option.nodes <= sum(pool.held for pool in inputs.pools if pool.place == option.place)
        assert option.layout in {each.layout for each in inputs.candidates}


@settings(max_examples=80, deadline=None)
@given(asked(), st.integers(0, 3), st.integers(1, 3))
def test_more_capacity_in_a_place_never_lowers_the_best_utility(inputs: PolicyInputs, which: int, more: int) -> None:
    inputs = replace(inputs, standing=None, goal=Goal(usd_per_mtok=inputs.goal.usd_per_mtok or 10.0))
    inputs = replace(inputs, knobs=replace(inputs.knobs, releases=True))
    # Of several pools in one place the policy weighs two ways to share the nodes, not every one.
    places = [replace(pool, place=pool.pool) for pool in inputs.pools]
    inputs = replace(inputs, pools=tuple(places))
    changed = list(places)
    before = decide(inputs).alternatives
    which %= len(changed)
    changed[which] = replace(changed[which], offered=changed[which].offered + more)
    after = decide(replace(inputs, pools=tuple(changed))).alternatives
    if before:
        least = before[0].utility_usd_per_hour
        assert after[0].utility_usd_per_hour >= least - 1e-9 * abs(least) - 1e-9


@pytest.mark.parametrize("policy", [UtilityPolicy(), ReactivePolicy(), UniformProgressPolicy()])
def test_every_policy_keeps_the_protocol(policy: Policy) -> None:
    inputs = PolicyInputs((spot("a", held=4),), linear(), 3.0, knobs=PolicyKnobs(start_s=60.0))
    first = policy.decide(inputs)
    assert first.verdict is PolicyVerdict.START and first.option is not None and first.option.nodes == 4
    standing = StandingWorld(first.option.layout, 4, "a", (("a", 4),))
    assert policy.decide(replace(inputs, standing=standing)).verdict is PolicyVerdict.STAY
    assert policy.decide(replace(inputs, pools=(spot("a"),))).verdict is PolicyVerdict.PAUSE


def spot(place: str, *, held: int = 0, offered: int = 0, usd: float = 1.0, life_h: float = 10.0) -> PoolView:
    return PoolView(place, place, Market.SPOT, usd, held=held, offered=offered, life_s=life_h * HOUR_S)


def linear() -> tuple[Candidate, ...]:
    return tuple(Candidate(f"DP{nodes}", nodes, 8.0 / nodes, 1_000) for nodes in range(1, 9))


def gang(**changes: object) -> PolicyInputs:
    """One node of work that takes ten hours, two places and on-demand nodes."""
    bought = PoolView("on-demand", "on-demand", Market.ON_DEMAND, 5.0, offered=1)
    inputs = PolicyInputs(
        (spot("dear", offered=1, usd=2.0), spot("cheap", offered=1, usd=1.0), bought),
        (Candidate("gang", 1, 1.0, 1),),
        5.0,
        had=(PriceHad(1.03, 0.6, 2 * HOUR_S), PriceHad(2.06, 0.9, 0.5 * HOUR_S)),
        goal=Goal(tokens_left=10 * HOUR_S, deadline_in_s=20 * HOUR_S),
        knobs=PolicyKnobs(start_s=600.0, spares_max=0),
    )
    return replace(inputs, **changes)


def test_with_time_to_spare_only_the_cheap_place_is_taken() -> None:
    chosen = decide(gang()).option
    assert chosen is not None and chosen.place == "cheap"
    without = gang(pools=(spot("dear", offered=1, usd=2.0), gang().pools[2]))
    assert decide(without).verdict is PolicyVerdict.PAUSE


def test_with_little_time_to_spare_the_dear_place_is_taken_too() -> None:
    late = gang(
        pools=(spot("dear", offered=1, usd=2.0), gang().pools[2]),
        goal=Goal(tokens_left=10 * HOUR_S, deadline_in_s=12.5 * HOUR_S),
    )
    chosen = decide(late).option
    assert chosen is not None and chosen.place == "dear"


def test_who_has_less_time_to_wait_than_a_cheap_place_stays_away_takes_the_dear_one() -> None:
    """The cheap place is there for longer than the job needs it; it has just gone, for two hours as a rule."""
    inputs = gang(pools=(spot("dear", offered=1, usd=2.0), gang().pools[2]))
    for spare_h, wanted in ((40.0, None), (1.5, "dear")):
        # Two hours of work are left.
        goal = Goal(tokens_left=2 * HOUR_S, tokens_done=8 * HOUR_S, deadline_in_s=(2 + spare_h) * HOUR_S)
        chosen = decide(replace(inputs, goal=goal, had=(PriceHad(1.03, 0.99, 2 * HOUR_S), PriceHad(2.06, 1.0, 0.0))))
        assert (chosen.option.place if chosen.option else None) == wanted, spare_h


def test_the_less_time_is_left_to_wait_the_more_an_hour_is_worth_and_never_more_than_on_demand() -> None:
    had = (PriceHad(1.0, 0.8, 2 * HOUR_S), PriceHad(2.0, 1.0, 0.25 * HOUR_S))
    worth = []
    for spare_h in (0.2, 0.5, 1.0, 2.0, 4.0, 8.0, 40.0):
        inputs = gang(goal=Goal(tokens_left=2 * HOUR_S, deadline_in_s=(2 + spare_h) * HOUR_S), had=had)
        usd, reason = value_of_token(inputs, curve_of(inputs.candidates))
        worth.append(usd * HOUR_S)
        assert "of the time left" in reason
    assert worth == sorted(worth, reverse=True)
    assert worth[0] <= 5.0 * WAIT_FACTOR and worth[-1] == pytest.approx(1.0 * WAIT_FACTOR, rel=1e-3)


def test_on_demand_is_bought_when_only_it_ends_in_time() -> None:
    last_moment = gang(goal=Goal(tokens_left=10 * HOUR_S, deadline_in_s=10 * HOUR_S + 640))
    chosen = decide(last_moment).option
    assert chosen is not None and chosen.place == "on-demand"


def test_a_deadline_that_cannot_be_met_and_a_budget_that_is_spent_are_said() -> None:
    late = decide(gang(goal=Goal(tokens_left=10 * HOUR_S, deadline_in_s=9 * HOUR_S)))
    assert "missed by 1 h" in late.alert and late.option is not None
    spent = decide(gang(goal=Goal(budget_left_usd=0.0)))
    assert spent.verdict is PolicyVerdict.PAUSE and "budget" in spent.alert


def test_on_demand_is_not_given_back_before_the_patience_is_over() -> None:
    standing = StandingWorld("gang", 1, "on-demand", (("on-demand", 1),))
    bought = replace(gang().pools[2], held=1, offered=0)
    inputs = gang(
        pools=(gang().pools[1], bought),
        standing=standing,
        served_s=60.0,
        goal=Goal(tokens_left=10 * HOUR_S, deadline_in_s=14 * HOUR_S, usd_per_mtok=6e6 / HOUR_S),
        knobs=PolicyKnobs(start_s=600.0, spares_max=0, patience_s=900.0),
    )
    assert decide(inputs).verdict is PolicyVerdict.STAY
    # What the job runs on is kept until the other is up.
    assert dict(decide(replace(inputs, served_s=901.0)).hold) == {"cheap": 1, "on-demand": 1}


def test_reproducible_jobs_keep_their_tensor_parallel_degree() -> None:
    layouts = (
        Candidate("TP2xPP1", 2, 4.0, 1_000),
        Candidate("TP2xPP2", 4, 2.0, 1_000),
        Candidate("PP4", 4, 1.0, 1_000),
    )
    standing = StandingWorld("TP2xPP1", 2, "a", (("a", 2),))
    inputs = PolicyInputs((spot("a", held=4),), layouts, 3.0, standing=standing)
    free = decide(inputs).option
    assert free is not None and free.layout == "PP4"
    kept = decide(replace(inputs, knobs=PolicyKnobs(is_reproducible=True))).option
    assert kept is not None and kept.layout == "TP2xPP2"


def test_too_many_pools_are_refused_by_number() -> None:
    with pytest.raises(ValueError, match="pools: at most 256, are 257"):
        PolicyInputs(tuple(spot(f"p{index}") for index in range(257)), (), 1.0)


def bounded(goal: Goal, *, on: int | None = None, offered: int = 8) -> PolicyInputs:
    """Linear layouts on up to eight nodes of one place; a token is worth twice what it costs on one."""
    standing = None if on is None else StandingWorld(f"DP{on}", on, "a", (("a", on),))
    pools = (spot("a", held=8, offered=offered, life_h=inf),)
    curved = tuple(Candidate(f"DP{nodes}", nodes, 8.0 / nodes**0.7, 1_000) for nodes in range(1, 9))
    worth = 2.0 / (1_000 / 8 * HOUR_S) * 1e6
    return PolicyInputs(pools, curved, 3.0, standing=standing, goal=replace(goal, usd_per_mtok=worth))


def needs_h(inputs: PolicyInputs, nodes: int) -> float:
    return inputs.goal.tokens_left / inputs.candidates[nodes - 1].tokens_per_s / HOUR_S


@settings(max_examples=80, deadline=None)
@given(
    tokens=st.floats(1e5, 1e8),
    deadline_s=st.floats(1e3, 1e6),
    budget=st.floats(0.1, 1e3),
    on=st.none() | st.integers(1, 8),
)
def test_a_budget_is_kept_where_any_number_of_nodes_keeps_it_and_then_the_deadline(tokens, deadline_s, budget, on):
    inputs = bounded(Goal(tokens_left=tokens, deadline_in_s=deadline_s, budget_left_usd=budget), on=on)
    best = decide(inputs).best
    if best is None:
        return
    affordable = [n for n in range(1, 9) if needs_h(inputs, n) * n <= 0.95 * budget]
    both = [n for n in affordable if needs_h(inputs, n) * HOUR_S <= 0.95 * deadline_s]
    if affordable:
        assert needs_h(inputs, best.nodes) * best.usd_per_hour <= budget * (1 + 1e-9)
    if both:
        assert needs_h(inputs, best.nodes) * HOUR_S <= deadline_s * (1 + 1e-9)


def test_a_job_with_little_time_takes_more_nodes_than_their_tokens_are_worth() -> None:
    loose = bounded(Goal(tokens_left=1e6, deadline_in_s=10 * needs_h(bounded(Goal(tokens_left=1e6)), 1) * HOUR_S))
    tight = replace(loose, goal=replace(loose.goal, deadline_in_s=1.1 * needs_h(loose, 6) * HOUR_S))
    assert [made.best.nodes for made in map(decide, (loose, tight)) if made.best is not None] == [3, 6]
    poor = replace(tight, goal=replace(tight.goal, budget_left_usd=1.1 * needs_h(tight, 2) * 2))
    found = decide(poor).best
    assert found is not None and found.nodes == 2, "a budget is a bound, a deadline a wish"


def test_other_nodes_of_the_same_layout_cost_a_change_and_must_gain_as_much_as_another_layout() -> None:
    pools = (replace(spot("x", held=2, usd=1.0), place="a"), replace(spot("y", held=2, usd=0.99), place="a"))
    inputs = PolicyInputs(
        pools,
        (Candidate("DP2", 2, 4.0, 1_000, change_s=5.0),),
        3.0,
        standing=StandingWorld("DP2", 2, "a", (("x", 2),)),
        goal=Goal(usd_per_mtok=10.0),
        knobs=PolicyKnobs(gain_min=0.05, spares_max=0),
    )
    assert dict(decide(inputs).hold) == {"x": 2}
    assert dict(decide(replace(inputs, pools=(pools[0], replace(pools[1], usd_per_hour=0.1)))).hold) == {"y": 2}
    free = replace(inputs, knobs=replace(inputs.knobs, gain_min=0.0))
    # Eight hundredths of a cent an hour are saved, and 5 s in ten hours are lost, worth twelve.
    assert dict(decide(replace(free, pools=(pools[0], replace(pools[1], usd_per_hour=0.9996)))).hold) == {"x": 2}


def test_a_loss_costs_the_same_however_many_nodes_could_be_bought() -> None:
    """Eight nodes of ours are there, and this job uses all: a loss of one always hits it."""
    eight = linear()[-1]
    busy = replace(eight, change_s=20.0)
    curve = curve_of((*linear()[:-1], busy))
    ours = replace(spot("a", held=8), acquire_s=120.0, at_risk=8)
    costs = {tokens_of_one_loss(curve, busy, 0, replace(ours, offered=offered)) for offered in (0, 4, 12)}
    assert len(costs) == 1
    assert costs.pop() == pytest.approx(tokens_of_one_loss(curve, busy, 0, replace(ours, at_risk=None)))
    assert tokens_of_one_loss(curve, busy, 0, replace(ours, at_risk=16)) < tokens_of_one_loss(curve, busy, 0, ours)
    # What would be bought is then among those that may go.
    assert tokens_of_one_loss(curve, busy, 0, replace(ours, held=0, at_risk=0, offered=8)) > 0


@pytest.mark.parametrize(("others", "grows"), [(392, True), (0, False)], ids=["shared by many", "its own"])
def test_losses_that_take_the_nodes_of_others_keep_no_job_from_growing(others: int, grows: bool) -> None:
    """The pool loses a node a minute, and a change costs 40 s. Of 400 nodes one of the job's own eight goes every fifty
    minutes, of eight every minute: then what is built is lost before it has paid."""
    pool = PoolView("spot", "a", Market.SPOT, 1.0, held=4, offered=4, life_s=60.0, at_risk=8 + others)
    layouts = tuple(Candidate(f"DP{nodes}", nodes, 8.0 / nodes, 1_000, change_s=40.0) for nodes in (4, 8))
    asked = PolicyInputs(
        pools=(pool,),
        candidates=layouts,
        usd_per_hour_on_demand=4.0,
        standing=StandingWorld("DP4", 4, "a", (("spot", 4),)),
        knobs=PolicyKnobs(spares_max=0),
    )
    best = decide(asked).best or decide(asked).option
    assert best is not None and (best.layout == "DP8") is grows


def test_no_dearer_nodes_are_wanted_for_a_deadline_that_cannot_be_met() -> None:
    """Ten hours of work, where a start takes ten minutes."""
    for left_h, place in ((9.9, "on-demand"), (10.1, "on-demand"), (9.0, "cheap"), (-1.0, "cheap")):
        decision = decide(gang(goal=Goal(tokens_left=10 * HOUR_S, deadline_in_s=left_h * HOUR_S)))
        assert decision.option is not None and decision.option.place == place, (left_h, decision.reason)
        assert bool(decision.alert) is (left_h < 10)


@pytest.mark.parametrize("is_priced", [False, True], ids=["have no price", "must not be bought"])
def test_a_job_on_spot_nodes_alone_runs_however_little_time_its_deadline_leaves(is_priced: bool) -> None:
    """Ten hours of work, where a start takes ten minutes."""
    pools, knobs = gang().pools, replace(gang().knobs, on_demand=not is_priced)
    for left_h, alert in (
        (20.0, ""),
        (10.2, ""),
        (10.1, "missed by 0.0667 h, with the time that a start takes"),
        (9.9, "missed by 0.1 h, even on all nodes"),
        (9.0, "missed by 1 h, even on all nodes"),
        (-1.0, "missed by 11 h, even on all nodes"),
    ):
        goal = Goal(tokens_left=10 * HOUR_S, deadline_in_s=left_h * HOUR_S)
        decision = decide(gang(pools=pools if is_priced else pools[:2], knobs=knobs, goal=goal))
        assert decision.option is not None and decision.option.place == "cheap", (left_h, decision.reason)
        assert alert in decision.alert and bool(alert) == bool(decision.alert), left_h


def test_a_job_on_spot_nodes_alone_is_warned_when_a_loss_would_cost_its_deadline() -> None:
    running = gang(
        pools=(spot("cheap", held=1),),
        standing=StandingWorld("gang", 1, "cheap", (("cheap", 1),)),
        goal=Goal(tokens_left=10 * HOUR_S, deadline_in_s=10.1 * HOUR_S),
    )
    decision = decide(running)
    assert decision.verdict is PolicyVerdict.STAY
    assert decision.alert == "the deadline will be missed if nodes are lost: no time is left for another start"
    assert decide(replace(running, goal=replace(running.goal, deadline_in_s=10.2 * HOUR_S))).alert == ""


def test_who_misses_a_deadline_runs_on_what_is_up_until_the_rest_comes_whatever_that_costs() -> None:
    """Three of four nodes are up, and what an hour costs is more than its tokens are worth."""
    dear = PolicyInputs(
        (replace(spot("a", held=3, offered=1, usd=1_000.0), acquire_s=120.0),),
        linear()[:4],
        3.0,
        standing=StandingWorld("DP4", 4, "a", (("a", 4),), is_whole=False),
        goal=Goal(tokens_left=1e7, deadline_in_s=15_000.0, usd_per_mtok=0.001),
    )
    decision = decide(dear)
    assert decision.option is not None and decision.option.utility_usd_per_hour < 0
    assert (decision.verdict, decision.option.layout) == (PolicyVerdict.MOVE, "DP3"), decision.reason
    in_time = decide(replace(dear, goal=replace(dear.goal, deadline_in_s=60_000.0)))
    assert (in_time.verdict, in_time.alert) == (PolicyVerdict.PAUSE, "")


@pytest.mark.parametrize(
    ("left_s", "layout", "hold"),
    [
        (500.0, "DP2", {"a": 2}),  # Nothing else makes a step before.
        (1_000.0, "DP4", {"a": 4}),  # Two more nodes of the place come after 600 s.
        (3_000.0, "DP8", {"b": 8}),  # There are eight elsewhere, and a start takes 1,200 s.
    ],
)
def test_who_misses_a_deadline_on_spot_nodes_alone_does_the_most_until_then(left_s, layout, hold) -> None:
    layouts = tuple(replace(each, change_s=60.0) for each in linear())
    decision = decide(
        PolicyInputs(
            (replace(spot("a", held=2, offered=2), acquire_s=600.0), spot("b", held=8, usd=5.0)),
            layouts,
            3.0,
            standing=StandingWorld("DP2", 2, "a", (("a", 2),)),
            goal=Goal(tokens_left=1e9, deadline_in_s=left_s),
            knobs=PolicyKnobs(start_s=1_200.0, spares_max=0),
        )
    )
    assert decision.best is not None and decision.best.layout == layout, decision.reason
    assert dict(decision.best.hold) == hold
