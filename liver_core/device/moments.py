"""When a device got somewhere. The host only queues work, so its own clock tells when it was asked for.

On a CPU what was asked for has happened once the call returns, and a moment is a time.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import torch

from liver_core.device.waits import DeviceWait, settle


@dataclass(frozen=True, slots=True)
class Moment:
    """A place in the queue of a device. `at_s`: when the host marked it (time.monotonic seconds). `event`: of CUDA;
    None on a CPU."""

    device: torch.device
    at_s: float
    event: Any = None

    def seconds_to(self, later: Moment) -> float | None:
        """Seconds of the device from here to `later`; None while it has not got there. Does not wait."""
        if self.event is None or later.event is None:
            return later.at_s - self.at_s
        return self.event.elapsed_time(later.event) / 1e3 if later.event.query() else None

    def host_s(self) -> float:
        """When the device got here, on the host's clock. Waits for all that this thread has queued."""
        if self.event is None:
            return self.at_s
        now = moment(self.device)
        settle(DeviceWait.BOUNDARY, self.device)
        since_s = self.seconds_to(now)
        assert since_s is not None, "the host has waited for it"
        return time.monotonic() - since_s


def moment(device: torch.device) -> Moment:
    """This place in the queue of the calling thread."""
    if device.type != "cuda":
        return Moment(device, time.monotonic())
    event = torch.cuda.Event(enable_timing=True)
    event.record(torch.cuda.current_stream(device))
    return Moment(device, time.monotonic(), event)
