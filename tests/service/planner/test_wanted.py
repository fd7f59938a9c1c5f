"""What a job should have, by its policy: spares, what to buy, on demand until spot is back, one place of several."""

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from service.planner.decision import decide
from service.planner.goals import Alert, Remaining
from service.planner.inputs import PlanInputs, PlannerDecision, PlannerVerdict, PlanNode, PoolMarket
from service.planner.losses import loss_plans, spares, standing_plans
from service.planner.weighing.wanted import WantedCapacity
from service.policy.types import Market
from tests.service.planner.test_decision import job, started
from tests.service.planner.test_worth import MARGIN, fleet

STEPS = (("TP1xPP2xDP1", 1.0), ("TP1xPP4xDP1", 0.6))
DAY_S, HOUR_S = 86_400.0, 3_600.0
RICH = 20 * MARGIN


def market(pool: str = "a", usd: float = 1.0, *, offered: int = 8, life_s: float | None = DAY_S, **more) -> PoolMarket:
    return PoolMarket(pool, usd, 3.0, life_s, offered=offered, on_demand_offered=4, **more)


def weighing(*nodes: PlanNode, markets: tuple[PoolMarket, ...] = (market(),), **policy) -> PlanInputs:
    """A job for two or four nodes that has run on both."""
    rules = {"usd_per_mtok": RICH, "gain_min": 0.0} | policy
    spec = job(layouts={"allowed": ["PP4", "PP2"]}, nodes={"min": 2, "max": 4}, policy=rules)
    return PlanInputs(spec, nodes, step_seconds=STEPS, markets=markets)


def want(decision: PlannerDecision) -> WantedCapacity:
    assert decision.wanted is not None, decision.reason
    return decision.wanted


def held(decision: PlannerDecision) -> dict[tuple[str, Market], tuple[int, int]]:
    return {(each.pool, each.market): (each.held, each.hold) for each in want(decision).pools}


def zoned(zone: str, pool: str, *names: str, usd: float = 1.0) -> tuple[PlanNode, ...]:
    return tuple(PlanNode(name, 1, zone=zone, pool=pool, usd_per_hour=usd) for name in names)


def test_a_job_without_a_policy_wants_nothing_and_is_decided_as_before():
    spec = job(layouts={"allowed": ["PP4", "PP2"]}, nodes={"min": 2, "max": 4})
    nodes = fleet(*"abcdef")
    plain = PlanInputs(spec, nodes, step_seconds=STEPS)
    for inputs in (plain, replace(plain, markets=(market(),))):
        decision = decide(inputs)
        assert decision.wanted is None and decision.target is not None and len(decision.target.node_ids()) == 4
        assert decision.reason == "start TP1xPP4xDP1 on 4 of 6 nodes, 0.6 s measured per step"


def test_missing_nodes_are_wanted_and_until_they_come_the_job_runs_on_what_is_up():
    decision = decide(weighing(*fleet("a", "b", "c")))
    assert decision.target is not None and decision.target.node_ids() == ("a", "b")
    assert (want(decision).layout, want(decision).nodes, want(decision).gives_back) == ("TP1xPP4xDP1", 4, ())
    assert held(decision) == {("a", Market.SPOT): (3, 4)}
    assert "wanted: 1 of pool a" in decision.reason
    nothing = decide(weighing(*fleet("a")))
    assert nothing.verdict is PlannerVerdict.SUSPEND and held(nothing) == {("a", Market.SPOT): (1, 4)}
    assert "wanted: 3 of pool a" in nothing.reason


def test_a_job_that_lost_every_node_still_knows_what_to_buy():
    gone = replace(started(weighing(*fleet(*"abcd"))), nodes=(), world=None)
    assert held(decide(gone)) == {("a", Market.SPOT): (0, 4)}


def test_spares_are_held_where_losses_would_cost_more_than_they_do_and_the_rest_may_be_given_back():
    six = weighing(*fleet(*"abcdef"), acquire_s=1_800, usd_per_mtok=2 * MARGIN)
    calm = decide(six)
    assert want(calm).spares == 0 and want(calm).gives_back == ("e", "f")
    assert "no use for e, f, which may be given back" in calm.reason
    often = (market(life_s=600.0, group_sizes=((1, 0.5), (2, 0.5))),)
    stormy = decide(replace(six, markets=often))
    assert want(stormy).spares == 2 and want(stormy).gives_back == ()
    assert "2 spares are held, for losses that take 1800 s to replace" in stormy.reason
    assert stormy.target is not None and len(stormy.target.node_ids()) == 4
    few = decide(weighing(*fleet(*"abcdef"), markets=often, acquire_s=1_800, spares_max=1, usd_per_mtok=2 * MARGIN))
    assert (want(few).spares, want(few).gives_back) == (1, ("f",))
    quick = decide(weighing(*fleet(*"abcdef"), markets=often, acquire_s=0, usd_per_mtok=2 * MARGIN))
    assert want(quick).spares == 0, "what is had again at once needs no spare"


