"""What happens in one run besides training: who goes when, who wants what, which faults strike. Drawn from a seed."""

from __future__ import annotations

from dataclasses import dataclass, replace
from random import Random

from liver_core.layout import Member

# What is named more than once is drawn so much more often.
FAULTS = (
    "agent crash",
    "agent crash between effects",
    "agent stands still",
    "rank dies",
    "rank breaks while its agent restarts",
    "node dies",
    "store dies",
    "store fails",
    "store cut off",
    "network storm",
    "service away",
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
    "cut off from the service",
    "cut off from everybody",
    "world cut off",
    "world cut off",
    "world cut off",
    "start again",
    "start again",
    "stale proposal",
    "second proposer",
)
LEADS = ("agent crash", "agent crash between effects", "agent stands still", "node dies", "cut off from everybody")
"""What strikes the node that leads an open handoff."""
ANOTHER_NOTICE = "another notice"
AT_BOUNDARY = (*3 * (ANOTHER_NOTICE,), "rank dies", "rank dies", "agent crash", "start again", "store dies")
BESIDE_A_CUT = (
    "agent crash",
    "agent crash between effects",
    "rank breaks while its agent restarts",
    "late order",
    "network storm",
    "start again",
    "hello again",
)
IN_PAUSE = ("barrier fails", "barrier fails", "slow read", "slow read", "corrupt", "gradients late", "build fails")
WHILE_IT_STREAMS = ("stream fails", "stream aborts", "stream stalls")
CUT_OFF_SHARE, AT_BOUNDARY_SHARE, IN_PAUSE_SHARE = 0.15, 0.15, 0.15
CUT_OFF_TIMES = 2.4
"""So many times its length a node is cut off."""
QUIET = (0.0, 0.0, 0.05)
LONG_FROM_S = 1.1
TRIGGERS = ("preparing", "streaming", "prepared", "ready", "cutting_over", "active")


@dataclass(frozen=True, slots=True)
class Notice:
    """A node will go: announced at `at_s`, `lead_s` before its end. `withdrawn_s`: after so long it stays after all.
    `by_itself`: its own agent hears it first; else the service does. `of`: the node that leads what is open then, one
    that comes with it, one that leaves with it, or `node`. `dies_s`: so much before its announced end it is taken."""

    at_s: float
    node: str
    lead_s: float
    withdrawn_s: float | None = None
    by_itself: bool = True
    of: str = "node"
    dies_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Wish:
    """From then on the job is to have so many nodes."""

    at_s: float
    nodes: int


@dataclass(frozen=True, slots=True)
class Fault:
    """Strikes `delay_s` after `trigger` was first reported by any rank; with an empty trigger after the start. `of`: a
    role in the open handoff that is struck instead of `member`: lead, stays, leaver, newcomer; empty for none."""

    kind: str
    trigger: str
    delay_s: float
    member: Member
    length_s: float
    of: str = ""


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
    """One run, as drawn. `parts`: of a step, between which it can be dropped. `slow_s`: longer than usual, to build a
    world. `settle_s`: ranks learn the outcome of a boundary within that. `connects`: the ranks of a next world make
    communicators of GPUs at a boundary. `scripted`: nothing small goes another way by itself."""

    members: tuple[Member, ...]
    first: tuple[Member, ...]
    step_s: float
    network: tuple[float, float, float]  # loss, repeat, delay
    notices: tuple[Notice, ...] = ()
    wishes: tuple[Wish, ...] = ()
    faults: tuple[Fault, ...] = ()
    chaos_s: float = 25.0
    link: Link = Link()
    parts: int = 1
    slow_s: float = 0.0
    settle_s: float = 0.02
    connects: bool = False
    scripted: bool = False


def draw_plan(random: Random) -> Plan:
    """A short run. Most have one or two changes of the world, and none to four faults of any kind."""
    kind = random.random()
    if kind < CUT_OFF_SHARE:
        return _cut_off(random)
    kind -= CUT_OFF_SHARE
    if kind < AT_BOUNDARY_SHARE:
        return _at_boundary(random)
    return _in_pause(random) if kind < AT_BOUNDARY_SHARE + IN_PAUSE_SHARE else _of_all_kinds(random)


