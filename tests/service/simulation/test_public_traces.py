"""Public spot traces by the machines and at once. The data are no part of this tree: without them nothing is run."""

from dataclasses import replace
from os import environ
from pathlib import Path

import pytest

from service.planner.change_cost import STATE_BYTES_PER_PARAMETER
from service.policy.choosing import UtilityPolicy
from service.simulation.cluster_replay import replay_cluster
from service.simulation.count_oracles import oracle_tokens
from service.simulation.machines.change_times import ChangeTimes
from service.simulation.machines.enacted import counted
from service.simulation.machines.machine_replay import replay_by_machines
from service.simulation.replay_setup import ReplaySetup, Victims, grid_of
from tests.benchmarks.policy.clusters import COUNTED, HOLDS_ALL, PARAMETERS, SMALL
from tests.benchmarks.policy.data import TRACES, measured_layouts, trace

FOLDER = Path(environ.get("POLICY_DATA") or Path(__file__).parents[4] / "shared/data/spot-traces")

pytestmark = pytest.mark.skipif(not FOLDER.is_dir(), reason=f"there is no {FOLDER}: POLICY_DATA names the traces")


def announced(share: float) -> ReplaySetup:
    return replace(COUNTED, victims=Victims.NAMED, notice_s=120.0, unannounced_share=share, counts_steps=True)


TIMES = ChangeTimes(state_bytes=STATE_BYTES_PER_PARAMETER * PARAMETERS[SMALL])


@pytest.mark.thorough
@pytest.mark.parametrize("name", TRACES)
def test_where_losses_are_announced_the_machines_make_nearly_what_changes_at_once_would(name: str) -> None:
    found, layouts, setup = trace(FOLDER, name), measured_layouts(FOLDER, SMALL, 5.0), announced(0.0)
    at_once = replay_cluster(found, layouts, UtilityPolicy(), setup=setup, knobs=HOLDS_ALL)
    run = replay_by_machines(found, layouts, UtilityPolicy(), setup=setup, times=TIMES, knobs=HOLDS_ALL)
    assert run.goodput == pytest.approx(at_once.goodput, abs=0.002)
    assert run.changes == at_once.changes
    assert run.tokens <= oracle_tokens(grid_of(found, setup), layouts, knows_victims=True)
    assert counted(run.enacted)["live active"] > 50


@pytest.mark.thorough
def test_a_loss_that_nobody_announced_costs_a_restart_which_changes_at_once_do_not_know() -> None:
    found, layouts, setup = trace(FOLDER, "p3"), measured_layouts(FOLDER, SMALL, 5.0), announced(0.1)
    at_once = replay_cluster(found, layouts, UtilityPolicy(), setup=setup, knobs=HOLDS_ALL)
    run = replay_by_machines(found, layouts, UtilityPolicy(), setup=setup, times=TIMES, knobs=HOLDS_ALL)
    assert counted(run.enacted)["restart active"] > 0
    assert dict(run.tokens_lost_by)["lost_work"] > 10 * dict(at_once.tokens_lost_by)["lost_work"]
    assert run.goodput < at_once.goodput - 0.01
