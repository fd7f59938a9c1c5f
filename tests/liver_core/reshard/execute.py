"""Executes plans on numpy arrays of element ids, in the dumbest way: one run after another."""

import numpy as np

from liver_core.layout import Manifest, Roster
from liver_core.reshard import RankPlan, plan_rank
from tests.liver_core.layout.oracle import rank_region
from tests.liver_core.reshard.checker import check_plans, lower_bound_elements

UNWRITTEN = -1


def regions_of(manifest: Manifest, roster: Roster) -> list[np.ndarray]:
    """What every rank of a world holds."""
    return [rank_region(manifest, roster.layout, rank) for rank in range(roster.layout.world_size)]


def all_plans(manifest: Manifest, source: Roster, target: Roster) -> list[RankPlan]:
    """Every rank's plan, each made alone."""
    return [plan_rank(manifest, source, target, rank) for rank in range(target.layout.world_size)]


def execute(plans: list[RankPlan], held: list[np.ndarray], sizes: list[int]) -> list[np.ndarray]:
    """The target regions after all copies; what nobody wrote stays UNWRITTEN. Writing twice fails."""
    regions = []
    for plan, size in zip(plans, sizes, strict=True):
        region = np.full(size, UNWRITTEN)
        for transfer in plan.transfers:
            for runs in transfer.runs:
                for source, target, length in runs.each():
                    assert (region[target : target + length] == UNWRITTEN).all(), f"{plan.target_rank}: {runs}"
                    region[target : target + length] = held[transfer.source_rank][source : source + length]
        regions.append(region)
    return regions


def move(manifest: Manifest, source: Roster, target: Roster, held: list[np.ndarray]) -> list[np.ndarray]:
    """Plan, check, execute; the result must be exactly what the target ranks should hold, at the lower bound."""
    plans = all_plans(manifest, source, target)
    check_plans(manifest, source, target, plans)
    assert sum(plan.remote_elements for plan in plans) == lower_bound_elements(manifest, source, target)
    wanted = regions_of(manifest, target)
    got = execute(plans, held, [region.size for region in wanted])
    for rank, (have, want) in enumerate(zip(got, wanted, strict=True)):
        assert np.array_equal(have, want), f"rank {rank} of {target.layout} from {source.layout}"
    return got
