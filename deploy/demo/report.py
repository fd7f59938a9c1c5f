"""The demo's report and its bounds. Pure: everything in it comes from what was measured, nothing is a constant."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

PAUSE_STEPS_MAX = 3.0
LOSS_ULPS = 4
"""Losses that differ by fewer units in the last place of fp32 count as equal: another order of rounding explains it."""
AS_TODAY_OVER_PAUSE_MIN = 200.0
AS_TODAY_OVER_LOST_MIN = 30.0
HANDOFF_FIELDS = (
    "handoff_id",
    "generation",
    "cause",
    "rung",
    "from",
    "to",
    "notice_to_safe_s",
    "notice_to_active_s",
    "phases_s",
    "pause_s",
    "pause_steps",
    "lost_s",
    "bytes_moved",
    "bytes_lower_bound",
    "extra_bytes_peak",
    "extra_bytes_budget",
    "certificate",
)
MORE_HANDOFF_FIELDS = ("leaving", "decision", "cutover_step", "reason", "extra")


@dataclass(frozen=True, slots=True)
class Reference:
    """One undisturbed run: loss and chained sample digest after each step, seconds of each step."""

    layout: str
    losses: dict[int, float]
    digests: dict[int, str]
    seconds: dict[int, float]


@dataclass(frozen=True, slots=True)
class Newcomer:
    """A node that was started while the job trained. `started_at`: start of its agent, seconds since 1970."""

    node_id: str
    started_at: float


@dataclass(frozen=True, slots=True)
class Measured:
    """Everything a report is made from. `steps`: rows of the live run by step; `references`: same layout first.
    `loss_share`: as of `DemoJob`."""

    handoffs: Sequence[dict[str, Any]]
    steps: dict[int, dict[str, Any]]
    baseline: dict[str, Any]
    references: tuple[Reference, Reference]
    ledger: dict[str, Any]
    newcomer: Newcomer
    versions: dict[str, str]
    device: dict[str, Any]
    took_s: float
    loss_share: float = 0.0


def build_report(measured: Measured) -> dict[str, Any]:
    """The report as JSON."""
    active = [item for item in measured.handoffs if item["state"] == "active"]
    last = max(measured.steps)
    same, other = measured.references
    return {
        "handoffs": [_handoff(item) for item in active],
        "not_active": [_handoff(item) | {"state": item["state"]} for item in measured.handoffs if item not in active],
        "restart_baseline": measured.baseline,
        "ratios": _ratios(active, measured.baseline),
        "steps": last,
        "sample_digest": measured.steps[last]["sample_digest"],
        "sample_digest_undisturbed": same.digests.get(last),
        "loss": [measured.steps[step]["loss"] for step in sorted(measured.steps)],
        "newcomer_start": _newcomer_start(active, measured.steps, measured.newcomer),
        "undisturbed": against_undisturbed(measured.steps, same, other, measured.loss_share),
        "ledger": measured.ledger,
        "versions": measured.versions,
        "device": measured.device,
        "took_s": measured.took_s,
    }


def broken_bounds(report: dict[str, Any]) -> list[str]:
    """Each bound that does not hold, as a sentence with its numbers."""
    undisturbed = report["undisturbed"]
    found = [
        f"the handoff {item['from']} -> {item['to']} paused for {item['pause_steps']:.2f} median steps, "
        f"the bound is {PAUSE_STEPS_MAX:g}"
        for item in report["handoffs"]
        if item["pause_steps"] > PAUSE_STEPS_MAX
    ]
    found += losses_differ(undisturbed)
    if report["sample_digest"] != report["sample_digest_undisturbed"]:
        found.append("the samples trained on are not those of an undisturbed run")
    return found


def losses_differ(undisturbed: dict[str, Any]) -> list[str]:
    """What of the losses differs by more than another order of rounding explains, as `against_undisturbed` found it."""
    found = []
    difference = undisturbed["max_abs_loss_diff_before"]
    if difference != 0.0:
        found.append(f"losses before the first handoff differ from an undisturbed run by {difference:g}")
    rounding = max(undisturbed["layout_noise"], undisturbed["loss_resolution"])
    for when, difference, allowed in (
        ("right after the first handoff", undisturbed["abs_loss_diff_right_after"], rounding),
        (
            "after the first handoff",
            undisturbed["max_abs_loss_diff_after"],
            max(rounding, undisturbed["routing_noise"]),
        ),
    ):
        if difference > allowed:
            found.append(
                f"losses {when} differ by {difference:g}, more than two undisturbed runs in different layouts do "
                f"({undisturbed['layout_noise']:g}) and more than {LOSS_ULPS} units in the last place "
                f"({undisturbed['loss_resolution']:g})"
            )
            break
    return found


def missed_targets(report: dict[str, Any]) -> list[str]:
    """Each ratio of times below its target, as a sentence. A busy machine misses them without anything being wrong."""
    ratios = report["ratios"]
    targets = (("as_today_over_pause", AS_TODAY_OVER_PAUSE_MIN), ("as_today_over_lost", AS_TODAY_OVER_LOST_MIN))
    # A ratio is None if nothing was lost; that misses no target.
    present = [(name, ratios[name], least) for name, least in targets if ratios[name] is not None]
    return [f"{name} is {value:.1f}, the target is {least:g}" for name, value, least in present if value < least]


def _handoff(item: dict[str, Any]) -> dict[str, Any]:
    return {name: item.get(name) for name in (*HANDOFF_FIELDS, *MORE_HANDOFF_FIELDS)}


def _newcomer_start(
    active: Sequence[dict[str, Any]], steps: dict[int, dict[str, Any]], newcomer: Newcomer
) -> dict[str, Any] | None:
    """What the start of a new node's agent and its imports cost the job that trains on the same cores.

    The start ends before the handoff is opened, so the handoff's `lost_s` does not include it.
    """
    joined = next((item for item in active if newcomer.node_id in item["target_nodes"]), None)
    if joined is None:
        return None
    finished = {step: datetime.fromisoformat(row["finished_at"]).timestamp() for step, row in steps.items()}
    opened_at = datetime.fromisoformat(joined["opened_at"]).timestamp()
    meanwhile = [step for step, at in finished.items() if newcomer.started_at < at <= opened_at]
    generation = joined["parent"]
    usual = [
        row["seconds"]
        for step, row in steps.items()
        if row["generation"] == generation and finished[step] <= newcomer.started_at
    ]
    wall_s = opened_at - newcomer.started_at
    return {
        "node_id": newcomer.node_id,
        "start_to_opening_s": wall_s,
        "steps_meanwhile": len(meanwhile),
        "lost_s": wall_s - len(meanwhile) * statistics.median(usual) if usual else None,
    }


def _ratios(active: Sequence[dict[str, Any]], baseline: dict[str, Any]) -> dict[str, float | None]:
    """Downtime of a restart over the median handoff's pause and lost time."""
    pause = _median([item["pause_s"] for item in active])
    lost = _median([item["lost_s"] for item in active])
    as_today, at_best = baseline["as_today"]["downtime_s"], baseline["at_best"]["downtime_s"]
    return {
        "as_today_over_pause": _over(as_today, pause),
        "as_today_over_lost": _over(as_today, lost),
        "at_best_over_pause": _over(at_best, pause),
        "at_best_over_lost": _over(at_best, lost),
        "median_pause_s": pause,
        "median_lost_s": lost,
    }


