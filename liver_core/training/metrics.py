"""What a job reports of its own: numbers by name, checked where they are reported. Pure, and needs no torch."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

from liver_core.layout.limits import BUILT_IN_METRICS, METRIC_CHARS_MAX, METRIC_PATTERN, METRICS_PER_STEP_MAX

NAMES_MAX = 256
"""Different names in the life of a rank process: a name that is made from a number would fill every list."""
_NAME = re.compile(METRIC_PATTERN)


def checked_metrics(values: Mapping[str, Any]) -> dict[str, float | None]:
    """As they are stored: None for NaN and infinity. Raises ValueError with the name and the rule that it breaks."""
    if not isinstance(values, Mapping):
        raise ValueError(f"report: values must be a dict of names and numbers, is {type(values).__name__}")
    return {_checked_name(name): _number(name, value) for name, value in values.items()}


class ReportedMetrics:
    """What the hooks of one step report: between `open` and `close` only, and for that step only."""

    def __init__(self) -> None:
        self._step: int | None = None
        self._values: dict[str, float | None] = {}
        self._names: set[str] = set()

    def open(self, step: int) -> None:
        """The hooks of this step run from now on."""
        self._step, self._values = step, {}

    def take(self, step: int, values: Mapping[str, float | None]) -> None:
        """Keep them; a name that is reported again replaces its value. Raises ValueError with the rule."""
        if self._step is None:
            raise ValueError("report: call it in on_step or validate, not outside of these hooks")
        if step != self._step:
            raise ValueError(f"report: step must be that of the hook, {self._step}, is {step!r}")
        together, names = self._values | dict(values), self._names | values.keys()
        if len(together) > METRICS_PER_STEP_MAX:
            raise ValueError(f"report: step {step} has {len(together)} names, at most {METRICS_PER_STEP_MAX} in a step")
        if len(names) > NAMES_MAX:
            raise ValueError(f"report: there are {len(names)} different names by now, at most {NAMES_MAX} in a job")
        self._values, self._names = together, names

    def close(self) -> dict[str, float | None]:
        """The hooks are done: what they reported."""
        values, self._step, self._values = self._values, None, {}
        return values


def _checked_name(name: Any) -> str:
    if not isinstance(name, str) or len(name) > METRIC_CHARS_MAX or _NAME.fullmatch(name) is None:
        rule = f"must be 1 to {METRIC_CHARS_MAX} letters, digits and . _ / -, and begin with a letter or digit"
        raise ValueError(f"report: the name {name!r:.100} {rule}")
    if name in BUILT_IN_METRICS:
        raise ValueError(f"report: the name {name!r} is taken, LiveR reports it by itself; use another one")
    return name


def _number(name: str, value: Any) -> float | None:
    try:
        if isinstance(value, str | bytes):
            raise TypeError
        number = float(value)
    except (TypeError, ValueError, RuntimeError, OverflowError):
        # A tensor of several elements raises RuntimeError, an int beyond every float OverflowError.
        raise ValueError(f"report: {name} must be a number, or a tensor of one, is {value!r:.100}") from None
    return number if math.isfinite(number) else None
