"""The network between proposers and participants: loses, repeats, delays and therefore reorders. Pure."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from liver_core.handoff import Order, Report

if TYPE_CHECKING:
    from tests.simulation.simulation import Simulation

SERVICE = "service"


class Network:
    """Messages between hosts by name; the service can be away."""

    def __init__(self, simulation: Simulation) -> None:
        self.simulation = simulation
        self.loss = 0.0
        self.repeat = 0.0
        self.delay_s = 0.05
        self.service_away = False
        self.sent = 0

    def send(
        self, source: str, target: str, deliver: Callable[[Order | Report], None], message: Order | Report
    ) -> None:
        """Deliver `message` never, once or twice, at any time within the delay."""
        random = self.simulation.random.random
        self.sent += 1
        if self.service_away and SERVICE in (source, target):
            return
        if self.loss and random() < self.loss:
            return
        # Now and then a message goes through its wire form, which must not change it.
        if self.sent % 61 == 0:
            assert type(message).from_json(message.to_json()) == message
        self.simulation.clock.after(0.005 + self.delay_s * random(), deliver, message)
        if self.repeat and random() < self.repeat:
            self.simulation.clock.after(0.005 + 6 * self.delay_s * random(), deliver, message)
