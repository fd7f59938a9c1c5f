"""The word that every rank contributes to the tiny all-reduce at every step boundary, and what the result means.

Pure. handoff.md section 5.2 asks for a MIN over one 64-bit word. MIN alone cannot tell "all hold this tag" from "I hold
the smallest tag", so the host reduces the pair `boundary_pair(word)` with MIN: the second entry gives the maximum.
"""

import hashlib
from dataclasses import dataclass
from enum import IntEnum

from liver_core.handoff.messages import HandoffId

_PHASE_BITS = 4
_TAG_BITS = 59  # with the phase 63 bits, so that a word is never negative as a signed 64-bit integer
TAG_MAX = 2**_TAG_BITS - 1


class BoundaryPhase(IntEnum):
    """What a rank wants of the boundary. A rank that has several requests shows the greatest.

    DROP is shown between two parts of a step only, and nothing else is shown there. CONNECT in place of READY: before
    they can cut over, the ranks make the communicators of the next world, all at the same boundary.
    """

    NONE = 0
    CHECKPOINT = 1
    READY = 2
    STOP = 3
    DROP = 4
    CONNECT = 5


@dataclass(frozen=True, slots=True)
class Agreement:
    """What all ranks of a world asked for with one voice."""

    phase: BoundaryPhase
    tag: int


NOTHING_WANTED = 0
"""The word of a rank that just trains."""


def ready_tag(handoff_id: HandoffId, plan_revision: int) -> int:
    """The tag of one revision of one handoff, in 1..TAG_MAX: equal on every rank without any exchange."""
    digest = hashlib.sha256(f"{handoff_id}/{plan_revision}".encode()).digest()
    return int.from_bytes(digest[:8], "big") % TAG_MAX + 1


def drop_word(word: int) -> int:
    """What a rank that would show `word` at the end of its step shows between two parts of it, where its order allows
    to drop the step: the same tag, or nothing where its greatest wish is another one than to cut over."""
    asked = agreed(word, word)
    if asked is None or asked.phase is not BoundaryPhase.READY:
        return NOTHING_WANTED
    return pack(asked.tag, BoundaryPhase.DROP)


def connect_word(word: int) -> int:
    """What a rank that would show `word` shows at the end of a step while its next world has no communicators yet."""
    asked = agreed(word, word)
    if asked is None or asked.phase is not BoundaryPhase.READY:
        return word
    return pack(asked.tag, BoundaryPhase.CONNECT)


def pack(tag: int, phase: BoundaryPhase) -> int:
    """The boundary word: a non-negative signed 64-bit integer."""
    if not 0 <= tag <= TAG_MAX:
        raise ValueError(f"tag: must be in 0..{TAG_MAX}, is {tag}")
    return tag << _PHASE_BITS | phase


def boundary_pair(word: int) -> tuple[int, int]:
    """The two int64 values to reduce with MIN; `agreed(reduced[0], -reduced[1])` reads the result."""
    return (word, -word)


def agreed(min_word: int, max_word: int) -> Agreement | None:
    """What all ranks asked for, or None: some ask nothing, or not all the same."""
    if min_word != max_word or min_word == NOTHING_WANTED:
        return None
    return Agreement(phase=BoundaryPhase(min_word & 2**_PHASE_BITS - 1), tag=min_word >> _PHASE_BITS)
