"""One simulated world: a virtual clock, a network, the agents and ranks of a job, and where ranks meet. Pure.

Every node hosts the product's machines. `Conditions` say how long things take and what goes wrong; an `Observer` sees
what happens.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

from agent.protocol.sync import NoticeFact, NoticeKind
from liver_core.handoff import (
    FailedPart,
    FailureCause,
    Order,
    ParticipantRecord,
    Phase,
    Reason,
)
from liver_core.handoff.cutover import BoundaryAgreed
from liver_core.handoff.leader_events import Planner
from liver_core.handoff.participant_events import RankReported
from liver_core.handoff.proposer_events import Proposal
from liver_core.layout import Member, Roster
from service.simulation.world.agents import SimAgent
from service.simulation.world.barrier import Barrier
from service.simulation.world.building import Building
from service.simulation.world.checkpoints import Checkpoints
from service.simulation.world.conditions import Conditions, Draws
from service.simulation.world.connecting import Connecting
from service.simulation.world.convergence import Convergence
from service.simulation.world.moments import seconds_at, utc
from service.simulation.world.network import Network
from service.simulation.world.observer import Attempt, Observer, attempt_of
from service.simulation.world.parts import Agent, Rank, World
from service.simulation.world.ranks import SimRank
from service.simulation.world.reports import Proposal as Wanted
from service.simulation.world.service import SimService
from service.simulation.world.starts import Starts
from service.simulation.world.store import SimStore
from service.simulation.world.virtual_time import VirtualTime
from service.simulation.world.whole import Machines
from service.simulation.world.worlds import SimWorld


class SimulatedWorld(ABC):
    """Of one job."""

    job_id = "job"
    service: SimService

    def __init__(
        self, conditions: Conditions, observer: Observer | None = None, machines: Machines | None = None
    ) -> None:
        self.conditions, self.observer, self.machines = conditions, observer or Observer(), machines or Machines()
        self.clock = VirtualTime()
        self.network = Network(self.clock, self.draw, lambda name: self.agent(name).is_going)
        self.chain = [1]  # the training state at each version, the same in every layout, in one number
        self.notes: list[tuple[float, str]] | None = None  # a list when somebody wants to read along
        self.orders: dict[tuple[Attempt, Phase], Order] = {}
        self.stores: dict[Attempt, SimStore] = {}
        self.barriers: dict[tuple[Attempt, int], Barrier] = {}
        self.convergences: dict[tuple[Attempt, int], Convergence] = {}
        self.buildings: dict[tuple[Attempt, int], Building] = {}
        self.connectings: dict[tuple[Attempt, int], Connecting] = {}
        self.worlds: dict[int, SimWorld] = {}
        self.certified: dict[Attempt, set[Member]] = {}  # whose state is known to be right
        self.agents: dict[Member, SimAgent] = {}
        self.announced: dict[str, NoticeFact] = {}  # nodes that will go, as their clouds say
        self.died_at: dict[Member, float] = {}  # when the newest rank process of each ended
        self.ids = 0
        self.checkpoints = Checkpoints(self)
        self.starts = Starts(self)
        self._draws = conditions.draws("everything else")

    # How it begins, and what happens from outside.

    def add_agent(self, member: Member, record: ParticipantRecord, *, incarnation: int = 1) -> SimAgent:
        """A node with an agent, which works from now on. `incarnation`: its first one, where a machine of this name
        has been there before."""
        agent = self.agents[member] = SimAgent(self, member, record, incarnation=incarnation)
        self.service.node_came(member.node_id, incarnation=incarnation)
        agent.begin()
        return agent

    def announce(self, name: str, ends_s: float, *, by_node: bool) -> None:
        """A node will go at `ends_s`. Its own agent hears that first, or the service."""
        agent = self.agent(name)
        heard_s = agent.now if by_node else self.clock.now
        fact = NoticeFact(
            node_id=name,
            kind=NoticeKind.INTERRUPTION,
            source="simulated",
            deadline_utc=utc(ends_s),
            first_seen_utc=utc(heard_s),
        )
        self.announced[name] = fact
        if by_node:
            agent.take_notices((fact,))
        elif not self.network.service_away:
            self.clock.after(self.network.hop_s(), self.service.hear_notice, name, heard_s, ends_s)

    def withdraw(self, name: str) -> None:
        """It stays after all, as its own agent hears, or the service."""
        fact = self.announced.pop(name, None)
        if fact is None:
            return
        agent = self.agent(name)
        stays = fact.model_copy(update={"withdrawn_utc": utc(max(agent.now, seconds_at(fact.first_seen_utc)))})
        if agent.is_going:
            agent.take_notices((stays,))
        self.clock.after(self.network.hop_s(), self.service.withdraw_notice, name)

    def set_service_away(self, is_away: bool) -> None:
        """Nobody reaches the service, or it is there again."""
        if is_away != self.network.service_away:
            self.network.service_away = is_away
            (self.service.stop_listening if is_away else self.service.listen_again)()

    # What the parts ask of the whole.

    def draw(self) -> float:
        """At least 0, below 1."""
        return self._draws.random()

    def draws(self, of: str) -> Draws:
        """A source of numbers for one thing."""
        return self.conditions.draws(of)

    def step_s(self, world: World) -> float:
        """Of the step that this world makes now."""
        return self.conditions.step_s

    def part_s(self, world: World) -> float:
        """Of the parts after which that can be dropped; the last one may be shorter."""
        return self.step_s(world) / self.conditions.parts

    def value(self, version: int) -> int:
        """The one correct state at a version."""
        while len(self.chain) <= version:
            self.chain.append(hash((self.chain[-1], len(self.chain))) & 0xFFFFFFFFFFFF)
        return self.chain[version]

    def note(self, text: str) -> None:
        """Write down what happens, if anybody reads it."""
        if self.notes is not None:
            self.notes.append((self.clock.now, text))

    def remember(self, order: Order) -> None:
        """The newest order of each phase of each handoff, so that it can arrive once more at any time."""
        self.orders[attempt_of(order), order.phase] = order

    def store(self, order: Order) -> SimStore:
        """The store of this handoff's target generation."""
        if attempt_of(order) not in self.stores:
            self.stores[attempt_of(order)] = SimStore(self, order)
        store = self.stores[attempt_of(order)]
        if order.plan_revision > store.order.plan_revision:
            store.order = order
        return store

    def barrier(self, order: Order) -> Barrier:
        """The barrier of the target world."""
        key = (attempt_of(order), order.target_revision)
        if key not in self.barriers:
            self.barriers[key] = Barrier(self, order)
        return self.barriers[key]

    def building(self, order: Order) -> Building:
        """Where the ranks of this target build it after a rescue."""
        key = (attempt_of(order), order.target_revision)
        if key not in self.buildings:
            self.buildings[key] = Building(self, order)
        return self.buildings[key]

    def convergence(self, order: Order) -> Convergence:
        """Where the ranks of this target agree how the state moves."""
        key = (attempt_of(order), order.target_revision)
        if key not in self.convergences:
            self.convergences[key] = Convergence(self, order, self.store(order))
        return self.convergences[key]

    def world_of(self, order: Order) -> SimWorld:
        """The target world, made by the first rank that switches to it."""
        if order.generation not in self.worlds:
            self.worlds[order.generation] = SimWorld(self, order.target, is_begun=True)
        return self.worlds[order.generation]

    def target_ranks(self, order: Order) -> dict[Member, SimRank]:
        """The processes of a target roster that hold this handoff, or held it until they were ended for a start."""
        held = {}
        for member in order.target.members:
            agent = self.agents[member]
            for rank in (agent.rank, *agent.given_up):
                if rank is not None and rank.order is not None and attempt_of(rank.order) == attempt_of(order):
                    held[member] = rank
        return held

    def connecting(self, order: Order) -> Connecting:
        """Where the ranks of this target make their communicators."""
        key = (attempt_of(order), order.target_revision)
        if key not in self.connectings:
            self.connectings[key] = Connecting(self, order)
        return self.connectings[key]

    def connects_now(self, order: Order) -> None:
        """The store tells newcomers that the ranks of the source world make communicators now."""
        for newcomer in self._newcomers(order):
            if newcomer.pending.awaits_boundary:
                delay_s = 0.05 + 0.3 * self.draw()
                self.clock.after(delay_s, self.connecting(order).enter, newcomer, newcomer.build_number)

    def boundary_posted(self, order: Order, boundary: BoundaryAgreed) -> None:
        """The store tells newcomers that the boundary is past. Each looks when it has permission."""
        self.store(order).boundary = boundary
        for newcomer in self._newcomers(order):
            delay_s = 0.05 + 0.3 * self.draw()
            self.clock.after(delay_s, newcomer._look_for_boundary)

    def _newcomers(self, order: Order) -> list[SimRank]:
        ranks = [self.agents[member].rank for member in order.target.members]
        return [
            rank
            for rank in ranks
            if rank is not None and rank.alive and rank.world is None and rank.order is not None
            if attempt_of(rank.order) == attempt_of(order)
        ]

    def rank_says(self, rank: Rank, event: RankReported) -> None:
        """To the agent, in order."""
        if self.notes is not None:
            why = "" if event.reason is None else f": {event.reason}"
            self.note(f"{rank.member.node_id} {event.stage}{why}")
        rank.reports_until = max(rank.reports_until, self.clock.now + 0.01 + 0.05 * self.draw())
        self.clock.after(rank.reports_until - self.clock.now, self.agents[rank.member].rank_reported, rank, event)

    def rank_exited(self, rank: Rank, reason: Reason | None) -> None:
        """Its agent sees that the process has ended, and how. `reason`: what it ends with, None where it was killed."""
        self.died_at[rank.member] = self.clock.now
        name = rank.member.node_id
        self.note(f"{name} rank exits")
        number = rank.order.rank_of(rank.member) if rank.order is not None else 0
        killed = Reason("was killed by SIGKILL", "supervise", number, cause=FailureCause(FailedPart.RANK, "SIGKILL"))
        delay_s = max(rank.reports_until - self.clock.now, 0.0) + 0.02
        self.agents[rank.member].rank_exits(rank, reason or killed, delay_s)

    def begin_world(self, roster: Roster) -> SimWorld:
        """A world that the service has started."""
        world = self.worlds[roster.generation] = SimWorld(self, roster, is_begun=False)
        return world

    def current_world(self) -> SimWorld | None:
        """The newest world if all its ranks live in it."""
        if not self.worlds:
            return None
        world = self.worlds[max(self.worlds)]
        ranks = [self.agents[member].rank for member in world.roster.members]
        whole = not world.dead and all(rank is not None and rank.alive and rank.world is world for rank in ranks)
        return world if whole else None

    # Agents.

    def agent(self, name: str) -> SimAgent:
        """Of the node with this name."""
        return self.agents[Member(name, 0)]

    def is_gone(self, member: Member) -> bool:
        """Whether no rank lives there."""
        rank = self.agents[member].rank
        return rank is None or not rank.alive

    def new_handoff_id(self) -> str:
        """Numbers handoffs and starts, by whomever they are made."""
        self.ids += 1
        return f"h{self.ids}"

    def orders_changed(self) -> None:
        """The service has news: whoever waits for them gets them at once."""
        for agent in self.agents.values():
            if agent.up or self.conditions.polls:
                self.clock.after(self.network.hop_s(), agent.link.wake)

    def launch(self, agent: Agent, order: Order) -> None:
        """The rank of a start begins."""
        self.starts.launch(agent, order)

    def repeat_old_orders(self, agent: Agent) -> None:
        """Orders of any age arrive again."""
        for order in list(self.orders.values())[-8:]:
            self.clock.after(3 * self.draw(), agent.receive, order)

    def layout_of(self, proposal: Proposal) -> object:
        """What the host calls the layout of a handoff."""
        return None

    def digest_of(self, wanted: Wanted) -> str:
        """What stands for the plan of a handoff that the service proposes."""
        return f"d{len(wanted.target.members)}"

    @abstractmethod
    def planner(self, agent: Agent) -> Planner:
        """What the leader of this agent asks about the job."""