def _cut_off(random: Random) -> Plan:
    """The service does not hear the job's world for so long that it starts the job elsewhere. That world goes on by
    itself while it may, and hands over where a notice comes."""
    members = tuple(Member(f"n{index}", 0) for index in range(5))
    first = tuple(random.sample(members, 2))
    at_s, length_s = 0.5 + 5.0 * random.random(), 8.0 + 6.0 * random.random()
    faults = (Fault("world cut off", "", at_s, first[0], length_s),)
    if random.random() < 0.3:
        # It is cut off a moment before the start, and that one is replaced by another one in its turn.
        again_s = at_s + 2.5 * random.random()
        faults += tuple(
            Fault("start elsewhere", "", each, first[0], 1.0) for each in (again_s, again_s + 9 * random.random())
        )
    elif random.random() < 0.6:
        faults += (Fault(random.choice(BESIDE_A_CUT), "", at_s + 12 * random.random(), random.choice(members), 4.0),)
    node, lead_s = random.choice(first).node_id, 5.0 + 11.0 * random.random()
    notice = Notice(at_s + 26.0 * random.random(), node, lead_s)
    return Plan(
        members,
        first,
        0.3 + random.random(),
        (0.15 * random.random(), 0.2 * random.random(), 0.6 * random.random()) if random.random() < 0.3 else QUIET,
        notices=(notice,) if random.random() < 0.6 else (),
        faults=faults,
        chaos_s=at_s + CUT_OFF_TIMES * length_s + 8.0,
        link=_link(random),
    )


def _at_boundary(random: Random) -> Plan:
    """A notice is answered, and when its handoff is at its boundary, which takes long, something else happens."""
    members = tuple(Member(f"n{index}", 0) for index in range(4 + (random.random() < 0.4)))
    first = tuple(random.sample(members, 2 + (random.random() < 0.5)))
    notice = Notice(0.5 + random.random(), random.choice(first).node_id, 9.0 + 7.0 * random.random())
    of, kind = random.choice(("stays", "stays", "lead", "newcomer", "")), random.choice(AT_BOUNDARY)
    connects = random.random() < 0.5
    delay_s = (2.0 if connects else 0.7) * random.random()
    fault = Fault(kind, "ready", delay_s, random.choice(members), 1 + 9 * random.random(), of)
    if kind == "rank dies":
        of = random.choice(("leaver", "leaver", "stays", "newcomer"))
        fault = replace(fault, trigger="cutting_over", delay_s=0.4 * random.random(), of=of)
    return Plan(
        members,
        first,
        0.3 + random.random(),
        QUIET,
        notices=(notice,),
        faults=(fault, _fault(random, members)) if random.random() < 0.4 else (fault,),
        chaos_s=26.0,
        link=_link(random),
        settle_s=0.1 + 0.8 * random.random(),
        connects=connects,
    )


def _in_pause(random: Random) -> Plan:
    """A notice is answered, and some of the ranks fail while they cut over, or while their state streams."""
    members = tuple(Member(f"n{index}", 0) for index in range(4))
    first = tuple(random.sample(members, 2 + (random.random() < 0.5)))
    is_long, is_slow, streams = random.random() < 0.35, random.random() < 0.4, random.random() < 0.2
    is_long, is_slow = is_long and not streams, is_slow and not streams
    kinds, step_s = WHILE_IT_STREAMS if streams else IN_PAUSE, 0.3 + random.random()
    lead_s = (11.0 if streams else 6.0) + 9.0 * random.random()
    if is_long:  # It fits the notice when it is dropped.
        step_s = 3 + 4 * random.random()
        lead_s = 4.0 + step_s * random.random()
    struck = random.sample(members, random.choice((1, 2, 3)))
    return Plan(
        members,
        first,
        step_s,
        QUIET,
        notices=(Notice(0.5 + step_s * random.random(), random.choice(first).node_id, lead_s),),
        faults=tuple(Fault(random.choice(kinds), "", 0.1, member, 1 + 9 * random.random()) for member in struck),
        chaos_s=30.0,
        link=Link(one_sided=True) if streams else _link(random),
        parts=4 if is_long else 1,
        slow_s=5.0 + 6.0 * random.random() if is_slow else 0.0,
    )


