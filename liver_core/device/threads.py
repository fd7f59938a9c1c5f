"""Background threads that use a device: each has a queue of its own, so that none waits behind a training step.

Torch's current stream is one and the same in every thread until a thread sets another.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch

from liver_core.device.rank_device import own_device
from liver_core.device.waits import DeviceWait, mark, streams_of


def background(
    action: Callable[..., Any], *, name: str, args: tuple[Any, ...] = (), after_s: float = 0.0
) -> threading.Thread:
    """A daemon thread that runs `action` on a queue of its own, not started yet. What it queues comes after all that
    the thread that made it has queued by then. It starts `after_s` seconds late."""
    work = _OnOwnQueue(action, own_device())
    if after_s:
        thread: threading.Thread = threading.Timer(after_s, work, args)
    else:
        thread = threading.Thread(target=work, args=args)
    thread.name, thread.daemon = name, True
    return thread


class _OnOwnQueue:
    def __init__(self, action: Callable[..., Any], device: torch.device) -> None:
        self._action = action
        self._device = device
        self._after = mark(device)

    def __call__(self, *args: Any) -> None:
        streams = streams_of(self._device)
        with streams.own(self._device):
            streams.follow(DeviceWait.STARTED, self._after)
            self._action(*args)
