"""Replays in which the product's machines carry the changes: what holds on any trace, and what becomes of a change in
whose middle something happens."""

from itertools import pairwise

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from service.ledger.tables import Cause
from service.policy.choosing import UtilityPolicy
from service.policy.plain_policies import ReactivePolicy
from service.policy.types import Candidate, Goal, Policy, PolicyKnobs
from service.simulation.cluster_replay import ClusterRun, replay_cluster
from service.simulation.count_oracles import ideal_tokens, oracle_tokens
from service.simulation.machines.change_times import ChangeTimes
from service.simulation.machines.machine_replay import replay_by_machines
from service.simulation.machines.replayed_world import HOP_S
from service.simulation.replay_ledger import hours_by_cause, ledger_of
from service.simulation.replay_setup import ReplaySetup, Victims, grid_of
from service.simulation.traces import CapacityTrace, TraceEvent, of_counts

ALMOST = 1e-6
POLICIES: tuple[Policy, ...] = (UtilityPolicy(), ReactivePolicy())
HEARD_WITHIN_S = 4 * HOP_S
AT_ONCE = ChangeTimes(build_s=0.0, endpoints_s=0.0)


@st.composite
def traces(draw: st.DrawFn) -> CapacityTrace:
    counts = draw(st.lists(st.integers(0, 9), min_size=1, max_size=12))
    gaps = draw(st.lists(st.sampled_from([1, 4, 17, 60, 131, 600]), min_size=len(counts), max_size=len(counts)))
    times = [float(sum(gaps[:index])) for index in range(len(gaps))]
    return of_counts("random", list(zip(times, counts, strict=True)), times[-1] + 300.0)


@st.composite
def tables(draw: st.DrawFn) -> tuple[Candidate, ...]:
    nodes = draw(st.lists(st.integers(1, 9), min_size=1, max_size=6))
    return tuple(
        Candidate(
            f"PP{index + 1}",
            count,
            step_time_s=draw(st.floats(0.5, 100)),
            tokens_per_step=1_000,
            change_s=draw(st.sampled_from([0.0, 2.0, 30.0])),
        )
        for index, count in enumerate(nodes)
    )


setups = st.builds(
    ReplaySetup,
    notice_s=st.sampled_from([0.0, 5.0, 30.0, 120.0]),
    unannounced_share=st.sampled_from([0.0, 0.3]),
    acquire_s=st.sampled_from([0.0, 40.0]),
    victims=st.sampled_from(list(Victims)),
    counts_steps=st.booleans(),
    seed=st.integers(0, 3),
)
change_times = st.builds(
    ChangeTimes,
    build_s=st.sampled_from([0.0, 5.0, 40.0]),
    state_bytes=st.sampled_from([0.0, 18e9]),
    restart_s=st.sampled_from([0.0, 55.0]),
    checkpoint_every_s=st.sampled_from([100.0, 600.0, None]),
    parts_of_step=st.sampled_from([(), (("PP1", 0.25), ("PP2", 0.3))]),
)
knobs = st.builds(PolicyKnobs, spares_max=st.integers(0, 3), releases=st.booleans())
goals = st.builds(Goal, usd_per_mtok=st.sampled_from([None, 1.0, 1e4]))


@settings(max_examples=60, deadline=None)
@given(traces(), tables(), setups, change_times, knobs, goals, st.sampled_from(POLICIES))
def test_with_the_machines_too_nobody_does_better_than_who_knows_more(
    trace, candidates, setup, times, knob, goal, policy
) -> None:
    run = replay_by_machines(trace, candidates, policy, setup=setup, times=times, knobs=knob, goal=goal)
    grid = grid_of(trace, setup)
    ideal = ideal_tokens(grid, candidates)
    by_victims = oracle_tokens(grid, candidates, knows_victims=True)
    assert run.ideal_tokens == pytest.approx(ideal)
    assert run.tokens <= by_victims * (1 + ALMOST) + ALMOST
    assert by_victims <= ideal * (1 + ALMOST)
    assert run.tokens >= -ALMOST


@settings(max_examples=60, deadline=None)
@given(traces(), tables(), setups, change_times, knobs, goals, st.sampled_from(POLICIES))
def test_causes_sum_to_the_gap_and_the_ledger_of_the_machines_covers_each_lease_once(
    trace, candidates, setup, times, knob, goal, policy
) -> None:
    run = replay_by_machines(trace, candidates, policy, setup=setup, times=times, knobs=knob, goal=goal)
    assert sum(tokens for _, tokens in run.tokens_lost_by) == pytest.approx(run.ideal_tokens - run.tokens, abs=1e-3)
    assert all(tokens >= -1e-6 for _, tokens in run.tokens_lost_by)
    for leases in ledger_of(run).values():
        for lease in leases:
            assert all(earlier.ends_at == later.starts_at for earlier, later in pairwise(lease))
    hours = sum(lease.end_s - lease.begin_s for lease in run.leases) / 3_600
    assert sum(hours_by_cause(run).values()) == pytest.approx(hours)
    assert run.usd == pytest.approx(hours * setup.usd_per_hour)


