"""How long the latest steps of a world took."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

_WINDOW_STEPS = 32


@dataclass(slots=True)
class Timings:
    """Seconds of this world's ordinary steps: whole steps, and their part after the boundary."""

    steps: deque[float] = field(default_factory=lambda: deque(maxlen=_WINDOW_STEPS))
    optimizer: deque[float] = field(default_factory=lambda: deque(maxlen=_WINDOW_STEPS))
