"""Times of a step are the device's: with a model of CUDA's events, whose clock is the test's."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch

from liver_core.device import moments
from liver_core.device.moments import moment
from liver_core.rank import next_world
from liver_core.rank.active_world import Timings
from liver_core.rank.next_world import NextWorld

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)


class Device:
    """`now_s`: how far its clock has got. Work of `seconds` that is queued ends so much later; `done_s`: what has ended
    by now."""

    def __init__(self) -> None:
        self.queued_s = self.done_s = 0.0

    def work(self, seconds: float) -> None:
        self.queued_s += seconds

    def finish(self) -> None:
        self.done_s = self.queued_s


class Event:
    device: Device

    def __init__(self, *, enable_timing: bool) -> None:
        assert enable_timing, "an event without times"

    def record(self, stream: object) -> None:
        self.at_s = self.device.queued_s

    def query(self) -> bool:
        return self.at_s <= self.device.done_s

    def elapsed_time(self, later: Event) -> float:
        assert self.query() and later.query(), "CUDA raises here"
        return 1e3 * (later.at_s - self.at_s)


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    made = Device()
    monkeypatch.setattr(Event, "device", made, raising=False)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
    monkeypatch.setattr(moments, "settle", lambda why, device: made.finish())
    return made


def test_on_a_cpu_a_moment_is_a_time():
    first, second = moment(CPU), moment(CPU)
    assert first.seconds_to(second) == second.at_s - first.at_s
    assert first.host_s() == first.at_s


def test_the_time_of_an_optimizer_step_is_the_devices_and_is_known_once_it_has_ended(device: Device):
    timings = Timings()
    for seconds in (3.0, 5.0):
        reduced = moment(CUDA)
        device.work(seconds)
        timings.applied(reduced, moment(CUDA), waited_s=0.5)
    assert list(timings.optimizer) == [], "the host has only launched it"
    device.finish()
    timings.applied(moment(CUDA), moment(CUDA), waited_s=0.0)
    assert list(timings.optimizer) == [2.5, 4.5, 0.0]


def test_a_pause_begins_when_the_gradients_were_reduced_and_not_when_the_host_had_asked_for_that(device: Device):
    device.work(100.0)
    reduced = moment(CUDA)
    device.work(7.0)
    asked = time.monotonic()
    assert reduced.host_s() == pytest.approx(asked - 7.0, abs=1.0)


def test_a_pause_ends_when_the_device_begins_the_first_forward_pass_and_not_when_the_host_has_asked_for_it(
    device: Device, monkeypatch: pytest.MonkeyPatch
):
    """The optimizer's step of the switch is only launched by then."""
    monkeypatch.setattr(next_world, "own_device", lambda: CUDA)
    absent: Any = None
    following = NextWorld(absent, absent, None, 0, 0)
    asked = time.time()
    device.work(100.0)
    following.begins_forward()
    device.work(7.0)
    following.begins_forward()  # That step was dropped.
    device.work(20.0)
    following.has_stepped(27.0)
    assert following.measures["first_forward_at_utc"] == pytest.approx(asked - 27.0, abs=1.0)
    assert following.measures["first_step_s"] == 27.0


def test_a_moment_that_the_device_has_not_reached_is_not_waited_for(device: Device):
    first = moment(CUDA)
    device.work(1.0)
    later = moment(CUDA)
    assert first.seconds_to(later) is None
    device.finish()
    assert first.seconds_to(later) == 1.0