def _of_all_kinds(random: Random) -> Plan:
    members = tuple(Member(f"n{index}", 0) for index in range(4 + (random.random() < 0.4)))
    first = tuple(random.sample(members, 2 + (random.random() < 0.5)))
    lossy = random.random() < 0.5
    network = (0.15 * random.random(), 0.2 * random.random(), 0.6 * random.random()) if lossy else QUIET
    step_s, parts = 0.3 + random.random(), 1
    if step_s > LONG_FROM_S:
        # Some jobs have steps that hardly fit a notice; they can be dropped between two parts.
        step_s, parts = 3 + 20 * (step_s - LONG_FROM_S), 4
    count = random.choice((0, 1, 1, 2, 2, 3, 4))
    faults = tuple(_fault(random, members) for _ in range(count))
    if random.random() < 0.5:
        # While permission is given and the boundary has not come.
        of = random.choice(("stays", "stays", "lead", "newcomer", ""))
        faults += (Fault(ANOTHER_NOTICE, "ready", 0.5 * random.random(), random.choice(members), 1.0, of),)
    return Plan(
        members,
        first,
        step_s,
        network,
        notices=tuple(_notices(random, members, first)),
        wishes=tuple(_wishes(random, len(first))),
        faults=faults,
        chaos_s=22.0 + 8 * random.random(),
        link=_link(random),
        parts=parts,
        # Some worlds are built for so long that a notice leaves time for a rescue only.
        slow_s=5.0 + 6.0 * random.random() if random.random() < 0.15 else 0.0,
        connects=random.random() < 0.3,
    )


def _notices(random: Random, members: tuple[Member, ...], first: tuple[Member, ...]) -> list[Notice]:
    """None to three; a later one often for a node that has a part in what the one before has begun."""
    found = []
    at_s = 0.5 + 3.0 * random.random()
    for number in range(random.choice((0, 1, 1, 1, 2, 2, 3))):
        node = random.choice(first if random.random() < 0.8 else members).node_id
        of = random.choice(("node", "lead", "lead", "comes", "leaves")) if number else "node"
        withdrawn_s = 4.0 * random.random() if random.random() < 0.2 else None
        early_s = 1.5 * random.random() if random.random() < 0.2 else 0.0
        lead_s = 5.0 + 11.0 * random.random()
        found.append(Notice(at_s, node, lead_s, withdrawn_s, random.random() < 0.6, of, early_s))
        at_s += 0.2 + random.choice((1.5, 6.0)) * random.random()
    return found


def _wishes(random: Random, nodes: int) -> list[Wish]:
    if random.random() < 0.4:
        return []
    first = Wish(0.5 + 10.0 * random.random(), random.choice([each for each in (2, 3, 4) if each != nodes]))
    more = [Wish(first.at_s + 8.0 * random.random(), random.choice((2, 3)))] if random.random() < 0.3 else []
    return [first, *more]


def _link(random: Random) -> Link:
    refusal = "the fused optimizer steps a tile otherwise than the whole" if random.random() < 0.1 else ""
    return Link(random.random() < 0.8, 0.2 + random.random(), random.random(), refusal)


def _fault(random: Random, members: tuple[Member, ...]) -> Fault:
    triggered = random.random() < 0.6
    trigger = random.choice(TRIGGERS) if triggered else ""
    delay_s = random.random() if triggered else 14 * random.random()
    of = random.choice(("", "", "lead", "leaver", "newcomer")) if triggered else ""
    kind = random.choice(LEADS if of == "lead" else FAULTS)
    if of == "leaver":
        kind = random.choice(("rank dies", "node dies", "agent crash", "agent stands still"))
    return Fault(kind, trigger, delay_s, random.choice(members), 1 + 9 * random.random(), of)
