"""Prices: a job that says what a token is worth leaves nodes that are not worth theirs, and never stops for it."""

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from service.planner.decision import decide
from service.planner.inputs import PlanInputs, PlannerVerdict, PlanNode, PoolMarket
from tests.service.planner.test_decision import job, started

TOKENS = 24 * 128
STEPS = (("TP1xPP2xDP1", 1.0), ("TP1xPP4xDP1", 0.9))
"""Twice the nodes give 11 % more."""


def fleet(*names: str, usd: float | None = 1.0, pool: str = "a") -> tuple[PlanNode, ...]:
    return tuple(PlanNode(name, 1, pool=pool, usd_per_hour=usd) for name in names)


def priced(worth: float | None, **changes) -> PlanInputs:
    """A job on four nodes that cost a dollar an hour each. Two nodes make 3600 steps an hour, four 4000."""
    policy = {"policy": {"usd_per_mtok": worth}} if worth else {}
    rules = job(layouts={"allowed": ["PP4", "PP2"]}, nodes={"min": 2, "max": 4}, **policy)
    first = started(PlanInputs(rules, fleet(*"abcd")))
    return replace(first, step_seconds=STEPS, **changes)


MARGIN = 2.0 / (400 * TOKENS) * 1e6
"""What a million of the further tokens cost: two nodes bring 400 steps an hour."""


def test_nodes_that_bring_less_than_they_cost_are_left_to_others():
    decision = decide(priced(0.8 * MARGIN))
    assert decision.verdict is PlannerVerdict.MOVE and decision.target is not None
    assert (str(decision.target.layout), decision.target.node_ids()) == ("TP1xPP2xDP1", ("a", "b"))
    assert "2 of 4 nodes are worth their price at" in decision.reason
    assert decide(priced(1.3 * MARGIN)).verdict is PlannerVerdict.STAY


def test_without_a_value_a_price_or_a_measured_step_all_nodes_are_taken_that_help():
    cheap = priced(0.8 * MARGIN)
    for inputs in (
        priced(None),
        replace(cheap, step_seconds=()),
        replace(cheap, nodes=(*fleet(*"abc"), *fleet("d", usd=None))),
    ):
        assert decide(inputs).verdict is PlannerVerdict.STAY


def test_a_job_goes_on_where_no_number_of_nodes_is_worth_its_price_and_says_so():
    decision = decide(priced(1e-6, nodes=fleet(*"abc")))
    assert decision.verdict is PlannerVerdict.MOVE and decision.target is not None
    assert "no number of nodes is worth its price at 1e-06 USD per million tokens" in decision.reason


def test_a_job_moves_to_nodes_that_cost_less_and_then_stays():
    rules = job(layouts={"allowed": ["PP2"]}, nodes={"min": 2, "max": 2}, policy={"usd_per_mtok": 10 * MARGIN})
    dear = fleet("a", "b", usd=20.0, pool="dear")
    first = replace(started(PlanInputs(rules, dear)), step_seconds=STEPS)
    moved = replace(first, nodes=(*dear, *fleet("c", "d", pool="cheap")))
    decision = decide(moved)
    assert decision.verdict is PlannerVerdict.MOVE and decision.target is not None
    assert decision.target.node_ids() == ("c", "d")
    assert decide(started(moved)).verdict is PlannerVerdict.STAY


def test_nodes_that_come_back_every_minute_are_not_worth_the_changes_that_they_cost():
    """All four nodes are worth 1.3 times their price while they last; where the pool loses some every few seconds, the
    layout on two, which a loss hits less often, is worth more."""
    lasting, brief = (
        priced(1.3 * MARGIN, markets=(PoolMarket("a", 1.0, 3.0, life_s=life_s, losses=9, watched_h=2.0),))
        for life_s in (20 * 3_600.0, 6.0)
    )
    stays, moves = decide(lasting), decide(replace(brief, world=None))
    assert stays.verdict is PlannerVerdict.STAY
    assert moves.target is not None and len(moves.target.node_ids()) == 2
    assert "next losses expected of a in 0.0017 h, after 9 losses in 2 h" in moves.reason
    bought = decide(replace(brief, world=None, markets=(PoolMarket("a", 1.0, 1.0, life_s=6.0),)))
    assert bought.target is not None and len(bought.target.node_ids()) == 4, (
        "nobody takes back what is bought on demand"
    )


def test_cheaper_nodes_are_left_alone_where_their_losses_would_cost_more_than_they_save():
    rules = job(
        layouts={"allowed": ["PP2"]}, nodes={"min": 2, "max": 2}, policy={"usd_per_mtok": 10 * MARGIN, "gain_min": 0.0}
    )
    dear = fleet("a", "b", usd=1.2, pool="dear")
    first = replace(started(PlanInputs(rules, dear)), step_seconds=STEPS)
    moved = replace(first, nodes=(*dear, *fleet("c", "d", pool="cheap")))
    for life_s, verdict in ((20 * 3_600.0, PlannerVerdict.MOVE), (60.0, PlannerVerdict.STAY)):
        markets = (PoolMarket("cheap", 1.0, 3.0, life_s=life_s), PoolMarket("dear", 1.2, 3.0, life_s=20 * 3_600.0))
        assert decide(replace(moved, markets=markets)).verdict is verdict, life_s


@settings(deadline=None, max_examples=60)
@given(
    worth=st.floats(0.01, 100),
    prices=st.lists(st.floats(0.1, 20), min_size=2, max_size=3),
    pools=st.lists(st.integers(0, 2), min_size=3, max_size=8),
    four=st.floats(0.3, 1.5),
    lives=st.lists(st.none() | st.floats(1.0, 90_000.0), min_size=3, max_size=3),
)
def test_what_was_decided_by_price_is_kept_and_uses_nodes_that_there_are(worth, prices, pools, four, lives):
    """The same facts never move a job twice, within the bounds of its nodes."""
    rules = job(layouts={"allowed": ["PP4", "PP2"]}, nodes={"min": 2, "max": 4}, policy={"usd_per_mtok": worth})
    nodes = tuple(
        PlanNode(f"n{at}", 1, pool=f"p{pool % len(prices)}", usd_per_hour=prices[pool % len(prices)])
        for at, pool in enumerate(pools)
    )
    markets = tuple(
        PoolMarket(f"p{at}", usd, 30.0, life_s) for at, (usd, life_s) in enumerate(zip(prices, lives, strict=False))
    )
    steps = (("TP1xPP2xDP1", 1.0), ("TP1xPP4xDP1", four))
    inputs = PlanInputs(rules, nodes, step_seconds=steps, markets=markets)
    first = decide(inputs)
    assert first.target is not None and 2 <= len(first.target.node_ids()) <= 4
    assert decide(started(inputs)).verdict is PlannerVerdict.STAY
