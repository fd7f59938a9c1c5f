"""Decides when a job's peer key changes. Pure.

Any two nodes that have a part in a job, and have got orders for it, have a valid key in common, also when one of them
is cut off from the service. For this, a key is dropped only when each of them keeps the next one, or has no part in the
job any more; and the next but one is made only after that.
"""

from collections.abc import Collection
from enum import StrEnum


class KeyStep(StrEnum):
    """What to do with a job's keys."""

    KEEP = "keep"
    ROTATE = "rotate"
    DROP = "drop"


def next_step(*, has_before: bool, ended: Collection[str], waiting: Collection[str]) -> KeyStep:
    """`has_before`: two keys are valid. `ended`: nodes whose grant has ended since the current key was made. `waiting`:
    nodes with a part in the job that may not have it."""
    if has_before:
        return KeyStep.KEEP if waiting else KeyStep.DROP
    return KeyStep.ROTATE if ended else KeyStep.KEEP
