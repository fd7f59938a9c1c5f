"""Where the ranks of a next world make their communicators. Pure."""

from __future__ import annotations

from liver_core.handoff import FailedPart, FailureCause, Order, Reason
from liver_core.layout import Member
from service.simulation.world.parts import Rank
from service.simulation.world.surroundings import Surroundings

CONNECT_S = 3.0
_PEER = FailureCause(FailedPart.PEER)


class Connecting:
    """Of one next world: all ranks make them, or each sees it fail in time."""

    def __init__(self, simulation: Surroundings, order: Order) -> None:
        self.simulation, self._settle_s = simulation, simulation.conditions.settle_s
        self.members = set(order.target.members)
        self.ranks: dict[Member, tuple[Rank, int]] = {}

    def enter(self, rank: Rank, build: int) -> None:
        """`rank` makes those of its build. A leaver makes none."""
        clock = self.simulation.clock
        if rank.member not in self.members:
            clock.after(0.01, rank.connected, build, None)
            return
        self.ranks[rank.member] = rank, build
        clock.after(
            CONNECT_S, rank.connected, build, Reason("not all ranks came", "connect", rank.cutover_rank, cause=_PEER)
        )
        if self.ranks.keys() >= self.members and all(each.alive for each, _ in self.ranks.values()):
            for each, number in self.ranks.values():
                clock.after(0.05 + (0.1 + 3.0 * self._settle_s) * self.simulation.draw(), each.connected, number, None)
