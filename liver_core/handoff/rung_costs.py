"""What each rung costs in all: its pause, and what preparing it takes from training (handoff.md section 6).

Pure. An estimate is the median of what this job's newest handoffs of that rung measured. Where a part was not measured
yet it is a guess, and says so.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from statistics import median
from typing import Annotated, assert_never

from liver_core.handoff.ladder import LadderInputs, RungChoice, choose_rung, copy_s, weigh
from liver_core.handoff.messages import Rung
from liver_core.layout.limits import STRICT, Bound, Count, ShortText

NEWEST = 8
"""Of so many handoffs of a rung the median is taken."""
COMPARED = (Rung.LIVE, Rung.STOP_AND_COPY)
"""Both need no restart, do no batch again, and leave the choice: the others are for where time is short."""
NOISE_OF_STEPS = 3.0
"""So many times what steps deviate is noise at least. A cost is a sum over some four steps, so its standard deviation
is twice that of a step, and that is one and a half times a step's median deviation."""
NOISE_GUESS_STEPS = 0.1
"""Of a step, where the noise of steps is not known."""
BUILD_GUESS_SHARE, STREAM_GUESS_SHARE = 0.25, 0.25
"""Guesses: so much of the time to build, and to stream, is lost to training beside it."""


class Prefer(StrEnum):
    """Which rung is taken where several fit: the one that pauses least, or the one that costs least in all."""

    PAUSE = "pause"
    TOTAL = "total"


@dataclass(frozen=True, slots=True)
class CostParts:
    """Seconds of training that a handoff cost. A part can be negative, by the noise of a step.

    `building_s`: until the state streams, or until the pause where it does not. `after_s`: in the first five steps of
    the next world.
    """

    __pydantic_config__ = STRICT

    building_s: float
    streaming_s: float
    pause_s: float
    after_s: float

    @property
    def total_s(self) -> float:
        """In all."""
        return self.building_s + self.streaming_s + self.pause_s + self.after_s


@dataclass(frozen=True, slots=True)
class MeasuredCost:
    """What one handoff cost."""

    rung: Rung
    parts: CostParts


@dataclass(frozen=True, slots=True)
class RungCost:
    """What a handoff by this rung would cost, in seconds. `measured`: by how many handoffs of this rung. `guessed`: the
    parts that none measured."""

    __pydantic_config__ = STRICT

    rung: Rung
    parts: CostParts
    total_s: float
    measured: Count
    guessed: Annotated[tuple[ShortText, ...], Bound(max_length=4)]

    def __str__(self) -> str:
        if not self.guessed:
            return f"{self.total_s:.2f} s in all, measured {self.measured} times"
        return f"{self.total_s:.2f} s in all, guessed: {', '.join(self.guessed)}"


def newest(measured: Iterable[MeasuredCost]) -> tuple[MeasuredCost, ...]:
    """The last NEWEST of each rung, in their order."""
    kept: list[MeasuredCost] = []
    for cost in reversed(tuple(measured)):
        if sum(each.rung is cost.rung for each in kept) < NEWEST:
            kept.append(cost)
    return tuple(reversed(kept))


def estimate_costs(inputs: LadderInputs, measured: Sequence[MeasuredCost]) -> tuple[RungCost, ...]:
    """Of live, of stop-and-copy, and of a restart from the last checkpoint, if there is one. `measured`: newest last.

    The rungs that are compared build the same world. So what its first steps cost is taken from both: these are many
    steps, whose noise would decide between the rungs. What building cost is taken from the other one where a rung was
    not measured. No agent measures restarts, which are guessed as the ladder does.
    """
    costs = [_cost(rung, inputs, measured) for rung in COMPARED]
    if inputs.checkpoint_age_steps is not None:
        again_s = inputs.prepare_s + inputs.checkpoint_age_steps * inputs.step_s
        costs.append(RungCost(Rung.CHECKPOINT, CostParts(0.0, 0.0, again_s, 0.0), again_s, 0, ("pause",)))
    return tuple(costs)