def test_nodes_that_the_job_is_about_to_leave_are_given_back_only_when_it_has_left_them():
    """Four nodes bring hardly more than two, so that it leaves two of them."""
    flat = (("TP1xPP2xDP1", 1.0), ("TP1xPP4xDP1", 0.99))
    inputs = replace(weighing(*fleet(*"abcd"), usd_per_mtok=MARGIN), step_seconds=STEPS)
    four = replace(started(replace(inputs, job=weighing(usd_per_mtok=RICH).job)), job=inputs.job, step_seconds=flat)
    leaving = decide(four)
    assert leaving.verdict is PlannerVerdict.MOVE and want(leaving).gives_back == ()
    left = decide(started(four))
    assert left.verdict is PlannerVerdict.STAY and want(left).gives_back == ("c", "d")


def test_on_demand_nodes_are_wanted_where_spot_has_none_and_only_where_they_may_be():
    short = market(offered=0)
    two = weighing(*fleet("a", "b"), markets=(short,))
    assert held(decide(two)) == {("a", Market.SPOT): (2, 2), ("a", Market.ON_DEMAND): (0, 2)}
    assert "wanted: 2 of pool a on demand" in decide(two).reason
    without = decide(weighing(*fleet("a", "b"), markets=(short,), on_demand=False))
    assert held(without) == {("a", Market.SPOT): (2, 2)}
    poor = decide(weighing(*fleet("a", "b"), markets=(short,), usd_per_mtok=0.5))
    assert held(poor) == {("a", Market.SPOT): (2, 2)}, "further tokens are not worth what on-demand nodes cost"


def test_on_demand_nodes_serve_out_the_patience_before_spot_takes_over():
    bought = fleet("x", "y", usd=3.0, pool="bought")
    spot = fleet("a", "b")
    markets = (market(), PoolMarket("bought", 3.0, 3.0))
    spec = job(
        layouts={"allowed": ["PP2"]},
        nodes={"min": 2, "max": 2},
        policy={"usd_per_mtok": RICH, "patience_s": 900, "gain_min": 0.0},
    )
    first = started(PlanInputs(spec, bought, step_seconds=STEPS, markets=markets))
    both = replace(first, nodes=(*bought, *spot))
    assert decide(replace(both, served_s=0.0)).verdict is PlannerVerdict.STAY
    after = decide(both)
    assert after.target is not None and after.target.node_ids() == ("a", "b")
    assert replace(both, served_s=0.0).digest() != both.digest()


def test_a_world_within_one_zone_goes_where_price_and_lifetime_are_best():
    cheap, dear = zoned("z1", "p", "a", "b"), zoned("z2", "q", "c", "d", usd=1.5)
    markets = (market("p", 1.0, offered=0), market("q", 1.5, offered=0))
    inputs = weighing(*cheap, *dear, markets=markets, within="zone")
    first = decide(inputs)
    assert first.target is not None and first.target.node_ids() == ("a", "b")
    brief = (market("p", 1.0, offered=0, life_s=60.0), markets[1])
    lasting = decide(replace(inputs, markets=brief))
    assert lasting.target is not None and lasting.target.node_ids() == ("c", "d")
    four = decide(weighing(*cheap, *dear, markets=markets))
    assert four.target is not None and len(four.target.node_ids()) == 4, "without `within` a world may lie in both"


def test_a_change_of_place_is_made_when_it_gains_enough_and_says_what_it_costs():
    cheap, dear = zoned("z1", "p", "a", "b"), zoned("z2", "q", "c", "d", usd=4.0)
    markets = (market("p", 1.0, offered=0), market("q", 4.0, offered=0, egress_usd_per_gb=0.02))
    start = weighing(*dear, markets=markets, within="zone", start_s=120)
    inputs = replace(started(start), nodes=(*dear, *cheap))
    moves = decide(inputs)
    assert moves.target is not None and moves.target.node_ids() == ("a", "b")
    assert "moves from z2 to z1, which costs 120 s of training and 0.00 USD of egress" in moves.reason
    far = (markets[0], replace(markets[1], egress_usd_per_gb=1e6))
    assert decide(replace(inputs, markets=far)).verdict is PlannerVerdict.STAY


