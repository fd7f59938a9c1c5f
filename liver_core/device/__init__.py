"""Where tensors live and when what was queued there has happened.

A GPU works later than the host that tells it to. `waits` is the only place where the two are made to agree, `threads`
gives each background thread a queue of its own, and `rank_device` says which device a rank uses.
"""

from liver_core.device.waits import (
    DeviceWait,
    Event,
    await_event,
    follow,
    host_zeros,
    is_host,
    mark,
    read,
    settle,
    settle_all,
)

__all__ = [
    "DeviceWait",
    "Event",
    "await_event",
    "follow",
    "host_zeros",
    "is_host",
    "mark",
    "read",
    "settle",
    "settle_all",
]
