"""Replays against what could have been had: the order of the bounds, the tiling of the ledger, and that nothing is
decided by chance."""

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from service.policy.choosing import UtilityPolicy
from service.policy.plain_policies import ReactivePolicy
from service.policy.types import Candidate, Goal, Policy, PolicyKnobs
from service.simulation.cluster_replay import POINTS_MAX, ClusterRun, replay_cluster
from service.simulation.comparing import compare
from service.simulation.count_oracles import ideal_tokens, oracle_tokens
from service.simulation.replay_ledger import hours_by_cause, ledger_of
from service.simulation.replay_setup import ReplaySetup, Victims, grid_of, likely_hit
from service.simulation.traces import CapacityTrace, of_counts

ALMOST = 1e-6
POLICIES: tuple[Policy, ...] = (UtilityPolicy(), ReactivePolicy())


@st.composite
def traces(draw: st.DrawFn) -> CapacityTrace:
    counts = draw(st.lists(st.integers(0, 9), min_size=1, max_size=14))
    gaps = draw(st.lists(st.integers(1, 600), min_size=len(counts), max_size=len(counts)))
    times = [float(sum(gaps[:index])) for index in range(len(gaps))]
    return of_counts("random", list(zip(times, counts, strict=True)), times[-1] + 300.0)


@st.composite
def tables(draw: st.DrawFn) -> tuple[Candidate, ...]:
    nodes = draw(st.lists(st.integers(1, 9), min_size=1, max_size=6))
    return tuple(
        Candidate(
            f"PP{index + 1}",
            count,
            step_time_s=draw(st.floats(0.5, 200)),
            tokens_per_step=1_000,
            change_s=draw(st.sampled_from([0.0, 2.0, 30.0, 170.0])),
        )
        for index, count in enumerate(nodes)
    )


setups = st.builds(
    ReplaySetup,
    notice_s=st.sampled_from([0.0, 30.0, 120.0]),
    unannounced_share=st.sampled_from([0.0, 0.3]),
    acquire_s=st.sampled_from([0.0, 120.0]),
    victims=st.sampled_from(list(Victims)),
    counts_steps=st.booleans(),
    checkpoint_every_s=st.sampled_from([0.0, 300.0]),
    seed=st.integers(0, 3),
)
knobs = st.builds(PolicyKnobs, spares_max=st.integers(0, 3), releases=st.booleans())
goals = st.builds(Goal, usd_per_mtok=st.sampled_from([None, 1.0, 1e4]))


@settings(max_examples=60, deadline=None)
@given(traces(), tables(), setups, knobs, goals, st.sampled_from(POLICIES))
def test_nobody_does_better_than_who_knows_more(trace, candidates, setup, knob, goal, policy) -> None:
    run = replay_cluster(trace, candidates, policy, setup=setup, knobs=knob, goal=goal)
    grid = grid_of(trace, setup)
    ideal = ideal_tokens(grid, candidates)
    by_counts = oracle_tokens(grid, candidates, knows_victims=False)
    by_victims = oracle_tokens(grid, candidates, knows_victims=True)
    assert run.ideal_tokens == pytest.approx(ideal)
    assert by_counts <= by_victims * (1 + ALMOST) <= ideal * (1 + ALMOST) ** 2
    assert run.tokens <= by_victims * (1 + ALMOST)
    if setup.victims is Victims.COUNTED and not setup.notice_s:
        assert run.tokens <= by_counts * (1 + ALMOST)


@settings(max_examples=50, deadline=None)
@given(traces(), tables(), setups, knobs, goals, st.sampled_from(POLICIES))
def test_causes_sum_to_the_gap_and_the_ledger_covers_each_lease_once(
    trace, candidates, setup, knob, goal, policy
) -> None:
    run = replay_cluster(trace, candidates, policy, setup=setup, knobs=knob, goal=goal)
    assert sum(tokens for _, tokens in run.tokens_lost_by) == pytest.approx(run.ideal_tokens - run.tokens, abs=1e-3)
    assert all(tokens >= -1e-6 for _, tokens in run.tokens_lost_by)
    for leases in ledger_of(run).values():
        for lease in leases:
            assert all(earlier.ends_at == later.starts_at for earlier, later in pairwise(lease))
    hours = sum(lease.end_s - lease.begin_s for lease in run.leases) / 3_600
    assert sum(hours_by_cause(run).values()) == pytest.approx(hours)
    assert run.usd == pytest.approx(hours * setup.usd_per_hour)


@settings(max_examples=20, deadline=None)
@given(traces(), tables(), setups, st.sampled_from(POLICIES))
def test_the_same_replay_gives_the_same_run(trace, candidates, setup, policy) -> None:
    def run() -> ClusterRun:
        return replay_cluster(trace, candidates, policy, setup=setup)

    assert run() == run()


def linear(change_s: float = 2.0) -> tuple[Candidate, ...]:
    return tuple(Candidate(f"DP{n}", n, 8.0 / n, 1_000, change_s=change_s) for n in range(1, 9))


def test_a_loss_costs_one_change_and_a_trace_without_losses_costs_the_start() -> None:
    setup = ReplaySetup()
    quiet = replay_cluster(of_counts("quiet", [(0.0, 4)], 600.0), linear(), ReactivePolicy(), setup=setup)
    assert quiet.tokens == pytest.approx(4 * 125 * 598)
    lossy = replay_cluster(of_counts("lossy", [(0.0, 4), (300.0, 3)], 600.0), linear(), ReactivePolicy(), setup=setup)
    assert lossy.tokens == pytest.approx(4 * 125 * 298 + 3 * 125 * 298)
    assert lossy.changes == 2