def test_no_plan_and_no_spare_takes_a_world_into_two_zones_before_anything_was_measured_either():
    nodes = (*zoned("z1", "p", "a", "b", "c"), *zoned("z2", "p", "d", "e"))
    for steps in ((), STEPS):
        inputs = started(replace(weighing(*nodes, within="zone"), step_seconds=steps))
        assert inputs.world is not None and set(inputs.world.node_ids()) <= {"a", "b", "c"}
        assert set(spares(inputs)) <= {"a", "b", "c"}
        zones = {node.node_id: node.zone for node in nodes}
        for plan in standing_plans(inputs):
            assert plan.target is None or len({zones[name] for name in plan.target.node_ids()}) == 1
        assert all(each.layout in (None, "TP1xPP2xDP1") for each in loss_plans(inputs))


def test_a_deadline_makes_the_job_want_what_ends_in_time_and_what_is_up_cannot_is_said():
    poor = weighing(*fleet("a", "b"), usd_per_mtok=0.22)
    assert want(decide(poor)).nodes == 2
    in_time = replace(poor, remaining=Remaining(steps=3_600, deadline_in_s=0.8 * HOUR_S))
    late = decide(in_time)
    assert want(late).nodes == 4 and late.alerts == (Alert.LATE,)
    assert late.target is not None and len(late.target.node_ids()) == 2, "until the others come it runs on two"
    assert decide(replace(in_time, nodes=fleet(*"abcd"))).alerts == ()


def test_what_gains_enough_in_money_is_moved_to_although_its_step_gains_less():
    spec = job(layouts={"allowed": ["PP2", "DP2"]}, nodes={"min": 2, "max": 2}, policy={"usd_per_mtok": 0.27})
    alone = PlanInputs(spec, fleet("a", "b"), step_seconds=(("TP1xPP2xDP1", 1.0),), markets=(market(offered=0),))
    first = started(replace(alone, job=spec.model_copy(update={"layouts": job(layouts={"allowed": ["PP2"]}).layouts})))
    both = replace(first, job=spec, step_seconds=(("TP1xPP2xDP1", 1.0), ("TP1xPP1xDP2", 0.98)))
    # 2 % of the tokens are 6 % of what they bring beyond the price of the nodes.
    moved = decide(both)
    assert moved.verdict is PlannerVerdict.MOVE, moved.reason


@settings(deadline=None, max_examples=60)
@given(
    names=st.integers(2, 7),
    worth=st.floats(0.1, 40),
    life_s=st.floats(60, DAY_S),
    spares_max=st.integers(0, 3),
)
def test_more_capacity_never_lowers_what_the_wanted_option_is_worth(names, worth, life_s, spares_max):
    def at(count: int) -> PlannerDecision:
        nodes = fleet(*(f"n{each}" for each in range(count)))
        calm = market(offered=2, life_s=life_s)
        return decide(
            weighing(*nodes, markets=(calm,), usd_per_mtok=worth * MARGIN, spares_max=spares_max, on_demand=False)
        )

    fewer, more = at(names).wanted, at(names + 1).wanted
    if fewer is not None:
        assert more is not None
        least = fewer.usd_per_hour_worth
        assert more.usd_per_hour_worth >= least - 1e-9 * abs(least)


def test_a_pool_that_runs_short_makes_no_loss_dearer():
    """Nobody knows how many nodes could be bought: that changes what is wanted, and not what losses take."""
    worth = set()
    for offered in (0, 8):
        stormy = market(offered=offered, life_s=600.0, ours=4)
        four = weighing(*fleet(*"abcd"), markets=(stormy,), on_demand=False, spares_max=0)
        worth.add(want(decide(four)).usd_per_hour_worth)
    assert len(worth) == 1


def test_a_deadline_that_is_over_is_protected_no_longer_neither_by_prices_nor_by_nodes_on_demand():
    over = Remaining(steps=3_600, deadline_in_s=-HOUR_S)
    for on_demand in (False, True):
        inputs = replace(weighing(*fleet("a", "b"), on_demand=on_demand), remaining=over)
        decision = decide(inputs)
        assert held(decision) == {("a", Market.SPOT): (2, 4)}, decision.reason
        assert decision.alerts == (Alert.LATE,) and "its deadline has passed" in decision.reason
        assert "worth their price" in decision.reason and "goes on" not in decision.reason


