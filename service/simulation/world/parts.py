"""What the parts of a simulated world, and who watches it, ask of its agents, ranks and worlds. Pure.

They know each other, and modules must not: each of these names exactly what others use of a class of `agents`, `link`,
`leading`, `rank_cutover`, `ranks` and `worlds`. What has no `@property` is set by others too.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from typing import Protocol, TypeVar, TypeVarTuple

from agent.protocol.notice_life import Notices
from agent.protocol.sync import NoticeFact
from liver_core.handoff import (
    Cutover,
    Decision,
    Order,
    Participant,
    ParticipantRecord,
    RankStage,
    Reason,
    Report,
    Rung,
)
from liver_core.handoff.cutover import CutoverEvent
from liver_core.handoff.pending import Pending
from liver_core.handoff.ready_tag import Agreement
from liver_core.layout import Member, Roster
from service.simulation.world.reports import Mirror

Ts = TypeVarTuple("Ts")
Effect = TypeVar("Effect")


class World(Protocol):
    """`SimWorld`: where the ranks of one generation step together."""

    is_begun: bool
    """False: a start that has made no step yet."""

    @property
    def generation(self) -> int: ...

    @property
    def roster(self) -> Roster: ...

    def join(self, rank: Rank) -> None:
        """It goes on to the next step."""

    def look(self) -> None:
        """The next boundary may matter for one of its ranks."""

    def go_on(self) -> None:
        """A rank makes communicators no more, which a step may have waited for."""

    def hear_of_death(self, rank: Rank, dead: Member) -> None:
        """`rank` is told that another one is dead."""

    def misses_rank(self) -> None:
        """The process of one has ended."""


class RankInPause(Protocol):
    """`CuttingRank`: a rank as those see it that it meets, or asks, while it cuts over."""

    @property
    def member(self) -> Member: ...

    @property
    def alive(self) -> bool: ...

    @property
    def world(self) -> World | None: ...

    @property
    def version(self) -> int: ...

    @property
    def value(self) -> int: ...

    @property
    def held_value(self) -> int:
        """For the next world, -1 where it holds nothing."""
        ...

    @property
    def partial(self) -> bool:
        """Whether its gradients are not whole."""
        ...

    @property
    def order(self) -> Order | None:
        """Of the newest handoff, also when that is over."""
        ...

    @property
    def rung(self) -> Rung:
        """How the state truly moves."""
        ...

    @property
    def cutover(self) -> Cutover | None: ...

    @property
    def cutover_rank(self) -> int: ...

    @property
    def decision_read(self) -> Decision: ...

    def answer(self, machine: Cutover | None, event: CutoverEvent) -> None:
        """What this machine of it has asked for."""

    def knows_dead(self, members: Iterable[Member]) -> bool:
        """Whether it has been told of all of these."""
        ...

    def take_what_survivors_hold(self, order: Order) -> None:
        """All ranks have built the next world of a rescue."""


class Rank(RankInPause, Protocol):
    """`SimRank`: one process."""

    leased_until: float
    reports_until: float
    """When the last thing that it has said arrives."""

    # What can be asked.

    @property
    def pending(self) -> Pending: ...

    @property
    def building(self) -> Collection[int]:
        """Its builds under way."""
        ...

    @property
    def build_number(self) -> int:
        """Of the newest build."""
        ...

    @property
    def worlds_dropping(self) -> int: ...

    @property
    def stage(self) -> RankStage: ...

    @property
    def reason(self) -> Reason | None: ...

    @property
    def belongs_to(self) -> int:
        """The generation that its agent takes it for."""
        ...

    @property
    def cutover_version(self) -> int: ...

    @property
    def redoing(self) -> bool: ...

    @property
    def has_lease(self) -> bool: ...

    @property
    def is_condemned(self) -> bool: ...

    @property
    def ends_after_step(self) -> bool: ...

    @property
    def is_past_boundary(self) -> bool: ...

    @property
    def connects(self) -> bool:
        """Whether it makes communicators now, and does not train."""
        ...

    def holds(self, handoff_id: str, generation: int) -> bool:
        """Whether anything of this handoff is still prepared or undecided here."""
        ...

    # What it is told while it prepares.

    def begin_training(self, world: World, version: int) -> None:
        """All ranks of its start have loaded the checkpoint."""

    def streamed(self, verdict: Rung, reason: Reason | None) -> None:
        """All ranks have agreed how the state moves."""

    def stream_breaks(self, reason: Reason) -> None:
        """The build fails while the state streams."""

    def connected(self, build: int, problem: Reason | None) -> None:
        """It has made its communicators, or sees that it cannot."""

    # What its world has it do.

    def maintain(self) -> None:
        """Between two steps, or two parts of one."""

    def word(self) -> int:
        """What it shows at a boundary."""
        ...

    def word_between_parts(self, left_s: float) -> int:
        """What it shows so long before the end of the step."""
        ...

    def boundary_over(self, agreement: Agreement | None, *, dropped: bool) -> None:
        """It learns what all ranks have agreed on."""

    def apply_step(self, world: World, *, at_cutover: bool = False) -> None:
        """One optimizer step."""

    def made_steps(self, count: int) -> None:
        """So many, counted by time."""

    def break_down(self, reason: Reason) -> None:
        """It can go on in no world."""

    def exit(self, reason: Reason | None = None) -> None:
        """The process ends."""


class AgentLink(Protocol):
    """`ServiceLink`: how an agent and the service hear each other."""

    @property
    def is_answered(self) -> bool:
        """Whether the service was there a moment ago."""
        ...

    def tell_news(self) -> None:
        """There is something that the next report tells."""

    def status(self) -> dict[str, float | int]:
        """What it tells other agents."""
        ...


class AgentLead(Protocol):
    """`Leading`: the leader of an agent."""

    @property
    def is_idle(self) -> bool:
        """Whether no handoff is open or being opened here."""
        ...

    @property
    def notices(self) -> Notices: ...

    def take_notice(self, fact: NoticeFact) -> None:
        """A node will go, or stays."""

    def consider(self) -> None:
        """What is due now."""

    def cancel(self, reason: Reason) -> None:
        """No handoff is wanted any more."""

    def store_died(self, generation: int) -> None:
        """The store that this node keeps of a generation."""


class Agent(Protocol):
    """`SimAgent`: the agent of one node, its disk and its rank."""

    # What can be asked.

    @property
    def name(self) -> str: ...

    @property
    def member(self) -> Member: ...

    @property
    def now(self) -> float:
        """What the clock of its node says."""
        ...

    @property
    def skew_s(self) -> float: ...

    @property
    def incarnation(self) -> int: ...

    @property
    def node_up(self) -> bool: ...

    @property
    def is_going(self) -> bool:
        """Whether its process is there, and is not stopped."""
        ...

    @property
    def rank(self) -> Rank | None: ...

    @property
    def journal(self) -> ParticipantRecord:
        """On its disk."""
        ...

    @property
    def participant(self) -> Participant: ...

    @property
    def link(self) -> AgentLink: ...

    @property
    def leading(self) -> AgentLead: ...

    def newest_world(self) -> int:
        """The highest generation that a rank of its node has stepped in."""
        ...

    def highest_known(self) -> int:
        """The greatest number that it knows as used."""
        ...

    # What comes from other nodes.

    def receive(self, message: Order | Report) -> None:
        """An order of a proposer, or a report for one."""

    def take_notices(self, facts: tuple[NoticeFact, ...], asked_to_lead: bool = False) -> None:
        """Nodes will go, or stay."""

    def take_relayed(self, mirrors: tuple[Mirror, ...]) -> None:
        """Another node, which will go, has led these."""

    def hear_of_death(self, generation: int, member: Member) -> None:
        """A rank of this world is dead."""

    # What its own parts, its rank and the starts have it do.

    def does(self, action: Callable[[*Ts], None], *args: *Ts) -> None:
        """When its process has its turn."""

    def carry_out(self, effects: Iterable[Effect], do: Callable[[Effect], None]) -> None:
        """One after the other, until the process is gone."""

    def crash(self, restart_after_s: float) -> None:
        """The process dies."""

    def stir(self) -> None:
        """Something has happened here."""

    def give_up(self, generation: int) -> None:
        """The service has started `generation`: what is older is over here."""

    def take_start(self, order: Order) -> None:
        """A start in which its node has a part."""

    def start_process(self, order: Order) -> Rank:
        """Of a start."""
        ...

    def end_rank(self) -> None:
        """After its step, with the others of its world."""
