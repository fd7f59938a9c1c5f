"""What was enacted in a replay by the machines: every handoff and every start, with how it ended. Pure."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from uuid import UUID


@dataclass(frozen=True, slots=True)
class Enacted:
    """One attempt to have another world, from `at_s` to `end_s`. `how`: start, restart, or the rung of a handoff;
    `ended`: the stage in which a handoff ended; of a start, active from its first step on, and failed where it made
    none before the service did something else; open at the end of the trace. `revisions`: of its plan, so that 1 is one
    without an amendment."""

    at_s: float
    generation: int
    how: str
    reason: str
    end_s: float
    ended: str
    decision: str = ""
    revisions: int = 1


def counted(all_of_them: Iterable[Enacted]) -> dict[str, int]:
    """How often each thing happened, by rung and end; amended plans besides, where there are any."""
    kept = tuple(all_of_them)
    found = Counter(f"{each.how} {each.ended}" for each in kept)
    if amended := sum(each.revisions - 1 for each in kept):
        found["amended"] = amended
    return dict(sorted(found.items()))


def handoff_id_of(number: int) -> str:
    """Handoffs and starts of a replay are numbered, so that the same replay gives the same run."""
    return str(UUID(int=number))
