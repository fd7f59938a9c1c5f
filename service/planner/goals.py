"""Which numbers of nodes let a job end in time and within its budget. Pure.

A budget is a bound: what it does not pay for to the end is not chosen, where anything else is. A deadline is a wish
within it: a job that weighs prices does not save so much that it ends late. Where nothing will do, that is said.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

MARGIN = 0.05
"""What a job would change to must leave so much of the time or of the money. Once chosen, all of it may be used: while
the job runs so, what it needs and what is left fall alike, so that it is not changed back."""
HOUR_S = 3_600.0


class Alert(StrEnum):
    """What a person should know of a decision."""

    LATE = "late"
    OVER_BUDGET = "over_budget"
    UNPRICED = "unpriced"


@dataclass(frozen=True, slots=True)
class Remaining:
    """What is left of a job's steps, time and money; None where the job file sets no such bound."""

    steps: int
    deadline_in_s: float | None = None
    usd: float | None = None


@dataclass(frozen=True, slots=True)
class CountOption:
    """The best layout for a number of nodes. `usd_per_hour`: of the nodes, None where a price is not known.
    `usd_per_hour_worth`: what its tokens bring beyond what it costs; None where the job does not weigh them."""

    nodes: int
    layout: str
    step_s: float
    usd_per_hour: float | None = None
    usd_per_hour_worth: float | None = None

    def ends_in_s(self, steps: int) -> float:
        """Time for so many steps."""
        return steps * self.step_s

    def usd_for(self, steps: int) -> float:
        """Their price; nothing where none is known."""
        return self.ends_in_s(steps) / HOUR_S * (self.usd_per_hour or 0.0)


@dataclass(frozen=True, slots=True)
class Within:
    """The numbers of nodes that the goals leave, and what is wrong, kind by kind with a text."""

    counts: frozenset[int]
    alerts: tuple[tuple[Alert, str], ...] = ()


def within_goals(options: Sequence[CountOption], left: Remaining, now: int | None) -> Within:
    """Of options for different numbers of nodes, at least one. `now`: nodes that the job has."""
    everything = frozenset(option.nodes for option in options)
    alerts: list[tuple[Alert, str]] = []
    in_time = affordable = everything
    if left.deadline_in_s is not None:
        in_time = _fitting(options, lambda option: option.ends_in_s(left.steps), left.deadline_in_s, now)
        if not in_time:
            fastest = min(options, key=lambda option: (option.step_s, option.nodes))
            in_time = frozenset({fastest.nodes})
            alerts.append((Alert.LATE, _late(fastest.ends_in_s(left.steps), left.deadline_in_s)))
    if left.usd is not None and all(option.usd_per_hour is not None for option in options):
        affordable = _fitting(options, lambda option: option.usd_for(left.steps), left.usd, now)
        if not affordable:
            cheapest = min(options, key=lambda option: (option.usd_for(left.steps), option.nodes))
            affordable = frozenset({cheapest.nodes})
            needs = cheapest.usd_for(left.steps)
            alerts.append((Alert.OVER_BUDGET, f"its budget ends first: {needs:.2f} USD more are needed at least"))
    both = in_time & affordable
    if not both:
        best = min((each for each in options if each.nodes in affordable), key=lambda each: (each.step_s, each.nodes))
        both = frozenset({best.nodes})
        if not any(kind is Alert.LATE for kind, _ in alerts):
            alerts.append((Alert.LATE, "its budget does not pay for ending in time"))
    return Within(both, tuple(alerts))


def _fitting(options: Sequence[CountOption], need, most: float, now: int | None) -> frozenset[int]:
    return frozenset(
        option.nodes for option in options if need(option) <= most * (1.0 if option.nodes == now else 1.0 - MARGIN)
    )


def _late(needs_s: float, left_s: float) -> str:
    if left_s <= 0:
        return "its deadline has passed"
    return f"its deadline will be missed: {needs_s / HOUR_S:.1f} h of steps in {left_s / HOUR_S:.1f} h"


def overspent(spent_usd: float, budget_usd: float | None) -> str:
    """Why a job must not go on; empty if it may."""
    if budget_usd is None or spent_usd < budget_usd:
        return ""
    return f"it has cost {spent_usd:.2f} USD of its budget_usd {budget_usd:g}"
