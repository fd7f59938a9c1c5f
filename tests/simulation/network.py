"""The network between proposers and participants: loses, repeats, delays and therefore reorders. Pure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from liver_core.handoff import Order, Report
from liver_core.layout import from_json, to_json

if TYPE_CHECKING:
    from tests.simulation.simulation import Simulation

SERVICE = "service"
SENT_UTC = 1_700_000_000.0
"""The clock of the simulation begins at zero; what is sent is of this century."""


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
            deadline_utc, issued_at = SENT_UTC + message.deadline_utc, SENT_UTC + message.issued_at
            sent = replace(message, deadline_utc=deadline_utc, issued_at=issued_at)
            assert from_json(type(sent), to_json(sent)) == sent
        self.simulation.clock.after(0.005 + self.delay_s * random(), deliver, message)
        if self.repeat and random() < self.repeat:
            self.simulation.clock.after(0.005 + 6 * self.delay_s * random(), deliver, message)
