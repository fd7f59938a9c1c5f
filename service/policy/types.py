"""What a policy is asked and what it answers: frozen inputs in, one decision with alternatives and reason out. Pure.

A `PoolView` is capacity of one price in one place. Nodes of pools in the same place can be in one world; a job is in
one place at a time. Money is in USD, time in seconds, rates as the names say.
"""

from dataclasses import dataclass, field
from enum import StrEnum
from math import inf
from typing import Protocol

POOLS_MAX, CANDIDATES_MAX = 256, 4_096


class Market(StrEnum):
    """How capacity is sold: spot may be taken back at any time."""

    SPOT = "spot"
    ON_DEMAND = "on_demand"


class PolicyVerdict(StrEnum):
    """What should happen. Pause: hold nothing until it is worth something again."""

    START = "start"
    STAY = "stay"
    MOVE = "move"
    PAUSE = "pause"


@dataclass(frozen=True, slots=True)
class Candidate:
    """A layout that fits the job and fills `nodes` nodes. `step_error`: how far off `step_time_s` may be, as a share of
    it; 0 where it was measured. `change_s`: training time lost when the job changes to it from what it runs on now."""

    layout: str
    nodes: int
    step_time_s: float
    tokens_per_step: int
    step_error: float = 0.0
    is_measured: bool = False
    change_s: float = 0.0

    @property
    def tokens_per_s(self) -> float:
        return self.tokens_per_step / self.step_time_s


@dataclass(frozen=True, slots=True)
class PoolView:
    """Capacity of one price in one place, as seen now.

    `held`: nodes that are up and will stay as far as is known (those with a notice do not count). `coming`: bought and
    not up yet. `offered`: further nodes that could be bought, up after `acquire_s`. `at_risk`: nodes among which a loss
    takes its own, whosever they are; those that could be had where it is not known. `life_s`: expected time to the next
    loss in this pool, given how long its capacity has lasted; `grows_in_s`: to the next nodes that it offers.
    `group_sizes`: how many nodes go at once, with shares that sum to 1. `move_usd`: egress and start-up fees of
    bringing the job here, `move_s`: time that its state takes on the way, before the start; 0 where it is.
    """

    pool: str
    place: str
    market: Market
    usd_per_hour: float
    held: int = 0
    coming: int = 0
    offered: int = 0
    acquire_s: float = 0.0
    life_s: float = inf
    grows_in_s: float = inf
    group_sizes: tuple[tuple[int, float], ...] = ((1, 1.0),)
    move_usd: float = 0.0
    move_s: float = 0.0
    at_risk: int | None = None

    @property
    def obtainable(self) -> int:
        """Nodes that the job could hold here: those it has, those that come, those it could buy."""
        return self.held + self.coming + self.offered

    @property
    def exposed(self) -> int:
        """Nodes among which a loss takes its own."""
        return self.obtainable if self.at_risk is None else self.at_risk


@dataclass(frozen=True, slots=True)
class PriceHad:
    """At this price of one node or less the job's nodes could be had for this share of the past time. `gap_s`: how
    long a time without them lasted on average."""

    usd_per_hour: float
    share: float
    gap_s: float = 0.0


@dataclass(frozen=True, slots=True)
class StandingWorld:
    """What the job runs on. `use`: nodes by pool, those that will be lost left out. `is_whole`: all of its nodes stay,
    so that it may go on in its layout. `starting_s`: time until its first step."""

    layout: str
    nodes: int
    place: str
    use: tuple[tuple[str, int], ...]
    is_whole: bool = True
    starting_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Goal:
    """What the job is for. Without a deadline or a value, a token is worth a multiple of what
    it costs on on-demand nodes."""

    usd_per_mtok: float | None = None
    tokens_left: float = inf
    tokens_done: float = 0.0
    elapsed_s: float = 0.0
    deadline_in_s: float = inf
    budget_left_usd: float = inf