def test_a_deadline_that_spot_nodes_alone_do_not_keep_is_said_and_they_are_wanted_all_the_same():
    """Four nodes need 2160 s, and a start takes 600 s."""
    inputs = replace(
        weighing(*fleet(*"abcd"), on_demand=False, start_s=600), remaining=Remaining(steps=3_600, deadline_in_s=2_400)
    )
    decision = decide(inputs)
    assert held(decision) == {("a", Market.SPOT): (4, 4)}, decision.reason
    assert decision.alerts == (Alert.LATE,) and "goes on" not in decision.reason
    assert decision.reason.endswith("the deadline will be missed by 0.1 h, with the time that a start takes")
    in_time = decide(replace(inputs, remaining=Remaining(steps=3_600, deadline_in_s=4_000)))
    assert in_time.alerts == () and held(in_time) == {("a", Market.SPOT): (4, 4)}


def test_on_demand_nodes_are_wanted_for_a_deadline_also_where_no_spot_node_was_ever_lost():
    never = weighing(*fleet(*"abcd"), markets=(market(life_s=None),), start_s=600)
    decision = decide(replace(never, remaining=Remaining(steps=3_600, deadline_in_s=2_400)))
    assert held(decision)[("a", Market.ON_DEMAND)] == (0, 4), decision.reason


def test_a_job_that_waits_for_better_nodes_says_so_and_not_that_it_moves():
    """It has lost one of its nodes, and the others cost more than they bring. Cheap ones could be bought."""
    dear = fleet(*"abcd", usd=400.0, pool="dear")
    markets = (market("cheap", 1.0), PoolMarket("dear", 400.0, 600.0, DAY_S))
    rich = weighing(*dear, markets=markets, within="pool", usd_per_mtok=1_000 * RICH)
    plain = weighing(*dear, markets=markets, within="pool", usd_per_mtok=RICH)
    decision = decide(replace(started(rich), job=plain.job, nodes=dear[:3]))
    assert held(decision)[("cheap", Market.SPOT)] == (0, 4), decision.reason
    assert decision.target is not None and set(decision.target.node_ids()) <= {"a", "b", "c"}
    assert "the policy waits for TP1xPP4xDP1 on 4 nodes, and the job goes on" in decision.reason
    assert "wants to move from dear to cheap" in decision.reason and "; moves from" not in decision.reason
    assert "no number of nodes is worth its price" not in decision.reason


def test_a_spent_budget_is_the_reason_and_no_price_is():
    decision = decide(replace(weighing(*fleet(*"abcd")), remaining=Remaining(steps=3_600, usd=0.0)))
    assert "the budget is spent, and the job goes on" in decision.reason
    assert "worth its price" not in decision.reason


def test_more_pools_than_a_policy_may_be_asked_about_leave_those_that_the_job_is_in_and_those_with_most_nodes():
    few = [PlanNode(f"few{at:03}", 1, zone=f"z{at:03}", pool="a", usd_per_hour=1.0) for at in range(140)]
    mine, many = zoned("z998", "a", "mine0", "mine1"), zoned("z999", "a", *(f"many{at}" for at in range(4)))
    first = started(weighing(*mine, within="zone", spares_max=0))
    decision = decide(replace(first, nodes=(*few, *mine, *many)))
    assert decision.target is not None and set(decision.target.node_ids()) == {f"many{at}" for at in range(4)}
    assert want(decision).place == "z999" and len(want(decision).pools) == 128
    assert "few139" not in want(decision).gives_back, "nothing was asked about it"
    assert {"few000", "few125"} <= set(want(decision).gives_back)


def test_nodes_on_demand_in_a_pool_of_their_own_end_the_want_and_the_reason_says_that_they_need_one():
    markets = (market(offered=0), PoolMarket("bought", 3.0, 3.0, offered=8, on_demand_offered=4))
    needs = "nodes on demand count as such in a pool of their own, with the on-demand price as its price"
    before = decide(weighing(*fleet("a", "b"), markets=markets[:1]))
    assert "wanted: 2 of pool a on demand" in before.reason and needs in before.reason
    after = decide(weighing(*fleet("a", "b"), *fleet("x", "y", usd=3.0, pool="bought"), markets=markets))
    assert held(after) == {("a", Market.SPOT): (2, 2), ("bought", Market.ON_DEMAND): (2, 2)}
    assert needs not in after.reason and "wanted:" not in after.reason