def deviation(values: Sequence[float]) -> float:
    """How far values lie from their median, in the median. Raises StatisticsError where there is none."""
    middle = median(values)
    return median(abs(value - middle) for value in values)


def noise_s(inputs: LadderInputs, measured: Sequence[MeasuredCost]) -> float:
    """By how much costs differ by chance: by the deviation of those of one rung, of the rung where that is more, and by
    no less than steps do. One rung costs less than another only by more than that."""
    of_step_s = inputs.step_deviation_s
    found = [NOISE_GUESS_STEPS * inputs.step_s if of_step_s is None else NOISE_OF_STEPS * of_step_s]
    for rung in COMPARED:
        before = [each.parts.total_s - each.parts.after_s for each in newest(measured) if each.rung is rung]
        if before:
            found.append(deviation(before))
    return max(found)


def choose_by(
    prefer: Prefer, inputs: LadderInputs, measured: Sequence[MeasuredCost]
) -> tuple[RungChoice, tuple[RungCost, ...]]:
    """The rung, and what each would cost. Raises ValueError naming an impossible input."""
    choice, costs = choose_rung(inputs), estimate_costs(inputs, measured)
    match prefer:
        case Prefer.PAUSE:
            return choice, costs
        case Prefer.TOTAL:
            return _least(choice, inputs, costs, noise_s=noise_s(inputs, measured)), costs
        case _:
            assert_never(prefer)


def _least(choice: RungChoice, inputs: LadderInputs, costs: Sequence[RungCost], *, noise_s: float) -> RungChoice:
    """What the ladder has chosen, or stop-and-copy where that fits as well and the other does not cost less in all:
    by no more than noise is not less, and stop-and-copy is the one that does less work beside training."""
    if choice.rung is not Rung.LIVE:
        return choice
    live, copied = (next(cost for cost in costs if cost.rung is rung) for rung in COMPARED)
    weighed = weigh(copied.rung, inputs)
    if not live.measured and not copied.measured:
        return _said(choice, "what rungs cost in all was not measured yet, so the shortest pause counts")
    if weighed.refusal:
        return _said(choice, f"{copied.rung} costs {copied}, but {weighed.refusal}")
    if live.total_s <= copied.total_s - noise_s:
        return _said(choice, f"costs {live}; {copied.rung} {copied}")
    noise = f", less by no more than noise ({noise_s:.2f} s)" if live.total_s < copied.total_s else ""
    verdicts = (*choice.verdicts[:-1], (live.rung, f"costs {live}{noise}"), (copied.rung, f"costs {copied}"))
    return RungChoice(copied.rung, weighed.seconds, verdicts)


def _said(choice: RungChoice, text: str) -> RungChoice:
    rung, why = choice.verdicts[-1]
    return RungChoice(choice.rung, choice.estimate_s, (*choice.verdicts[:-1], (rung, f"{why}; {text}")))


_NOTHING = CostParts(0.0, 0.0, 0.0, 0.0)


def _cost(rung: Rung, inputs: LadderInputs, measured: Sequence[MeasuredCost]) -> RungCost:
    own = [each.parts for each in newest(measured) if each.rung is rung]
    both = [each.parts for each in newest(measured) if each.rung in COMPARED]
    stream_s = max(0.0, weigh(rung, inputs).seconds - inputs.prepare_s) if rung.streams else 0.0
    pause_s = inputs.follow_s if rung.streams else copy_s(inputs.bytes_to_move, inputs.bandwidth_bytes_per_s)
    guesses = {
        "building": (own or both, BUILD_GUESS_SHARE * inputs.prepare_s),
        "streaming": (own if rung.streams else [_NOTHING], STREAM_GUESS_SHARE * stream_s),
        "pause": (own, pause_s),
        "after": (both, 0.0),
    }
    parts = CostParts(
        **{
            f"{name}_s": median(getattr(each, f"{name}_s") for each in known) if known else guess
            for name, (known, guess) in guesses.items()
        }
    )
    guessed = [name for name, (known, _) in guesses.items() if not known]
    return RungCost(rung, parts, parts.total_s, len(own), tuple(guessed))
