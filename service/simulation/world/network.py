"""The network between agents, and to the service: it loses, repeats, delays and therefore reorders. Pure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TypeVarTuple

from liver_core.handoff import Order, Report
from liver_core.layout import from_json, to_json
from service.simulation.world.virtual_time import VirtualTime

Ts = TypeVarTuple("Ts")
SENT_UTC = 1_700_000_000.0
"""The clock of the simulation begins at zero; what is sent is of this century."""
ATTEMPTS, RETRY_S = 3, 1.0
"""As in `agent.peer.peer_client`, of a message that nobody repeats."""
HOP_LEAST_S = 0.005
WIRE_EVERY = 61
"""So many messages between two that go through their wire form, which must not change them."""


class Network:
    """Between nodes by name. `is_going`: whether the agent of one is there. `loss`, `repeat`: shares of messages. A
    message takes `least_s`, and at most `delay_s` more. `cut_off`: the nodes that the service does not hear, and
    whether other agents do not hear them either."""

    def __init__(self, clock: VirtualTime, draw: Callable[[], float], is_going: Callable[[str], bool]) -> None:
        self._clock, self._draw, self._is_going = clock, draw, is_going
        self.loss = self.repeat = 0.0
        self.least_s, self.delay_s = HOP_LEAST_S, 0.05
        self.service_away = False
        self.cut_off: dict[str, bool] = {}
        self.sent = 0

    def hop_s(self) -> float:
        """How long one message takes this time."""
        return self.least_s + self.delay_s * self._draw()

    def passes(self, source: str, target: str) -> bool:
        """Whether anything gets from one node to another at all."""
        return source == target or not (self.cut_off.get(source, False) or self.cut_off.get(target, False))

    def reaches(self, source: str, target: str) -> bool:
        """Whether the agent of one node gets an answer from that of the other."""
        return self.passes(source, target) and self._is_going(target)

    def reaches_service(self, name: str) -> bool:
        """Whether a node and the service hear each other."""
        return not self.service_away and name not in self.cut_off

    def send(
        self, source: str, target: str, deliver: Callable[[Order | Report], None], message: Order | Report
    ) -> None:
        """Deliver `message` never, once or twice, at any time within the delay."""
        draw = self._draw
        self.sent += 1
        if not self.passes(source, target) or (self.loss and draw() < self.loss):
            return
        if self.sent % WIRE_EVERY == 0:
            deadline_utc, issued_at = SENT_UTC + message.deadline_utc, SENT_UTC + message.issued_at
            sent = replace(message, deadline_utc=deadline_utc, issued_at=issued_at)
            assert from_json(type(sent), to_json(sent)) == sent
        self._clock.after(self.hop_s(), deliver, message)
        if self.repeat and draw() < self.repeat:
            self._clock.after(HOP_LEAST_S + 6 * self.delay_s * draw(), deliver, message)

    def tell(self, source: str, target: str, deliver: Callable[[*Ts], None], *message: *Ts) -> None:
        """What is sent until it has arrived, a few times: it is lost only where nothing passes, or nobody is there."""
        if self.passes(source, target):
            late_s = 1.0 if self.loss and self._draw() < self.loss else 0.0
            self._clock.after(late_s + self.hop_s(), self._deliver, source, target, 1, partial(deliver, *message))

    def _deliver(self, source: str, target: str, attempt: int, deliver: Callable[[], None]) -> None:
        if self._is_going(target) or attempt >= ATTEMPTS:
            deliver()
        elif self.passes(source, target):
            self._clock.after(RETRY_S, self._deliver, source, target, attempt + 1, deliver)
