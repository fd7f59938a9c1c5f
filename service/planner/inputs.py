"""The planner's inputs and its decision. Frozen, complete, digestible. Pure."""

import hashlib
import json
from dataclasses import asdict, dataclass, field, fields
from enum import StrEnum
from functools import cache
from math import inf
from typing import Any

from agent.protocol.jobfile import JobFile
from agent.protocol.values import Placement
from liver_core.layout import Member, ParallelLayout
from service.planner.change_cost import OwnChanges
from service.planner.goals import Alert, CountOption, Remaining
from service.planner.weighing.wanted import WantedCapacity


@dataclass(frozen=True, slots=True)
class PlanNode:
    """A node the job may use. Nodes that will go are not among the planner's nodes. `is_at_risk`: the cloud has said
    that it may take the machine (a rebalance recommendation), which is advice. `is_overdue`: it has outlived the end
    that is announced of it, and is used after all others. `zone`, `device`: empty if unknown.
    `usd_per_hour`: None where not known, or where the job does not weigh prices."""

    node_id: str
    slots: int
    is_at_risk: bool = False
    is_overdue: bool = False
    zone: str = ""
    device: str = ""
    pool: str = ""
    usd_per_hour: float | None = None


@dataclass(frozen=True, slots=True)
class PoolMarket:
    """What is known of a pool's price and of its losses. `on_demand_usd_per_hour`: of such a node; None if unknown.
    `egress_usd_per_gb`: of 10^9 bytes that leave it. `offered`, `on_demand_offered`: nodes that could be bought there
    as it is priced, and on demand, as far as is known. `ours`: nodes of ours there now, of this job or not, among which
    its losses fall; None where not counted.
    `life_s`: expected time to its next loss. `losses`: events in `watched_h` hours with nodes of ours. `volatility`:
    how many times more of them than expected came lately, at least 1. `group_sizes`: (nodes lost at once, share of the
    events)."""

    pool: str
    usd_per_hour: float | None = None
    on_demand_usd_per_hour: float | None = None
    life_s: float | None = None
    losses: int = 0
    watched_h: float = 0.0
    volatility: float = 1.0
    group_sizes: tuple[tuple[int, float], ...] = ()
    egress_usd_per_gb: float | None = None
    offered: int = 0
    on_demand_offered: int = 0
    ours: int | None = None


@dataclass(frozen=True, slots=True)
class OtherNodes:
    """How many nodes the job cannot use, and why. They change no decision; reasons name them."""

    taken: int = 0
    leaving: int = 0
    silent: int = 0
    other_pool: int = 0

    def __str__(self) -> str:
        counts = (
            (self.taken, "taken by other jobs"),
            (self.leaving, "announced to go"),
            (self.silent, "silent"),
            (self.other_pool, "in other pools"),
        )
        return ", ".join(f"{count} {why}" for count, why in counts if count)


@dataclass(frozen=True, slots=True)
class World:
    """What the job runs on now."""

    generation: int
    layout: ParallelLayout
    members: tuple[Member, ...]

    def node_ids(self) -> tuple[str, ...]:
        """The nodes used, each once, in rank order."""
        return tuple(dict.fromkeys(member.node_id for member in self.members))


@dataclass(frozen=True, slots=True)
class LayoutUse:
    """One generation the job has had: its number of nodes and its layout."""

    nodes: int
    layout: str


@dataclass(frozen=True, slots=True)
class PlanInputs:
    """Everything a decision depends on. `step_seconds`: measured step time by layout, `step_errors`: by what share of
    itself it may be off. `history`: oldest first. `remaining`: None where the job has neither deadline nor budget.
    `markets`: of the pools of its nodes and those it names. Where it weighs prices, `changes`: what its handoffs cost
    it, and `copy_s`: how long it stands while its state is copied, None where it streams. `served_s`: how long it has
    been on what it runs on, 0 or inf: whether its policy's patience is over. `others`: for the reason, not in the
    digest."""

    job: JobFile
    nodes: tuple[PlanNode, ...]
    world: World | None = None
    step_seconds: tuple[tuple[str, float], ...] = ()
    step_errors: tuple[tuple[str, float], ...] = ()
    history: tuple[LayoutUse, ...] = field(default=())
    others: OtherNodes = field(default=OtherNodes())
    remaining: Remaining | None = None
    markets: tuple[PoolMarket, ...] = ()
    changes: OwnChanges | None = None
    copy_s: float | None = None
    served_s: float = inf

    def digest(self) -> str:
        """Same inputs, same digest, in every process."""
        content = {
            "job": self.job.model_dump(mode="json"),
            "nodes": [_flat(node) for node in self.nodes],
            "world": None
            if self.world is None
            else [self.world.generation, str(self.world.layout), [_flat(member) for member in self.world.members]],
            "step_seconds": [[layout, round(seconds, 2)] for layout, seconds in self.step_seconds],
            "step_errors": [[layout, round(error, 2)] for layout, error in self.step_errors],
            "history": [_flat(use) for use in self.history],
        }
        if self.remaining is not None:
            content["remaining"] = asdict(self.remaining)
        if self.markets:
            content["markets"] = [asdict(market) for market in self.markets]
        if self.changes is not None:
            content["changes"] = asdict(self.changes)
        if self.copy_s is not None:
            content["copy_s"] = self.copy_s
        if self.served_s < inf:
            content["served_s"] = self.served_s
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:32]


def _flat(record: PlanNode | Member | LayoutUse) -> dict[str, Any]:
    """As `asdict` has it, for records that hold no others: of a thousand nodes it would copy each name."""
    return {name: getattr(record, name) for name in _names_of(type(record))}


@cache
def _names_of(kind: type) -> tuple[str, ...]:
    return tuple(each.name for each in fields(kind))


class PlannerVerdict(StrEnum):
    """What should happen to the job."""

    STAY = "stay"
    START = "start"
    MOVE = "move"
    SUSPEND = "suspend"


@dataclass(frozen=True, slots=True)
class PlannerDecision:
    """The verdict, its reason, and the target (unless the verdict is stay or suspend). `alerts`: what a person should
    know, which the reason says in words. `options`: the numbers of nodes that were weighed, where any were. `wanted`:
    what the job should have, by its policy; None where it has none, or where nothing could be weighed."""

    verdict: PlannerVerdict
    reason: str
    target: Placement | None = None
    alerts: tuple[Alert, ...] = ()
    options: tuple[CountOption, ...] = ()
    wanted: WantedCapacity | None = None


@dataclass(frozen=True, slots=True)
class Alternative:
    """A layout that a job could run in, on how many nodes, and its score: the seconds of a step, and by how much of
    itself that may be off. `predicted_s`: what is or would be predicted from the other layouts that ran."""

    layout: str
    nodes: int
    step_s: float
    measured: bool
    step_error: float = 0.0
    predicted_s: float = 0.0


@dataclass(frozen=True, slots=True)
class LossPlan:
    """What a job would run in after a loss of so many nodes, and how many times longer a step would take than now; None
    where nothing is left to run on."""

    what: str
    nodes_lost: int
    layout: str | None
    step_s: float | None
    step_error: float | None
    times_slower: float | None
    reason: str


@dataclass(frozen=True, slots=True)
class Violation:
    """One rule a layout breaks, with the field of the job file it comes from."""

    field: str
    rule: str
