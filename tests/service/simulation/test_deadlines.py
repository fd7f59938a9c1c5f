"""Jobs with a deadline in several places: what moves cost, that every moment and dollar is in the ledger once, and that
no run is cheaper than the bound."""

from itertools import pairwise
from math import inf

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from service.policy.choosing import UtilityPolicy
from service.policy.plain_policies import UniformProgressPolicy
from service.policy.types import Policy, PolicyKnobs
from service.simulation.deadline_bound import least_cost_usd
from service.simulation.deadline_replay import DeadlineRun, SpentOn, replay
from service.simulation.moving import Link, MoveCosts, free_moves, moves_between
from service.simulation.places import DeadlineJob, PlaceSeries

TICK_S, HOUR_S = 600.0, 3_600.0
POLICIES: tuple[Policy, ...] = (UtilityPolicy(), UniformProgressPolicy())
NAMES = ("a", "b", "c")


@st.composite
def series(draw: st.DrawFn) -> PlaceSeries:
    ticks, places = draw(st.integers(20, 60)), NAMES[: draw(st.integers(1, 3))]
    spells = st.lists(st.tuples(st.booleans(), st.integers(1, 20)), min_size=1, max_size=6)
    rows = []
    for _ in places:
        row = [int(is_up) for is_up, length in draw(spells) for _ in range(length)]
        rows.append(tuple((row * ticks)[:ticks]))
    usd = tuple((draw(st.floats(0.5, 4.0)),) * ticks for _ in places)
    return PlaceSeries(TICK_S, places, tuple(rows), usd, 5.0)


@st.composite
def jobs(draw: st.DrawFn, places: int) -> DeadlineJob:
    moves = None
    if draw(st.booleans()):
        size = places + 1
        usd, seconds = (
            tuple(
                tuple(0.0 if at == other else draw(costs) for other in range(size)) for at in range(size)
            )
            for costs in (st.sampled_from([0.0, 0.3, 4.0]), st.sampled_from([0.0, 45.0, 900.0]))
        )  # fmt: skip
        moves = MoveCosts(usd, seconds)
    start_s = draw(st.sampled_from([0.0, 300.0, 700.0]))
    return DeadlineJob(draw(st.integers(600, 6 * 3_600)), draw(st.integers(3_600, 9 * 3_600)), start_s, moves=moves)


def run_of(found: PlaceSeries, job: DeadlineJob, policy: Policy, begin: int = 0) -> DeadlineRun:
    return replay(found, job, policy, begin=begin, knobs=PolicyKnobs())


@settings(max_examples=60, deadline=None)
@given(st.data(), series(), st.sampled_from(POLICIES))
def test_the_ledger_has_every_moment_once_and_its_dollars_are_those_of_the_run(data, found, policy) -> None:
    job = data.draw(jobs(len(found.places)))
    run = run_of(found, job, policy)
    timed = [row for row in run.ledger if row.what is not SpentOn.EGRESS]
    assert timed[0].begin_s == 0
    assert all(one.end_s == pytest.approx(other.begin_s) for one, other in pairwise(timed))
    end_s = min(job.deadline_s, found.ticks * TICK_S) if run.is_missed else run.done_at_s
    assert timed[-1].end_s == pytest.approx(end_s)
    assert sum(row.usd for row in run.ledger) == pytest.approx(run.usd)
    worked_s = sum(row.end_s - row.begin_s for row in timed if row.what is SpentOn.WORK)
    assert run.is_missed or worked_s == pytest.approx(job.work_s)
    assert run.idle_s == pytest.approx(sum(row.end_s - row.begin_s for row in timed if row.what is SpentOn.IDLE))


@settings(max_examples=60, deadline=None)
@given(st.data(), series(), st.sampled_from(POLICIES))
def test_no_run_is_cheaper_than_the_bound_and_moves_that_cost_never_lower_it(data, found, policy) -> None:
    job = data.draw(jobs(len(found.places)))
    run, least = run_of(found, job, policy), least_cost_usd(found, job)
    free = DeadlineJob(job.work_s, job.deadline_s, job.start_s)
    assert least >= least_cost_usd(found, free) - 1e-6
    assert run.is_missed or run.usd >= least - 1e-6


def two_places(*, dear_until: int, ticks: int = 90) -> PlaceSeries:
    """`cheap` comes after so many ticks, at 1 USD per hour; `dear` costs 2 and is there all the time."""
    offered = (tuple(int(tick >= dear_until) for tick in range(ticks)), (1,) * ticks)
    return PlaceSeries(TICK_S, ("cheap", "dear"), offered, ((1.0,) * ticks, (2.0,) * ticks), 6.0)


def moving(usd: float, seconds: float = 0.0) -> MoveCosts:
    table = [tuple(tuple(0.0 if at == to else each for to in range(3)) for at in range(3)) for each in (usd, seconds)]
    return MoveCosts(table[0], table[1])


