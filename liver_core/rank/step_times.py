"""How long a world's steps took lately."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

_WINDOW_STEPS = 32


@dataclass(slots=True)
class Timings:
    """Of this world's ordinary steps, in seconds: whole steps and their part after the boundary."""

    steps: deque[float] = field(default_factory=lambda: deque(maxlen=_WINDOW_STEPS))
    optimizer: deque[float] = field(default_factory=lambda: deque(maxlen=_WINDOW_STEPS))
