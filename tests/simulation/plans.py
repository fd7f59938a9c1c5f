"""What happens in one run besides training: who wants what when, and which faults strike. Pure, drawn from the seed."""

from __future__ import annotations

from dataclasses import dataclass, replace
from random import Random

from liver_core.layout import Member

LEAD = "lead"
SERVICE = "service"

FAULTS = (
    "agent crash",
    "agent crash between effects",
    "host crash",
    "host crash between effects",
    "rank dies",
    "rank breaks while its agent restarts",
    "node dies",
    "store dies",
    "store cut off",
    "network storm",
    "service away",
    "service gone",
    "build fails",
    "build stalls",
    "stream stalls",
    "stream fails",
    "stream aborts",
    "corrupt",
    "slow read",
    "gradients late",
    "barrier fails",
    "order refused",
    "hello again",
    "rank slow to answer",
    "late order",
)
ANOTHER_NOTICE = "another notice"
LONG_FROM_S = 1.1
TRIGGERS = ("preparing", "streaming", "prepared", "ready", "cutting_over", "active")


@dataclass(frozen=True, slots=True)
class Intent:
    """Somebody wants another world. `kind`: handoff, amend, cancel, restart, stale."""

    at_s: float
    host: str
    kind: str
    members: tuple[Member, ...]


@dataclass(frozen=True, slots=True)
class Fault:
    """Strikes `delay_s` after `trigger` was first reported by any rank; with an empty trigger after the start."""

    kind: str
    trigger: str
    delay_s: float
    member: Member
    length_s: float


@dataclass(frozen=True, slots=True)
class Link:
    """What the ladder is told: the transport, the seconds of a copy without training, the share of a step that it takes
    to follow one, and why the optimizer cannot be replayed."""

    one_sided: bool = False
    copy_s: float = 0.5
    follow_share: float = 0.2
    replay_refusal: str = ""


@dataclass(frozen=True, slots=True)
class Plan:
    """One run, as drawn."""

    members: tuple[Member, ...]
    first: tuple[Member, ...]
    step_s: float
    deadline_s: float
    network: tuple[float, float, float]  # loss, repeat, delay
    intents: tuple[Intent, ...]
    faults: tuple[Fault, ...]
    chaos_s: float
    link: Link = Link()
    parts: int = 1  # of a step, between which it can be dropped
    slow_s: float = 0.0  # longer than usual, to build a world
    connects: bool = False  # the ranks of a next world make communicators of GPUs at a boundary


def draw_plan(random: Random, builds: Random) -> Plan:
    """A short run: one or two changes of the world, none to four faults. `builds` is for how long worlds are built."""
    members = tuple(Member(f"n{index}", 0) for index in range(4 + (random.random() < 0.3)))
    first = tuple(random.sample(members, 2 + (random.random() < 0.4)))
    chaos_s = 22.0 + 8 * random.random()
    intents = [Intent(0.1 + random.random(), LEAD, "handoff", _world(random, members))]
    if random.random() < 0.35:
        intents.append(Intent(2 + 16 * random.random(), LEAD, "handoff", _world(random, members)))
    if random.random() < 0.4:
        kind = random.choice(("handoff", "handoff", "stale", "stale", "restart"))
        intents.append(Intent(1 + 14 * random.random() ** 2, SERVICE, kind, _world(random, members)))
    if random.random() < 0.5:
        kind = random.choice(("amend", "amend", "amend", "cancel"))
        intents.append(Intent(1 + 6 * random.random(), LEAD, kind, _world(random, members)))
    count = random.choice((0, 1, 1, 2, 2, 3, 4))
    faults = tuple(_fault(random, members) for _ in range(count))
    lossy = random.random() < 0.5
    network = (0.15 * random.random(), 0.2 * random.random(), 0.6 * random.random()) if lossy else (0.0, 0.0, 0.05)
    step_s, deadline_s = 0.3 + random.random(), 7 + 9 * random.random()
    link = _link(random)
    parts = 1
    if step_s > LONG_FROM_S:
        # Some jobs have steps that hardly fit a deadline; they can be dropped between two parts.
        step_s, parts = 3 + 20 * (step_s - LONG_FROM_S), 4
    if random.random() < 0.4:
        # While permission is given and the boundary has not come.
        faults += (Fault(ANOTHER_NOTICE, "ready", 0.5 * random.random(), random.choice(members), 1.0),)
    # Some worlds are built for so long that a notice leaves time for a rescue only.
    slow_s = 5.0 + 6.0 * builds.random() if builds.random() < 0.15 else 0.0
    connects = builds.random() < 0.3
    plan = Plan(members, first, step_s, deadline_s, network, tuple(intents), faults, chaos_s, link, parts, slow_s)
    return replace(plan, connects=connects)


def _link(random: Random) -> Link:
    refusal = "the fused optimizer steps a tile otherwise than the whole" if random.random() < 0.1 else ""
    return Link(random.random() < 0.8, 0.2 + random.random(), random.random(), refusal)


def _world(random: Random, members: tuple[Member, ...]) -> tuple[Member, ...]:
    return tuple(random.sample(members, 2 + (random.random() < 0.5)))


def _fault(random: Random, members: tuple[Member, ...]) -> Fault:
    kind = random.choice(FAULTS)
    triggered = random.random() < 0.6
    trigger = random.choice(TRIGGERS) if triggered else ""
    delay_s = random.random() if triggered else 14 * random.random()
    return Fault(kind, trigger, delay_s, random.choice(members), 1 + 9 * random.random())