def against_undisturbed(
    steps: dict[int, dict[str, Any]], same: Reference, other: Reference, loss_share: float = 0.0
) -> dict[str, Any]:
    """Losses of the live run against the undisturbed one in its first layout, before and after the first handoff, and
    of the first step after it, which is made on equal weights. `loss_share`: as of `DemoJob`."""
    first_generation = min(row["generation"] for row in steps.values())
    known = {step: row for step, row in steps.items() if row["loss"] is not None and step in same.losses}
    before = [
        abs(row["loss"] - same.losses[step]) for step, row in known.items() if row["generation"] == first_generation
    ]
    after = [
        abs(row["loss"] - same.losses[step]) for step, row in known.items() if row["generation"] != first_generation
    ]
    first_after = min((step for step, row in known.items() if row["generation"] != first_generation), default=0)
    right_after = abs(known[first_after]["loss"] - same.losses[first_after]) if first_after else 0.0
    noise = [abs(loss - other.losses[step]) for step, loss in same.losses.items() if step in other.losses]
    return {
        "max_abs_loss_diff_before": max(before),
        "max_abs_loss_diff_after": max(after),
        "abs_loss_diff_right_after": right_after,
        "layout_noise": max(noise),
        "routing_noise": loss_share * max(same.losses.values()),
        "loss_resolution": LOSS_ULPS * _fp32_ulp(max(same.losses.values())),
        "steps_before": len(before),
        "steps_after": len(after),
        "layouts": [same.layout, other.layout],
        "median_step_s": {run.layout: statistics.median(run.seconds.values()) for run in (same, other)},
    }


def _fp32_ulp(value: float) -> float:
    """The distance from a positive number to the next one that fp32 can hold."""
    return 2.0 ** (math.frexp(value)[1] - 24)


def _median(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None


def _over(value: float, divisor: float | None) -> float | None:
    return None if divisor is None or divisor <= 0 else value / divisor
