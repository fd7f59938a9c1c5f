"""Rebuilds from a training log what ranks did, to hold the ledger against it. Pure; knows nothing of the ledger's code.

Each rank writes a line a step: `step 7 generation 1 loss 0.691234 0.120 s at 2026-01-01T12:00:00.123456+00:00`.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime

ALLOWED = 0.005
"""By which share of it the productive time of log and ledger may differ."""
_STEP = re.compile(r"\bstep (\d+) generation (\d+) .*?([\d.]+) s at (\d{4}-\d\d-\d\dT[\d:.]+(?:Z|[+-]\d\d:\d\d))")


@dataclass(frozen=True, slots=True)
class LoggedStep:
    """One step, ended at `at` on the rank's clock (seconds since 1970)."""

    generation: int
    step: int
    seconds: float
    at: float


@dataclass(frozen=True, slots=True)
class WorldAccount:
    """One generation, as the API has it. `slots`: of its ranks, as node and number. `pause_s`: the measured pause of
    the handoff that made it; None where a start made it. `productive_s`: slot seconds, as the ledger has them."""

    generation: int
    slots: frozenset[tuple[str, int]]
    pause_s: float | None
    productive_s: float


@dataclass(frozen=True, slots=True)
class Compared:
    """One generation: productive slot seconds by the log and by the ledger."""

    generation: int
    ranks: int
    steps: int
    log_s: float
    ledger_s: float


def read_log(lines: Iterable[str]) -> list[LoggedStep]:
    """The steps that a log names, in order; of a step that several ranks name, the first line counts."""
    found: dict[tuple[int, int], LoggedStep] = {}
    for line in lines:
        if match := _STEP.search(line):
            step, generation = int(match[1]), int(match[2])
            ended_at = datetime.fromisoformat(match[4]).timestamp()
            found.setdefault((generation, step), LoggedStep(generation, step, float(match[3]), ended_at))
    return [found[key] for key in sorted(found)]


def compare(steps: Sequence[LoggedStep], worlds: Sequence[WorldAccount]) -> list[Compared]:
    """Each generation that log or ledger know work of, in order of number."""
    by_number = {world.generation: world for world in worlds}
    logged: dict[int, list[LoggedStep]] = {world.generation: [] for world in worlds}
    for item in steps:
        logged.setdefault(item.generation, []).append(item)
    found, highest, before = [], 0, 0
    for number, made in sorted(logged.items()):
        world = by_number.get(number)
        stayed = _stayed(by_number.get(before), world)
        log_s = _productive_s(made, logged.get(before, []), world, stayed=stayed, highest=highest) if world else 0.0
        ledger_s = world.productive_s if world is not None else 0.0
        if made or ledger_s:
            found.append(Compared(number, len(world.slots) if world else 0, len(made), log_s, ledger_s))
        highest = max([highest, *(item.step for item in made)])
        before = number if made else before
    return found


def difference(found: Sequence[Compared]) -> float:
    """By which share of the log's productive time the ledger's differs."""
    log_s, ledger_s = sum(item.log_s for item in found), sum(item.ledger_s for item in found)
    return abs(ledger_s - log_s) / log_s if log_s else float(ledger_s > 0)


def _stayed(before: WorldAccount | None, world: WorldAccount | None) -> int:
    """How many ranks worked in both worlds without a restart between them."""
    if before is None or world is None or world.pause_s is None:
        return 0
    return len(before.slots & world.slots)


def _productive_s(
    made: Sequence[LoggedStep], earlier: Sequence[LoggedStep], world: WorldAccount, *, stayed: int, highest: int
) -> float:
    """From the begin of the first step that is not a repeat to the end of the last one, on all slots. Ranks that stayed
    worked for this world from the last step of the world before on, but for the pause."""
    new = [item for item in made if item.step > highest]
    if not new:
        return 0.0
    repeats = [item for item in made if item.step <= highest]
    begun_at = repeats[-1].at if repeats else new[0].at - new[0].seconds
    total = (new[-1].at - begun_at) * len(world.slots)
    if stayed and earlier and not repeats:
        total += (begun_at - earlier[-1].at - (world.pause_s or 0.0)) * stayed
    return max(0.0, total)