@dataclass(frozen=True, slots=True)
class PolicyKnobs:
    """What a user may set. Every knob is explained in docs/policy.md.

    `gain_min`: the share of the present utility by which another option must be better. `spares_max`: nodes held beyond
    those used, at most. `releases`: whether nodes that buy nothing are given back, `keeps_s`: and only so long after
    they were last wanted (whoever holds the nodes sees to it: `service.policy.keeping`). `on_demand`: whether on-demand
    nodes may be bought at all. `patience_s`: these are not given back for spot before they have served so long.
    `start_s`: time from nothing, or from another place, to the first step; `rescue_s`: the longest time that the state
    takes to on-demand nodes, from wherever it may be. `is_reproducible`: only layouts whose TP
    degree is that of the present one (PP-only and DP-only changes). `decides_every_s`: the longest time to the next
    decision, which a deadline must survive.
    """

    gain_min: float = 0.0
    spares_max: int = 4
    releases: bool = True
    keeps_s: float = 300.0
    on_demand: bool = True
    patience_s: float = 0.0
    start_s: float = 0.0
    rescue_s: float = 0.0
    horizon_min_s: float = 60.0
    horizon_max_s: float = 24 * 3_600.0
    is_reproducible: bool = False
    decides_every_s: float = 60.0

    @property
    def rescued_s(self) -> float:
        """From wherever the state may be to the first step on on-demand nodes."""
        return self.start_s + self.rescue_s


@dataclass(frozen=True, slots=True)
class PolicyInputs:
    """Everything a decision depends on. `usd_per_hour_on_demand`: of one node, whether or not such nodes may be bought:
    the yardstick of what a token is worth. `had`: the prices at which the job's nodes could be
    had so far, cheapest first; shares grow and gaps shrink. `served_s`: how long the job has been on what it
    runs on."""

    pools: tuple[PoolView, ...]
    candidates: tuple[Candidate, ...]
    usd_per_hour_on_demand: float
    had: tuple[PriceHad, ...] = ()
    standing: StandingWorld | None = None
    served_s: float = inf
    goal: Goal = Goal()
    knobs: PolicyKnobs = PolicyKnobs()

    def __post_init__(self) -> None:
        if len(self.pools) > POOLS_MAX:
            raise ValueError(f"pools: at most {POOLS_MAX}, are {len(self.pools)}")
        if len(self.candidates) > CANDIDATES_MAX:
            raise ValueError(f"candidates: at most {CANDIDATES_MAX}, are {len(self.candidates)}")


@dataclass(frozen=True, slots=True)
class ScoredOption:
    """One option that was weighed: where, in which layout, on how many nodes of which pools, and what it is worth in
    USD per hour. `hold` counts spares, `nodes` does not. `use`: the nodes of `hold` that it runs on, by pool."""

    layout: str
    place: str
    nodes: int
    hold: tuple[tuple[str, int], ...]
    tokens_per_s: float
    usd_per_hour: float
    utility_usd_per_hour: float
    use: tuple[tuple[str, int], ...] = ()

    @property
    def spares(self) -> int:
        return sum(count for _, count in self.hold) - self.nodes


@dataclass(frozen=True, slots=True)
class PolicyDecision:
    """What to do, why, and what it was chosen from (the best first). `hold`: how many nodes of each pool to have; what
    is held beyond that is given back, what is missing is bought. `best`: what the job should run on once its nodes are
    up; another option than `option` while it waits for them. `alert`: what a person should know, or empty."""

    verdict: PolicyVerdict
    reason: str
    option: ScoredOption | None = None
    alternatives: tuple[ScoredOption, ...] = field(default=())
    alert: str = ""
    best: ScoredOption | None = None

    @property
    def hold(self) -> tuple[tuple[str, int], ...]:
        return self.option.hold if self.option is not None else ()


class Policy(Protocol):
    """Decides from frozen inputs alone: the same inputs, the same decision."""

    name: str

    def decide(self, inputs: PolicyInputs) -> PolicyDecision: ...
