"""What happens in a trial, drawn from its seed: the job, its nodes, the scenario, and who is struck how and when. Pure.

The same seed always gives the same plan, so any trial can be played again.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from itertools import combinations, product
from typing import Any

RANKS_MAX = 6
"""A trial runs on two cores: more ranks would only make it slower."""
EXCHANGES_MAX = 300
"""Layers that the micro-batches of a step go through, for each further rank of a tensor-parallel group. Each waits for
all ranks of the group: six of them on two cores would make steps of half a minute, and recoveries of that length."""
VOCABULARY = 264
STEPS_MAX = 100_000
SECOND_STRIKE = 0.3
"""Share of trials with two victims."""
BUILD_S = (8.0, 12.0)
"""What building a world takes longer in half of the trials: an open handoff then outlasts a short notice."""
LEAD_NOTICES_S = (8, 12, 20, 30)


class Kind(StrEnum):
    """What the job goes through while something is struck."""

    NOTICE = "notice"
    GROW = "grow"
    SECOND_NOTICE = "second notice"
    SUSPENSION = "suspension"
    RESUME = "resume"
    NOTHING = "nothing"
    REPLACEMENT = "replacement"  # every node gets a notice, and as many are free
    LEAD = "notice for the lead"  # of an open handoff
    DECISION = "loss before the decision"  # of a leaver, after the boundary


class Victim(StrEnum):
    """What is struck."""

    SERVICE = "service"
    DATABASE = "database"
    AGENT = "agent"
    LEAD = "lead's agent"
    SURVIVOR = "survivor's rank"
    LEAVER = "leaver's rank"
    NEWCOMER = "newcomer's rank"
    MACHINE = "leaver's machine"
    STORE = "store"
    ZYGOTE = "zygote"


class Action(StrEnum):
    """How it is struck."""

    KILL = "SIGKILL"
    STOP = "SIGSTOP"
    CUT = "cut off"  # its node's network
    LATE = "200 ms late"  # packets from and to its node
    FULL = "full disk"  # of its node, or of the database
    CLOCK = "clock 5 min off"  # of its node, forward or back


EVERYWHERE = frozenset({Action.KILL, Action.STOP})
"""What can be done on any machine; the others need the right to make network namespaces and to mount."""
_NODES = frozenset({Victim.AGENT, Victim.LEAD, Victim.SURVIVOR, Victim.LEAVER, Victim.NEWCOMER, Victim.STORE})
POSSIBLE = {
    Action.KILL: frozenset(Victim),
    Action.STOP: frozenset(Victim) - {Victim.MACHINE},
    Action.CUT: _NODES | {Victim.SERVICE, Victim.MACHINE},
    Action.LATE: _NODES | {Victim.SERVICE},
    Action.CLOCK: _NODES | {Victim.SERVICE},
    Action.FULL: frozenset({Victim.AGENT, Victim.LEAD, Victim.DATABASE}),
}
_WEIGHTS = {Action.KILL: 3.0, Action.STOP: 3.0, Action.CUT: 1.5, Action.LATE: 1.0, Action.FULL: 1.5, Action.CLOCK: 1.0}

POINTS = ("boundary", "norm")
"""Probes of the loop that a leaver passes between boundary and decision."""

_GOES = (Kind.NOTICE, Kind.SECOND_NOTICE, Kind.SUSPENSION, Kind.REPLACEMENT)
_COMES = (Kind.GROW, Kind.RESUME, Kind.REPLACEMENT)


@dataclass(frozen=True, slots=True)
class Strike:
    """One victim. `after_s`: after the scenario's trigger; `lasts_s`: until all is as before; `back_s`: until a
    killed service or agent is started again; `pick`: which of several candidates, as a share of their number. `point`:
    a leaver's rank is held at this probe of the loop until the strike, and `after_s` counts from there; empty: at none.
    """

    victim: Victim
    action: Action
    after_s: float
    lasts_s: float
    back_s: float
    pick: float
    point: str = ""

    @property
    def how(self) -> str:
        """As the record says it."""
        return str(self.action) if self.action is Action.KILL else f"{self.action} for {self.lasts_s:g} s"

    @property
    def is_harmless(self) -> bool:
        """Whether it may cost no step: ranks can go on and see each other."""
        match self.victim:
            case Victim.SERVICE | Victim.DATABASE | Victim.ZYGOTE:
                return True
            case Victim.AGENT | Victim.LEAD:
                return self.action in EVERYWHERE
            case _:
                return False


@dataclass(frozen=True, slots=True)
class TrialPlan:
    """One trial. `nodes`: slots of each node at the start, `comes`: of those that a grow or a replacement adds;
    `layouts`: by node count; `leave`: how many nodes get a notice, which ends in `notice_s`, the second `gap_s` after
    the first. `opens`: what the open handoff is for whose lead gets a notice, None where none does; it ends in
    `lead_notice_s`. `build_s`: what each world takes longer to build."""

    seed: int
    kind: Kind
    nodes: tuple[int, ...]
    comes: tuple[int, ...]
    nodes_min: int
    layouts: tuple[tuple[int, str], ...]
    model: dict[str, int]
    global_batch: int
    micro_batch: int
    checkpoint_every: int
    leave: int
    notice_s: float
    gap_s: float
    strikes: tuple[Strike, ...]
    opens: Kind | None = None
    lead_notice_s: float = 0.0
    build_s: float = 0.0


def plan_of(seed: int, can: frozenset[Action] = EVERYWHERE) -> TrialPlan:
    """The trial of this seed. Kinds take turns, so that any run of seeds has as many of each. Where a trial needs an
    action that this machine cannot do, its victim is stopped instead."""
    draw = random.Random(seed)
    kind = tuple(Kind)[seed % len(Kind)]
    opens = draw.choice((Kind.GROW, Kind.NOTICE)) if kind is Kind.LEAD else None
    grows = Kind.GROW in (kind, opens)
    count = draw.choice((1, 1, 2) if kind is Kind.REPLACEMENT else (3, 3, 3, 3, 4, 4, 5))
    leave = _leave(kind, opens, count)
    going = leave + (kind is Kind.LEAD)
    least = count if kind in (Kind.SUSPENSION, Kind.RESUME, Kind.REPLACEMENT) else count - going
    job = _job(draw, counts=range(least, count + grows + 1))
    nodes = job.slots[:count]
    return TrialPlan(
        seed=seed,
        kind=kind,
        nodes=nodes,
        comes=nodes if kind is Kind.REPLACEMENT else job.slots[-1:],
        nodes_min=least,
        layouts=job.layouts,
        model=job.model,
        global_batch=job.batch,
        micro_batch=1,
        checkpoint_every=draw.choice((5, 10, 20)),
        leave=leave,
        notice_s=float(draw.choice((30, 60, 120))),
        gap_s=round(draw.uniform(0.5, 6.0), 1),
        strikes=tuple(_strikes(draw, kind, can)),
        opens=opens,
        lead_notice_s=float(draw.choice(LEAD_NOTICES_S)) if kind is Kind.LEAD else 0.0,
        build_s=round(draw.uniform(*BUILD_S), 1) if draw.random() < 0.5 else 0.0,
    )


def _leave(kind: Kind, opens: Kind | None, count: int) -> int:
    match kind:
        case Kind.REPLACEMENT:
            return count
        case Kind.SECOND_NOTICE:
            return 2
        case Kind.LEAD:
            return int(opens is Kind.NOTICE)
        case Kind.NOTICE | Kind.SUSPENSION | Kind.RESUME | Kind.DECISION:
            return 1
        case Kind.GROW | Kind.NOTHING:
            return 0


def _strikes(draw: random.Random, kind: Kind, can: frozenset[Action]) -> Iterator[Strike]:
    if kind is Kind.DECISION:
        yield _strike_before_decision(draw, can)
        return
    if kind is Kind.LEAD and draw.random() < 0.5:
        return  # The notice is enough.
    victims = [victim for victim in Victim if _exists(victim, kind)]
    for victim in draw.sample(victims, 2 if draw.random() < SECOND_STRIKE else 1):
        actions = [action for action in Action if victim in POSSIBLE[action]]
        [action] = draw.choices(actions, [_WEIGHTS[action] for action in actions])
        yield Strike(
            victim=victim,
            action=action if action in can else Action.STOP,
            after_s=round(draw.uniform(0.0, 3.0 if kind is Kind.NOTHING else 8.0), 1),
            lasts_s=round(draw.uniform(1.0, 40.0), 1),
            back_s=round(draw.uniform(0.5, 10.0), 1),
            pick=draw.random(),
        )


def _strike_before_decision(draw: random.Random, can: frozenset[Action]) -> Strike:
    victim = draw.choice((Victim.LEAVER, Victim.MACHINE))
    is_silent = victim is Victim.MACHINE and draw.random() < 0.4
    return Strike(
        victim=victim,
        action=Action.CUT if is_silent and Action.CUT in can else Action.KILL,
        after_s=round(draw.uniform(0.0, 1.5), 1),
        lasts_s=round(draw.uniform(30.0, 60.0), 1),
        back_s=0.0,
        pick=draw.random(),
        point=draw.choice(POINTS),
    )


def _exists(victim: Victim, kind: Kind) -> bool:
    if kind is Kind.LEAD:
        # A short notice forgives no agent that stands still.
        return victim in (Victim.SERVICE, Victim.DATABASE, Victim.ZYGOTE)
    match victim:
        case Victim.MACHINE:
            return False
        case Victim.SURVIVOR:
            return kind is not Kind.REPLACEMENT
        case Victim.LEAVER:
            return kind in _GOES
        case Victim.NEWCOMER:
            return kind in _COMES
        case _:
            return True


@dataclass(frozen=True, slots=True)
class _Job:
    slots: tuple[int, ...]
    layouts: tuple[tuple[int, str], ...]
    model: dict[str, int]
    batch: int


def _job(draw: random.Random, *, counts: range) -> _Job:
    """Nodes and a model that has a layout for each of these node counts. Drawn again until it has."""
    while True:
        slots = tuple(draw.choice((1, 1, 1, 2, 2, 3)) for _ in range(counts[-1]))
        model = {
            "num_layers": draw.choice((6, 10, 12)),
            "hidden_size": draw.choice((48, 96)),
            "num_attention_heads": draw.choice((4, 6, 12)),
            "ffn_hidden_size": 120,
            "padded_vocab_size": VOCABULARY,
            "seq_length": draw.choice((32, 64)),
        }
        batch = draw.choice((8, 12, 20, 24))
        found = {count: _layouts(model, batch, _sizes(slots, count)) for count in counts}
        if all(found.values()):
            return _Job(slots, tuple((count, draw.choice(names)) for count, names in found.items()), model, batch)


def _sizes(slots: tuple[int, ...], count: int) -> range:
    """World sizes that need all of any `count` of these nodes, and fit on them."""
    sums = [sum(chosen) for chosen in combinations(slots, count)]
    fewer = max(sum(chosen) for chosen in combinations(slots, count - 1))
    return range(max(fewer + 1, count), min(*sums, RANKS_MAX) + 1)


def _layouts(model: dict[str, int], batch: int, sizes: range) -> list[str]:
    divided = (model["num_attention_heads"], model["ffn_hidden_size"], model["padded_vocab_size"])
    return [
        f"TP{tp}xPP{pp}xDP{dp}"
        for tp, pp, dp in product(range(1, RANKS_MAX + 1), repeat=3)
        if tp * pp * dp in sizes
        and not any(size % tp for size in divided)
        and not model["num_layers"] % pp
        and not batch % dp
        and (tp - 1) * batch // dp * model["num_layers"] <= EXCHANGES_MAX
    ]


def job_file(plan: TrialPlan, *, data_prefix: str, trail: str, checkpoints: str) -> dict[str, Any]:
    """What a user would write. Its ranks write the trail that the judge reads."""
    args = {"data_prefix": data_prefix, "trail": trail, "micro_batch_s": 0.6 / plan.global_batch}
    return {
        "name": f"chaos-{plan.seed}",
        "entrypoint": "tests.chaos.trail:TrailedJob",
        "model": plan.model,
        "args": args | {"build_s": plan.build_s},
        "global_batch": plan.global_batch,
        "micro_batch": plan.micro_batch,
        "nodes": {"min": plan.nodes_min, "max": max(count for count, _ in plan.layouts)},
        "layouts": {"pinned": [{"nodes": count, "layout": layout} for count, layout in plan.layouts]},
        "checkpoint": {"path": checkpoints, "every_steps": plan.checkpoint_every, "keep": 3},
        "stop": {"steps": STEPS_MAX},
    }
