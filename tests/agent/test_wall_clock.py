"""An agent's clock does not follow jumps of the wall clock at once, and is right in the long run."""

from agent.wall_clock import BELIEVED_AFTER_S, WallClock
from liver_core.steady_clock import SteadyClock


class Machine:
    """`passed_s` since the start, `ahead_s` is what its wall clock is off by."""

    def __init__(self) -> None:
        self.passed_s = 0.0
        self.ahead_s = 0.0
        self.clock = SteadyClock(self.wall, self.monotonic)
        self.watch = WallClock(self.clock, self.wall, self.monotonic)

    def wall(self) -> float:
        return 1_700_000_000.0 + self.passed_s + self.ahead_s

    def monotonic(self) -> float:
        return 5_000.0 + self.passed_s

    def passes(self, seconds: float) -> list[str]:
        """What is said meanwhile."""
        said = []
        for _ in range(int(seconds)):
            self.passed_s += 1.0
            said.append(self.watch.check())
        return [text for text in said if text]


def test_a_jump_that_is_taken_back_changes_nothing():
    machine = Machine()
    machine.ahead_s = -300.0
    assert machine.passes(40) == ["the wall clock was put back by 300.0 s: ignored, and believed after 600 s"]
    assert machine.clock.now() == 1_700_000_040.0
    assert machine.clock.monotonic_at(1_700_000_050.0) == 5_050.0
    machine.ahead_s = 0.0
    assert machine.passes(2_000) == ["the wall clock is back where it was before it was put off"]
    assert machine.clock.now() == 1_700_002_040.0
    assert machine.clock.monotonic_at(1_700_000_050.0) == machine.monotonic(), "not before now"


def test_a_clock_that_was_put_right_is_believed_in_the_end():
    machine = Machine()
    machine.ahead_s = 300.0
    assert len(machine.passes(BELIEVED_AFTER_S)) == 1
    assert machine.passes(1) == ["the wall clock, which was put forward by 300.0 s 600 s ago, is believed from now on"]
    assert machine.clock.now() == machine.wall()
    assert machine.passes(2_000) == []


def test_each_jump_is_counted_from_when_it_came():
    machine = Machine()
    machine.ahead_s = 300.0
    machine.passes(BELIEVED_AFTER_S - 1)
    machine.ahead_s = 310.0
    machine.passes(BELIEVED_AFTER_S - 1)
    assert machine.wall() - machine.clock.now() == 310.0
    machine.ahead_s = 310.4  # As a clock is put right a little at a time.
    machine.passes(3)
    assert machine.clock.now() == machine.wall()
