"""What is around the places in which ranks of a simulated world meet: as much of the whole as they ask for. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from liver_core.handoff import Order
from liver_core.layout import Member
from service.simulation.world.conditions import Conditions, Draws
from service.simulation.world.network import Network
from service.simulation.world.observer import Observer
from service.simulation.world.parts import Agent, Rank
from service.simulation.world.service import SimService
from service.simulation.world.virtual_time import VirtualTime


class Surroundings(Protocol):
    """Of `SimulatedWorld`: see there, as for `Whole`."""

    @property
    def clock(self) -> VirtualTime: ...

    @property
    def conditions(self) -> Conditions: ...

    @property
    def observer(self) -> Observer: ...

    @property
    def network(self) -> Network: ...

    @property
    def service(self) -> SimService: ...

    def draw(self) -> float:
        """At least 0, below 1."""
        ...

    def draws(self, of: str) -> Draws:
        """A source of numbers for one thing."""
        ...

    def note(self, text: str) -> None:
        """Write down what happens, if anybody reads it."""

    def agent(self, name: str) -> Agent:
        """Of the node with this name."""
        ...

    def target_ranks(self, order: Order) -> Mapping[Member, Rank]:
        """The processes of a target roster that hold this handoff, or held it."""
        ...
