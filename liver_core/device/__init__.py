"""Where tensors live and when what was queued there has happened.

A GPU works later than the host that tells it to. `waits` is the only place where the two are made to agree, `threads`
gives each background thread a queue of its own, and `placement` says which device a rank uses.
"""

from liver_core.device.waits import (
    Event,
    Wait,
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
    "Event",
    "Wait",
    "await_event",
    "follow",
    "host_zeros",
    "is_host",
    "mark",
    "read",
    "settle",
    "settle_all",
]
