"""What a change costs in training time: a line through the handoffs that were measured, by the size of the state. Pure.

`lost_s` of a handoff is all training time that it cost, not only the pause. Beyond the sizes that were measured the
line is an extrapolation, and says so. What a job's own handoffs lost counts before the line.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from agent.protocol.jobfile import JobFile

STATE_BYTES_PER_PARAMETER = 12
"""fp32 masters and two moments: what a handoff moves (weights are derived)."""
MEASURED_ON_TWO_CORES = (
    (16e6, 1.21), (16e6, 1.43), (16e6, 1.90), (64e6, 1.29), (64e6, 1.87), (64e6, 2.07),
    (256e6, 3.06), (256e6, 4.10), (256e6, 2.30), (1e9, 6.89), (1e9, 8.23), (1e9, 4.18),
    (4e9, 19.4), (4e9, 13.8), (4e9, 6.8),
)  # fmt: skip
"""(bytes of state, seconds lost): medians of live handoffs in docs/benchmarks.md. Two CPU cores with three or four
ranks on them; nothing here was measured on GPUs."""

OWN_LEAST, OWN_MOST = 3, 8
"""A job's own handoffs count once there are so many, so that one odd one decides nothing; of more, the newest."""


@dataclass(frozen=True, slots=True)
class OwnChanges:
    """What a change cost this job: the median of its newest live handoffs. `spread_s`: between the least and the most
    of them."""

    lost_s: float
    spread_s: float
    handoffs: int


def own_changes(lost_s: Sequence[float]) -> OwnChanges | None:
    """Of the seconds that the job's live handoffs lost, the newest first; None while there are too few. A handoff that
    seems to have gained time lost none."""
    newest = [max(0.0, each) for each in lost_s[:OWN_MOST]]
    if len(newest) < OWN_LEAST:
        return None
    return OwnChanges(median(newest), max(newest) - min(newest), len(newest))


@dataclass(frozen=True, slots=True)
class ChangeCost:
    """Seconds lost = `base_s` + `s_per_gb` x GB of state. `error_s`: the mean distance of what was measured."""

    base_s: float
    s_per_gb: float
    error_s: float
    measured_gb: tuple[float, float]
    points: int
    source: str

    def lost_s(self, state_bytes: float) -> float:
        return self.base_s + self.s_per_gb * state_bytes / 1e9

    def is_extrapolated(self, state_bytes: float) -> bool:
        """Whether the state is smaller or larger than any that was measured."""
        return not self.measured_gb[0] <= state_bytes / 1e9 <= self.measured_gb[1]


def fitted_cost(points: Sequence[tuple[float, float]], source: str) -> ChangeCost:
    """The line of least relative squares; neither part of it is negative."""
    if not points:
        raise ValueError("no handoff was measured: there is nothing to fit the cost of a change on")
    rows = [(size / 1e9, lost, 1.0 / max(lost, 1e-3) ** 2) for size, lost in points]
    weight = sum(w for _, _, w in rows)
    mean_x = sum(w * x for x, _, w in rows) / weight
    mean_y = sum(w * y for _, y, w in rows) / weight
    spread = sum(w * (x - mean_x) ** 2 for x, _, w in rows)
    slope = sum(w * (x - mean_x) * (y - mean_y) for x, y, w in rows) / spread if spread > 0 else 0.0
    slope = max(0.0, slope)
    base = mean_y - slope * mean_x
    if base < 0:
        base, slope = 0.0, sum(w * x * y for x, y, w in rows) / sum(w * x * x for x, _, w in rows)
    error = sum(abs(base + slope * x - y) for x, y, _ in rows) / len(rows)
    sizes = [x for x, _, _ in rows]
    return ChangeCost(base, slope, error, (min(sizes), max(sizes)), len(rows), source)


def shipped_cost() -> ChangeCost:
    """By what is in docs/benchmarks.md."""
    return fitted_cost(MEASURED_ON_TWO_CORES, "docs/benchmarks.md, two CPU cores")


def cost_of_report(report: Mapping[str, Any], source: str) -> ChangeCost:
    """By a report of `make bench-handoff`. Raises ValueError where it has no live handoff that went through."""
    points = []
    for case in report.get("cases", ()):
        lost = (case.get("live") or {}).get("lost_s")
        if isinstance(lost, int | float) and lost >= 0:
            points.append((float(case["state_bytes"]), float(lost)))
    return fitted_cost(points, source)


def state_bytes(job: JobFile) -> float:
    """Of the optimizer's state of the whole job, which a handoff moves."""
    return float(STATE_BYTES_PER_PARAMETER * job.model.parameters())


@dataclass(frozen=True, slots=True)
class ChangeExpected:
    """What a change is taken to cost a job, and by what. `handoffs`: its own ones that were measured, or 0.
    `is_extrapolated`: by a line, for a state of a size that was never measured."""

    lost_s: float
    source: str
    handoffs: int = 0
    is_extrapolated: bool = False


def expected_change(job: JobFile, own: OwnChanges | None, copy_s: float | None = None) -> ChangeExpected:
    """By the job's own handoffs where there are some, else by the benchmarks and the size of its state. `copy_s`: how
    long it stands while all of its state is copied over its wires, None where state streams over them."""
    if own is not None:
        return ChangeExpected(own.lost_s, "its own handoffs", own.handoffs)
    cost, size = shipped_cost(), state_bytes(job)
    if copy_s is not None:
        return ChangeExpected(cost.base_s + copy_s, "its wires, as measured: no state streams over all of them")
    return ChangeExpected(cost.lost_s(size), cost.source, is_extrapolated=cost.is_extrapolated(size))