def test_a_loss_that_nobody_announced_costs_the_step_it_interrupts() -> None:
    trace = of_counts("lossy", [(0.0, 4), (317.0, 3)], 600.0)
    slow = tuple(Candidate(f"DP{n}", n, 400.0 / n, 1_000, change_s=2.0) for n in range(1, 9))
    told = ReplaySetup(counts_steps=True, notice_s=120.0)
    untold = ReplaySetup(counts_steps=True, notice_s=120.0, unannounced_share=1.0, detect_s=5.0)
    run = dict(replay_cluster(trace, slow, ReactivePolicy(), setup=told).tokens_lost_by)
    silent = dict(replay_cluster(trace, slow, ReactivePolicy(), setup=untold).tokens_lost_by)
    assert run["lost_work"] == 0
    assert silent["lost_work"] == pytest.approx((315 % 100) * 10)


def test_nodes_that_buy_nothing_are_given_back_and_nodes_that_do_are_kept() -> None:
    flat = (Candidate("DP2", 2, 1.0, 1_000), Candidate("DP8", 8, 0.999, 1_000))
    trace = of_counts("steady", [(0.0, 8)], 6 * 3_600.0)
    given_back = replay_cluster(trace, flat, UtilityPolicy(), setup=ReplaySetup(acquire_s=120.0))
    assert given_back.usd < 6 * 8 * 0.75
    kept = replay_cluster(trace, linear(), UtilityPolicy(), setup=ReplaySetup(acquire_s=120.0))
    assert kept.usd == pytest.approx(6 * 8)


def test_nobody_holds_more_than_the_job_can_use_and_who_holds_all_of_that_trains_from_the_begin() -> None:
    """Thirty nodes are to be had, of which the job can use four: what the others cost is no merit of any policy."""
    trace = of_counts("roomy", [(0.0, 30), (1_800.0, 29)], 3_600.0)
    found = compare(trace, linear()[:4], setup=ReplaySetup(acquire_s=120.0), knobs=PolicyKnobs(spares_max=2))
    runs = dict(zip(found.names, found.runs, strict=True))
    assert runs["hold_all"].usd == pytest.approx(6.0, abs=0.1)
    assert runs["reactive"].usd == pytest.approx(4.0, abs=0.1) == runs["checkpoint_restart"].usd
    assert runs["hold_all"].tokens >= runs["liver"].tokens
    assert runs["hold_all"].tokens == pytest.approx(4 * 125 * 3_600, rel=0.01)


def test_a_loss_hits_when_it_more_likely_does_than_not() -> None:
    assert likely_hit(5, 10, 1) and not likely_hit(4, 10, 1)
    assert likely_hit(8, 10, 3)
    assert not likely_hit(0, 10, 3) and not likely_hit(5, 10, 0)


def test_a_job_of_checkpoints_goes_back_to_one_only_where_a_loss_was_not_announced() -> None:
    """It saves before every change that it chooses or is told of, as Varuna does."""
    trace = of_counts("lossy", [(0.0, 3), (1_900.0, 4), (4_300.0, 3)], 6_000.0)
    told, silent = (
        replay_cluster(
            trace,
            linear(),
            ReactivePolicy(),
            setup=ReplaySetup(checkpoint_every_s=600.0, notice_s=30.0, unannounced_share=share),
        )
        for share in (0.0, 1.0)
    )
    assert told.changes == silent.changes == 3
    assert dict(told.tokens_lost_by)["lost_work"] == 0
    # It grew at 1,900 s with a checkpoint, paused for 2 s, and wrote the next ones at 600 s of work each.
    assert dict(silent.tokens_lost_by)["lost_work"] == pytest.approx(4 * 125 * (4_300 - 1_902 - 3 * 600))


def test_a_policy_is_asked_as_often_as_the_setup_says_also_while_nothing_changes() -> None:
    class Counting(ReactivePolicy):
        asked = 0

        def decide(self, inputs):
            type(self).asked += 1
            return super().decide(inputs)

    trace = of_counts("quiet", [(0.0, 2)], 3_600.0)
    counts = []
    for every_s in (60.0, 600.0):
        Counting.asked = 0
        replay_cluster(trace, linear(), Counting(), setup=ReplaySetup(decides_every_s=every_s))
        counts.append(Counting.asked)
    assert counts == [60, 6]


def test_the_curve_of_a_run_ends_with_what_it_made_and_has_a_bounded_number_of_points() -> None:
    trace = of_counts("growing", [(at * 61.0, at) for at in range(1, 9)], 90_000.0)
    run = replay_cluster(trace, linear(), ReactivePolicy(), setup=ReplaySetup())
    assert 300 < len(run.progress) <= POINTS_MAX
    assert (run.progress[-1].at_s, run.progress[-1].tokens) == (90_000.0, run.tokens)
    assert all(one.at_s < other.at_s for one, other in pairwise(run.progress))


def test_where_what_is_done_of_a_step_is_kept_a_loss_costs_no_more_than_a_part_of_it() -> None:
    trace = of_counts("lossy", [(0.0, 4), (371.0, 3)], 600.0)
    slow = tuple(Candidate(f"DP{n}", n, 800.0 / n, 1_000, change_s=0.0) for n in range(1, 9))
    lost = [
        dict(
            replay_cluster(
                trace, slow, ReactivePolicy(), setup=ReplaySetup(counts_steps=True, notice_s=1.0, step_parts=parts)
            ).tokens_lost_by
        )["lost_work"]
        for parts in (1, 20)
    ]
    assert lost == [pytest.approx(5 * ((371 - 1) % 200)), pytest.approx(0.0)]
