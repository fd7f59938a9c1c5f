"""The simulator finds nothing in the machines, and finds every bug that is planted in them. Pure.

The long run is `python -m tests.simulation.run --seeds 10000`; this is the short one.
"""

import pytest

from service.simulation.world.observer import Violation
from tests.simulation.bugs import BUGS, FIRST_SEEDS
from tests.simulation.coverage import every_pair
from tests.simulation.impossible import IMPOSSIBLE
from tests.simulation.run import run_seeds, unmet_pairs, wrongly_declared
from tests.simulation.simulation import Simulation, run_seed
from tests.tiers import sample

SEEDS = 300
SEEDS_TO_FIND_A_BUG = 300


def seeds_until_found(bug: str) -> int | None:
    """The first seed that finds the bug, None when none does."""
    first = FIRST_SEEDS.get(bug, 0)
    for seed in range(first, first + SEEDS_TO_FIND_A_BUG):
        if run_seeds(seed, 1, bug).violations:
            return seed
    return None


@pytest.fixture(scope="module")
def short_run():
    return run_seeds(0, SEEDS)


def test_the_machines_are_clean_on_the_seeds_that_find_the_bugs(short_run):
    assert SEEDS >= SEEDS_TO_FIND_A_BUG
    assert short_run.failures == []


def test_a_short_run_meets_every_kind_of_ending(short_run):
    assert {"active (go)", "active (go_redo)", "aborted (no_go)", "aborted (undecided)", "broken (undecided)"} <= set(
        short_run.endings
    )


def test_a_short_run_reaches_the_boundary_on_every_rung_and_by_amended_plans(short_run):
    found = short_run.boundaries.keys()
    assert {"live", "live, amended", "stop_and_copy", "stop_and_copy, amended", "stop_and_copy after live"} <= found
    assert {"drop_step", "rescue"} <= {name.removesuffix(", amended").split(" ")[0] for name in found}


def test_no_pair_that_is_declared_impossible_is_ever_met(short_run):
    assert wrongly_declared(short_run) == []
    assert set(IMPOSSIBLE) <= every_pair()


def test_even_a_short_run_meets_two_thirds_of_the_possible_pairs(short_run):
    """`test_every_pair` drives all of them by hand, and the impossible ones too."""
    possible = len(every_pair()) - len(IMPOSSIBLE)
    assert len(unmet_pairs(short_run)) <= possible / 3


@pytest.mark.parametrize("bug", sample(sorted(BUGS), *sorted(BUGS)[::4]))
def test_the_simulator_finds_the_planted_bug(bug: str):
    seed = seeds_until_found(bug)
    assert seed is not None
    assert run_seeds(seed, 1).failures == []


def test_a_planted_bug_is_gone_after_its_run():
    with BUGS["stale roster"].planted():
        pass
    assert run_seeds(0, SEEDS_TO_FIND_A_BUG // 6).failures == []


def test_one_seed_is_one_run():
    def notes_of_seven() -> list[tuple[float, str]]:
        simulation = Simulation(7)
        simulation.notes = []
        simulation.run()
        return simulation.notes

    assert notes_of_seven() == notes_of_seven()


def test_a_violation_names_its_seed():
    seed = seeds_until_found("step before the barrier")
    assert seed is not None
    with BUGS["step before the barrier"].planted() as machines, pytest.raises(Violation, match=rf"seed {seed}, .* s: "):
        run_seed(seed, machines)
