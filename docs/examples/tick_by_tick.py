"""Drive LiveR's policy tick by tick, as a benchmark outside does: spot is there or not, at a price, with a deadline.

    python docs/examples/tick_by_tick.py --work-h 10 --deadline-h 14 --on-demand 12 --tick-s 600 < trace.csv

A line of the trace is one tick: `available,usd_per_hour`, availability as 0 or 1. Nothing of LiveR is needed but
`service.policy`, which is pure: no database, no service.
"""

import argparse
import csv
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from math import inf

from service.policy.choosing import UtilityPolicy
from service.policy.hazard import LifeTable
from service.policy.types import (
    Candidate,
    Goal,
    Market,
    Policy,
    PolicyInputs,
    PolicyKnobs,
    PoolView,
    StandingWorld,
)

HOUR_S = 3_600.0
SPOT, ON_DEMAND, NOTHING = "spot", "on-demand", "nothing"
LAYOUT = "the job's only layout"


@dataclass(frozen=True)
class Task:
    """`work_s`: training time that the job needs in all. `start_s`: to the first step after every change."""

    work_s: float
    deadline_s: float
    on_demand_usd_per_hour: float
    tick_s: float
    start_s: float = 300.0


@dataclass
class Played:
    """`missing_s`: work that was not done by the deadline."""

    usd: float = 0.0
    choices: tuple[str, ...] = ()
    missing_s: float = 0.0


def play(trace: Iterable[tuple[bool, float]], task: Task, policy: Policy | None = None) -> Played:
    """One decision a tick, from what is known at its beginning."""
    policy, played, life = policy or UtilityPolicy(), Played(), LifeTable()
    at, left_s, cold_s, spot_age_s = NOTHING, task.work_s, 0.0, 0.0
    for tick, (is_available, price) in enumerate(trace):
        elapsed_s = tick * task.tick_s
        if left_s <= 0 or elapsed_s >= task.deadline_s:
            break
        if spot_age_s:
            life.watch(spot_age_s - task.tick_s, spot_age_s, lost=not is_available)
        spot_age_s = spot_age_s + task.tick_s if is_available else 0.0
        if at == SPOT and not is_available:
            at = NOTHING
        pools = [_pool(ON_DEMAND, at, Market.ON_DEMAND, task.on_demand_usd_per_hour, inf)]
        if is_available:
            pools.append(_pool(SPOT, at, Market.SPOT, price, life.life_s(spot_age_s)))
        decision = policy.decide(
            PolicyInputs(
                pools=tuple(pools),
                candidates=(Candidate(LAYOUT, nodes=1, step_time_s=1.0, tokens_per_step=1, change_s=task.start_s),),
                usd_per_hour_on_demand=task.on_demand_usd_per_hour,
                standing=None if at == NOTHING else StandingWorld(LAYOUT, 1, at, ((at, 1),), starting_s=cold_s),
                goal=Goal(tokens_left=left_s, tokens_done=task.work_s - left_s, elapsed_s=elapsed_s,
                          deadline_in_s=task.deadline_s - elapsed_s),
                knobs=PolicyKnobs(spares_max=0, start_s=task.start_s, decides_every_s=task.tick_s),
            )
        )  # fmt: skip
        wanted = next(
            (pool for pool, _ in decision.hold if pool != at), decision.hold[0][0] if decision.hold else NOTHING
        )
        if wanted != at:
            at, cold_s = wanted, task.start_s
        played.choices += (at,)
        if at == NOTHING:
            continue
        used_s = min(task.tick_s, cold_s + left_s, task.deadline_s - elapsed_s)
        played.usd += used_s / HOUR_S * (price if at == SPOT else task.on_demand_usd_per_hour)
        left_s -= max(0.0, used_s - cold_s)
        cold_s = max(0.0, cold_s - used_s)
    played.missing_s = max(0.0, left_s)
    return played


def _pool(name: str, at: str, market: Market, usd_per_hour: float, life_s: float) -> PoolView:
    return PoolView(name, name, market, usd_per_hour, held=int(at == name), offered=int(at != name), life_s=life_s)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work-h", type=float, required=True)
    parser.add_argument("--deadline-h", type=float, required=True)
    parser.add_argument("--on-demand", type=float, required=True, metavar="USD_PER_HOUR")
    parser.add_argument("--tick-s", type=float, default=600.0)
    options = parser.parse_args()
    task = Task(options.work_h * HOUR_S, options.deadline_h * HOUR_S, options.on_demand, options.tick_s)
    trace = [(row[0].strip() == "1", float(row[1])) for row in csv.reader(sys.stdin) if row]
    played = play(trace, task)
    for name in (SPOT, ON_DEMAND, NOTHING):
        sys.stdout.write(f"{name}: {played.choices.count(name)} ticks\n")
    sys.stdout.write(f"{played.usd:.2f} USD, {played.missing_s / HOUR_S:.2f} h of work missing at the deadline\n")


if __name__ == "__main__":
    main()