def test_a_job_moves_for_a_lower_price_only_where_that_pays_for_the_state_on_the_way() -> None:
    """Six of eight hours at half the price save six dollars."""
    found, rows = two_places(dear_until=12), []
    for usd in (0.5, 7.0):
        job = DeadlineJob(8 * HOUR_S, 9 * HOUR_S, 300.0, moves=moving(usd))
        rows.append(run_of(found, job, UtilityPolicy()))
    cheap, dear = rows
    assert [name for name, _ in cheap.places] == ["cheap", "dear"] and cheap.egress_usd == 0.5
    assert [name for name, _ in dear.places] == ["dear"] and dear.egress_usd == 0
    (egress,) = (row for row in cheap.ledger if row.what is SpentOn.EGRESS)
    assert (egress.place, egress.begin_s, egress.end_s) == ("cheap", 12 * TICK_S, 12 * TICK_S)


def test_nodes_wait_for_the_state_as_long_as_the_link_takes_and_are_paid_for() -> None:
    found = two_places(dear_until=12)
    run = run_of(found, DeadlineJob(8 * HOUR_S, 10 * HOUR_S, 300.0, moves=moving(0.5, 240.0)), UtilityPolicy())
    spent = {what: sum(row.end_s - row.begin_s for row in run.ledger if row.what is what) for what in SpentOn}
    assert (spent[SpentOn.MOVING], spent[SpentOn.START]) == (240.0, 600.0)
    assert run.done_at_s == pytest.approx(8 * HOUR_S + 240 + 600 + run.idle_s)
    held_s = dict(run.places)
    assert run.usd == pytest.approx(2.0 * held_s["dear"] / HOUR_S + 1.0 * held_s["cheap"] / HOUR_S + 0.5)


def test_a_first_start_moves_nothing_and_a_state_stays_where_the_job_was_last() -> None:
    """The only place is lost for an hour: it is gone back to for nothing."""
    offered = ((1,) * 6 + (0,) * 6 + (1,) * 60,)
    found = PlaceSeries(TICK_S, ("a",), offered, ((1.0,) * 72,), 6.0)
    table = ((0.0, 9.0), (9.0, 0.0))
    job = DeadlineJob(3 * HOUR_S, 8 * HOUR_S, 0.0, moves=MoveCosts(table, ((0.0, 0.0), (0.0, 0.0))))
    run = run_of(found, job, UtilityPolicy())
    assert (run.moves, run.egress_usd, run.idle_s) == (2, 0.0, HOUR_S)
    assert run.usd == pytest.approx(3.0) and least_cost_usd(found, job) == pytest.approx(3.0, rel=1e-3)


def test_the_longest_way_to_on_demand_nodes_is_kept_free_before_the_deadline() -> None:
    """Spot goes after two hours and on demand lies an hour away: only who left time for that is done in time."""
    offered = ((1,) * 12 + (0,) * 40,)
    found = PlaceSeries(TICK_S, ("a",), offered, ((1.0,) * 52,), 6.0)
    far = MoveCosts(((0.0, 0.0), (0.0, 0.0)), ((0.0, HOUR_S), (HOUR_S, 0.0)))
    run = run_of(found, DeadlineJob(4 * HOUR_S, 6 * HOUR_S, 300.0, moves=far), UtilityPolicy())
    assert not run.is_missed and run.on_demand_s > 0
    assert run.done_at_s <= 6 * HOUR_S


def test_moves_are_costed_by_the_bytes_of_the_state_and_nothing_is_paid_for_staying() -> None:
    def link(source: str, target: str) -> Link:
        return Link(0.01, 4e9) if source[0] == target[0] else Link(0.08, 5e8)

    moves = moves_between(("x1", "x2", "y1"), link, state_bytes=80e9)
    assert moves.usd == ((0.0, pytest.approx(0.8), pytest.approx(6.4)), (pytest.approx(0.8), 0.0, pytest.approx(6.4)),
                         (pytest.approx(6.4), pytest.approx(6.4), 0.0))  # fmt: skip
    assert moves.seconds[0] == (0.0, 20.0, 160.0) and moves.seconds_to(1) == 160.0
    assert free_moves(3).usd == ((0.0,) * 3,) * 3


@pytest.mark.parametrize(
    ("build", "says"),
    [
        (lambda: Link(-0.1), "usd_per_gb must be a number of at least 0, is -0.1"),
        (lambda: Link(0.1, 0.0), "bytes_per_s must be above 0, is 0"),
        (lambda: MoveCosts(((0.0,),), ((0.0, 0.0),)), "between each two of 1 places"),
        (lambda: MoveCosts(((0.0, inf), (0.0, 0.0)), ((0.0, 0.0), (0.0, 0.0))), "a finite number of dollars"),
        (lambda: MoveCosts(((1.0,),), ((0.0,),)), "stays where it is costs nothing"),
        (lambda: DeadlineJob(1, 1, 0, moves=free_moves(2)).moves_of(two_places(dear_until=1)), "between 3 places"),
    ],
)
def test_costs_of_moves_that_cannot_be_are_refused_by_their_field(build, says) -> None:
    with pytest.raises(ValueError, match=says):
        build()
