"""Equality of values that may hold NaN, as numbers of a job do. Pure.

`==` calls a NaN unequal to itself. In dicts, lists and tuples it does so only where the two are not one object, and for
dataclasses that depends on the release of Python.
"""

import math
from typing import Any


def same_number(one: float, other: float) -> bool:
    """Whether they are equal; NaN is equal to NaN."""
    return one == other or (math.isnan(one) and math.isnan(other))


def same_value(one: Any, other: Any) -> bool:
    """The same for any value that is no tensor, also inside nested dicts, lists and tuples; a list is no tuple."""
    match one, other:
        case float(), float():
            return same_number(one, other)
        case dict(), dict():
            return one.keys() == other.keys() and all(same_value(value, other[key]) for key, value in one.items())
        case (list(), list()) | (tuple(), tuple()):
            return len(one) == len(other) and all(map(same_value, one, other))
    return one == other
