"""How the ranks of a world that the service has started begin: they build, and meet in its store. Pure."""

from __future__ import annotations

from liver_core.handoff import FailedPart, FailureCause, Order, Reason
from liver_core.layout import Member
from service.simulation.world.parts import Agent, Rank
from service.simulation.world.whole import Whole


class Starts:
    """Of one job."""

    def __init__(self, simulation: Whole) -> None:
        self.simulation = simulation
        self._gatherings: dict[str, Gathering] = {}

    def launch(self, agent: Agent, order: Order) -> None:
        """The rank of a start on this node."""
        sim = self.simulation
        rank = agent.start_process(order)
        rank.leased_until = 0.0  # It has a lease when its agent gives it one.
        sim.checkpoints.announce(order.generation)
        sim.observer.rank_starts(agent.member, order.generation, agent.journal)
        sim.clock.after(sim.conditions.start_s(agent.member), self._meet, rank, order)

    def _meet(self, rank: Rank, order: Order) -> None:
        if rank.alive:
            if order.handoff_id not in self._gatherings:
                self._gatherings[order.handoff_id] = Gathering(self.simulation, order)
            self._gatherings[order.handoff_id].enter(rank)


class Gathering:
    """Where the ranks of one start meet, in its store: all of them go on together or nobody does."""

    def __init__(self, simulation: Whole, order: Order) -> None:
        self.simulation = simulation
        self.order = order
        self.ranks: dict[Member, Rank] = {}
        self.is_over = False
        simulation.clock.after(simulation.conditions.gather_s, self._give_up)

    def enter(self, rank: Rank) -> None:
        """All have come when the last has, and lives."""
        self.ranks[rank.member] = rank
        complete = len(self.ranks) == len(self.order.target.members)
        if self.is_over or not complete or not all(each.alive for each in self.ranks.values()):
            return
        self.is_over = True
        world = self.simulation.begin_world(self.order.target)
        for each in self.ranks.values():
            each.begin_training(world, int(self.order.checkpoint or 0))

    def _give_up(self) -> None:
        if not self.is_over:
            self.is_over = True
            for each in self.ranks.values():
                peer = FailureCause(FailedPart.PEER)
                each.break_down(Reason("not all ranks of the start came", "start", 0, cause=peer))