BOTH_LEAD = CapacityTrace(
    "both lead",
    (
        TraceEvent(7.0, ("node-1",), ()),
        TraceEvent(11.0, ("node-2",), ()),
        TraceEvent(71.0, (), ("node-2",)),
        TraceEvent(131.0, (), ("node-1",)),
    ),
    432.0,
    False,
)
"""Each of two nodes hears of its own end first, and opens a handoff before it hears of the other's."""


@settings(max_examples=60, deadline=None)
@given(traces(), tables(), setups, change_times, st.sampled_from(POLICIES))
@example(
    BOTH_LEAD,
    (Candidate("PP1", 1, step_time_s=1.0, tokens_per_step=1_000),),
    ReplaySetup(notice_s=120.0, victims=Victims.DRAWN, counts_steps=False, seed=1),
    ChangeTimes(build_s=0.0, state_bytes=0.0, restart_s=0.0, checkpoint_every_s=100.0),
    POLICIES[0],
)
def test_no_world_is_mixed_and_every_generation_number_has_one_world(trace, candidates, setup, times, policy) -> None:
    run = replay_by_machines(trace, candidates, policy, setup=setup, times=times)
    numbers = {each.generation for each in run.enacted}
    for number in numbers:
        # Two agents may propose one number before either hears of the other; ranks take part in one of these attempts.
        first, *others = sorted((each for each in run.enacted if each.generation == number), key=lambda each: each.at_s)
        assert all(each.at_s <= first.at_s + HEARD_WITHIN_S for each in others), "used again"
        assert sum(each.ended != "aborted" for each in (first, *others)) <= 1
    assert all(earlier.end_s <= later.begin_s for earlier, later in pairwise(run.worlds)), "two worlds at a time"
    nodes_of: dict[int, set[tuple[str, ...]]] = {}
    for world in run.worlds:
        nodes_of.setdefault(world.generation, set()).add(world.nodes)
    assert all(len(found) == 1 for found in nodes_of.values()), "one number, two worlds"
    assert nodes_of.keys() <= numbers
    order = [world.generation for world in run.worlds if world.cause in (Cause.PRODUCTIVE, Cause.RECOMPUTE)]
    assert order == sorted(order), "an older world trained again"
    held = {(lease.node, lease.begin_s, lease.end_s) for lease in run.leases}
    for world in run.worlds:
        if world.cause in (Cause.PRODUCTIVE, Cause.RECOMPUTE):
            for node in world.nodes:
                assert any(
                    name == node and begin_s <= world.begin_s + ALMOST and world.end_s <= end_s + ALMOST
                    for name, begin_s, end_s in held
                ), f"generation {world.generation} trained without {node}"


@settings(max_examples=20, deadline=None)
@given(traces(), tables(), setups, change_times, st.sampled_from(POLICIES))
def test_the_same_replay_by_the_machines_gives_the_same_run(trace, candidates, setup, times, policy) -> None:
    def run() -> ClusterRun:
        return replay_by_machines(trace, candidates, policy, setup=setup, times=times)

    assert run() == run()


@settings(max_examples=50, deadline=None)
@given(
    st.lists(st.integers(1, 8), min_size=1, max_size=8),
    st.sampled_from([0.0, 2.0, 20.0]),
    st.sampled_from([60.0, 120.0]),
)
def test_a_change_in_whose_middle_nothing_happens_costs_what_it_costs_at_once(counts, change_s, notice_s) -> None:
    """Announced, and far apart. What differs are seconds of waiting, in which the older world trains on."""
    layouts = linear(change_s)
    trace = of_counts("calm", [(at * 600.0, count) for at, count in enumerate(counts)], len(counts) * 600.0)
    setup = ReplaySetup(notice_s=notice_s)
    shorthand = replay_cluster(trace, layouts, ReactivePolicy(), setup=setup)
    machines = replay_by_machines(trace, layouts, ReactivePolicy(), setup=setup, times=AT_ONCE)
    assert machines.changes == shorthand.changes
    assert [layout[1:3] for layout in machines.layouts] == [layout[1:3] for layout in shorthand.layouts]
    paused_s = sum(
        world.end_s - world.begin_s for world in machines.worlds if world.cause in (Cause.PAUSE, Cause.BOOTSTRAP)
    )
    assert paused_s == pytest.approx(change_s * machines.changes, abs=0.3 * machines.changes)
    waits_s, fastest = 1.0, max(layout.tokens_per_s for layout in layouts)
    assert machines.tokens == pytest.approx(shorthand.tokens, abs=waits_s * fastest * machines.changes)


def linear(change_s: float = 2.0, step_s: float = 8.0) -> tuple[Candidate, ...]:
    return tuple(Candidate(f"DP{n}", n, step_s / n, 1_000, change_s=change_s) for n in range(1, 9))
