"""The conditions of a replay: nothing goes wrong, nothing is drawn, and each part of a change takes as long as it is
said to. Pure."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING

from liver_core.handoff import LadderInputs, Order
from service.simulation.machines.change_times import ChangeTimes, prepared_in_s, read_in_s

if TYPE_CHECKING:
    from liver_core.layout import Member
    from service.simulation.world.parts import RankInPause

UNHURRIED_LEAST_S = 180.0
NEVER = sys.maxsize


class NoDraws:
    """What would be drawn is always the least."""

    def random(self) -> float:
        """Always 0."""
        return 0.0


class SteadyConditions:
    """Steps are of the layout, not of `step_s`; checkpoints are counted by time, so that `checkpoint_every` only says
    whether a world that ends writes one. Set by whoever hosts it: `order_of`, what a member prepares for; `ladder_of`,
    what the ladder knew of that; `pause_left_s`, until a change has lost what its layout says."""

    order_of: Callable[[Member], Order]
    ladder_of: Callable[[Order], LadderInputs]
    pause_left_s: Callable[[Order], float]

    def __init__(self, times: ChangeTimes, *, detect_s: float) -> None:
        self._times = times
        self.step_s, self.parts, self.connects, self.polls = 0.0, 1, False, False
        self.checkpoint_every = NEVER if times.writes_checkpoints else 0
        self.detect_s = self.gather_s = detect_s
        self.settle_s = 0.0
        self.unhurried_s = UNHURRIED_LEAST_S

    def draws(self, of: str) -> NoDraws:
        """The same for all."""
        return NoDraws()

    def chance(self, probability: float) -> bool:
        """Nothing goes another way."""
        return False

    def takes_fault(self, kind: str, member: Member) -> bool:
        """None strikes."""
        return False

    def dies_for_s(self, where: str) -> float | None:
        """Agents of a replay do not die alone."""
        return None

    def safe_by(self, heard_s: float, ends_s: float) -> float:
        """No more of a notice is used than what may be."""
        return heard_s + self._times.usable_share * (ends_s - heard_s)

    def skew_s(self) -> float:
        """All clocks are equal."""
        return 0.0

    def build_s(self, member: Member) -> float:
        """Beside the running world, or after a rescue."""
        return self._times.build_s

    def start_s(self, member: Member) -> float:
        """Ranks of a start meet first, and then load together."""
        return 0.0

    def connect_s(self, member: Member) -> float:
        """All that a rescue needs before its boundary."""
        return self._times.endpoints_s

    def stream_s(self, member: Member) -> float:
        """What is left of the time to prepare once the next world is built."""
        order = self.order_of(member)
        return max(0.0, prepared_in_s(order.rung, self.ladder_of(order)) - self._times.build_s)

    def read_s(self, rank: RankInPause, until: float) -> float:
        """Of a target; nobody else reads."""
        order = rank.order
        assert order is not None
        if rank.member not in order.target.members:
            return 0.0
        return read_in_s(rank.rung if order.streams else order.rung, self.ladder_of(order))

    def switch_s(self, rank: RankInPause) -> float:
        """The pause ends when the change has lost what its layout says."""
        assert rank.order is not None
        return max(0.0, self.pause_left_s(rank.order))
