"""What agents, ranks and worlds ask of the simulated world that they are parts of. Pure.

Parts and whole know each other, and modules must not: `Whole` names exactly what parts use of `SimulatedWorld`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from agent.protocol.sync import NoticeFact
from liver_core.handoff import Cutover, Order, Participant, Proposal, Reason
from liver_core.handoff.cutover import BoundaryAgreed
from liver_core.handoff.leader import Leader
from liver_core.handoff.leader_events import Planner
from liver_core.handoff.participant_events import RankReported
from liver_core.handoff.pending import Pending
from liver_core.layout import Member, Roster
from service.simulation.world.barrier import Barrier
from service.simulation.world.building import Building
from service.simulation.world.checkpoints import Checkpoints
from service.simulation.world.connecting import Connecting
from service.simulation.world.convergence import Convergence
from service.simulation.world.observer import Attempt
from service.simulation.world.parts import Agent, Rank, World
from service.simulation.world.reports import Proposal as Wanted
from service.simulation.world.store import SimStore
from service.simulation.world.surroundings import Surroundings


@dataclass(frozen=True, slots=True)
class Machines:
    """The machines that hosts run; a planted bug replaces one."""

    leader: type[Leader] = Leader
    participant: type[Participant] = Participant
    cutover: type[Cutover] = Cutover
    pending: type[Pending] = Pending


class Whole(Surroundings, Protocol):
    """Of one job."""

    @property
    def job_id(self) -> str: ...

    @property
    def machines(self) -> Machines: ...

    @property
    def agents(self) -> Mapping[Member, Agent]: ...

    @property
    def worlds(self) -> Mapping[int, World]:
        """By generation."""
        ...

    @property
    def checkpoints(self) -> Checkpoints: ...

    @property
    def announced(self) -> Mapping[str, NoticeFact]:
        """Nodes that will go, as their clouds say."""
        ...

    @property
    def certified(self) -> dict[Attempt, set[Member]]:
        """Whose state is known to be right."""
        ...

    # What an agent asks.

    def planner(self, agent: Agent) -> Planner:
        """What its leader asks about the job."""
        ...

    def new_handoff_id(self) -> str:
        """Numbers handoffs, by whomever they are made."""
        ...

    def layout_of(self, proposal: Proposal) -> object:
        """What the host calls the layout of a handoff."""
        ...

    def digest_of(self, wanted: Wanted) -> str:
        """What stands for the plan of a handoff that the service proposes."""
        ...

    def remember(self, order: Order) -> None:
        """So that it can arrive once more."""

    def repeat_old_orders(self, agent: Agent) -> None:
        """Orders of any age arrive again."""

    def launch(self, agent: Agent, order: Order) -> None:
        """The rank of a start begins."""

    # What a rank asks.

    def rank_says(self, rank: Rank, event: RankReported) -> None:
        """To its agent, in order."""

    def rank_exited(self, rank: Rank, reason: Reason | None) -> None:
        """Its agent sees that the process has ended. `reason`: None where it was killed."""

    def is_gone(self, member: Member) -> bool:
        """Whether no rank lives there."""
        ...

    def value(self, version: int) -> int:
        """The one correct state at a version."""
        ...

    def connects_now(self, order: Order) -> None:
        """Newcomers are told that the ranks of the source world make communicators."""

    def boundary_posted(self, order: Order, boundary: BoundaryAgreed) -> None:
        """Newcomers are told that the boundary is past."""

    # Where ranks meet.

    def store(self, order: Order) -> SimStore: ...

    def barrier(self, order: Order) -> Barrier: ...

    def building(self, order: Order) -> Building: ...

    def convergence(self, order: Order) -> Convergence: ...

    def connecting(self, order: Order) -> Connecting: ...

    # Worlds.

    def world_of(self, order: Order) -> World:
        """The target world, made by the first rank that switches to it."""
        ...

    def begin_world(self, roster: Roster) -> World:
        """One that the service has started."""
        ...

    def step_s(self, world: World) -> float:
        """Of the step that it makes now."""
        ...

    def part_s(self, world: World) -> float:
        """Of the parts after which that can be dropped."""
        ...
