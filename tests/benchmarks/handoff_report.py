"""From measured handoffs to the report of the handoff benchmark: cases, targets met or missed, and a table. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from tests.benchmarks.handoff_cluster import Measured

PAUSE_S_MAX, PAUSE_STEPS_MAX, PAUSE_OVER_GRADIENTS_S = 0.050, 0.1, 0.050
LIVE_BYTES_OVER_BOUND, COPIED_BYTES_OVER_BOUND = 1.10, 1.00
BANDWIDTH_FRACTION_LEAST, SPAN_SHARE_MOST = 0.9, 0.001

LIVE_FIELDS = (
    "pause_steps",
    "pause_less_next_optimizer_s",
    "lost_s",
    "lost_before_cutover_s",
    "steps_before_cutover",
    "open_to_boundary_s",
    "converge_s",
    "gradient_bytes_at_cutover",
    "bytes_moved",
    "bytes_reread",
    "bytes_replayed",
    "bytes_lower_bound",
    "extra_bytes_peak",
    "extra_bytes_budget",
    "ring_bytes",
    "step_time_ratio_streaming",
    "first_step_ratio",
)
COPY_FIELDS = (
    "pause_steps",
    "pause_less_next_optimizer_s",
    "lost_s",
    "bytes_moved",
    "bytes_lower_bound",
    "extra_bytes_peak",
    "extra_bytes_budget",
)
_WORST = ("bytes_moved", "bytes_reread", "extra_bytes_peak")
"""Of these the greatest of the repeats is given, of all others the median."""


def case(
    state_bytes: int,
    change: str,
    *,
    live: Measured | None,
    copied: Measured | None,
    restart: Mapping[str, Any] | None,
    raw_bytes_per_s: float | None,
) -> dict[str, Any]:
    """One case of the report. What was not asked for is None; what failed says so under "failed"."""
    measured = [each for mode in (live, copied) if mode is not None for each in mode.repeats]
    return {
        "state_bytes": state_bytes,
        "change": change,
        "step_s": statistics.median(each["step_s"] for each in measured) if measured else None,
        "live": None if live is None else _mode(live, LIVE_FIELDS, raw_bytes_per_s),
        "stop_and_copy": None if copied is None else _mode(copied, COPY_FIELDS, raw_bytes_per_s),
        "restart": None if restart is None else dict(restart),
        "raw_bytes_per_s": raw_bytes_per_s,
    }


def _mode(measured: Measured, fields: Iterable[str], raw: float | None) -> dict[str, Any]:
    repeats = measured.repeats
    if not repeats:
        return {"failed": measured.failures, "repeats": []}
    pauses = [each["pause_s"] for each in repeats]
    bandwidth = _median([each["bandwidth_bytes_per_s"] for each in repeats])
    rungs = sorted({each["rung_taken"] for each in repeats})
    return {
        "pause_s": {"median": statistics.median(pauses), "max": max(pauses), "min": min(pauses)},
        **{name: _one(name, [each[name] for each in repeats]) for name in fields},
        "bandwidth_bytes_per_s": bandwidth,
        "bandwidth_fraction": None if bandwidth is None or not raw else bandwidth / raw,
        "rung_taken": rungs[0] if len(rungs) == 1 else rungs,
        "failed": measured.failures,
        "repeats": repeats,
    }


def _one(name: str, values: list[Any]) -> Any:
    known = [value for value in values if value is not None]
    return max(known, default=None) if name in _WORST else _median(known)


def _median(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None


def targets(cases: Sequence[Mapping[str, Any]], steady: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Every target of every case: what was measured, what is allowed, whether it is met (None: nothing to judge by)."""
    found = []
    for each in cases:
        where = {"state_bytes": each["state_bytes"], "change": each["change"]}
        for mode, judge in (("live", _live_targets), ("stop_and_copy", _copy_targets), ("restart", _no_targets)):
            part = each[mode]
            if part is None:
                continue
            failed = part.get("failed") or []
            found.append({**where, "mode": mode, "target": "no failure", **_most(len(failed), 0)})
            if part.get("pause_s") is not None:
                found += [{**where, "mode": mode, **target} for target in judge(each, part)]
    for part in steady:
        where = {"state_bytes": part["state_bytes"], "change": "none", "mode": "steady"}
        if "failed" in part:
            found.append({**where, "target": "no failure", **_most(len(part["failed"]), 0)})
            continue
        found.append({**where, "target": "own spans, share of step", **_most(part["span_share"], SPAN_SHARE_MOST)})
        found.append({**where, "target": "bytes copied idle", **_most(part["bytes_copied_idle"], 0)})
    return found


def _live_targets(each: Mapping[str, Any], live: Mapping[str, Any]) -> list[dict[str, Any]]:
    pauses, raw = live["pause_s"], each["raw_bytes_per_s"]
    step_s = statistics.median(repeat["step_s"] for repeat in live["repeats"])
    reading = None if not raw else live["gradient_bytes_at_cutover"] / raw + PAUSE_OVER_GRADIENTS_S
    rungs = {repeat["rung_taken"] for repeat in live["repeats"]}
    limits = (("pause", max(PAUSE_S_MAX, PAUSE_STEPS_MAX * step_s)), ("pause over reading gradients", reading))
    return [
        *(
            {"target": f"{name}, {of}, s", **_most(pauses[of], most)}
            for name, most in limits
            for of in ("median", "max")
        ),
        {"target": "repeats on another rung", **_most(len(rungs - {"live"}), 0)},
        {"target": "bytes moved / bound", **_most(_moved_over_bound(live), LIVE_BYTES_OVER_BOUND)},
        {"target": "bandwidth / raw", **_least(live["bandwidth_fraction"], BANDWIDTH_FRACTION_LEAST)},
        {"target": "extra bytes", **_most(live["extra_bytes_peak"], live["extra_bytes_budget"])},
    ]


def _copy_targets(each: Mapping[str, Any], copied: Mapping[str, Any]) -> list[dict[str, Any]]:
    return [
        {"target": "bytes moved / bound", **_most(_moved_over_bound(copied), COPIED_BYTES_OVER_BOUND)},
        {"target": "bandwidth / raw", **_least(copied["bandwidth_fraction"], BANDWIDTH_FRACTION_LEAST)},
        {"target": "extra bytes", **_most(copied["extra_bytes_peak"], copied["extra_bytes_budget"])},
    ]


def _no_targets(each: Mapping[str, Any], part: Mapping[str, Any]) -> list[dict[str, Any]]:
    return []


def _moved_over_bound(part: Mapping[str, Any]) -> float | None:
    return part["bytes_moved"] / part["bytes_lower_bound"] if part["bytes_lower_bound"] else None


def _most(value: float | None, limit: float | None) -> dict[str, Any]:
    met = None if value is None or limit is None else value <= limit
    return {"measured": value, "at_most": limit, "met": met}


def _least(value: float | None, limit: float) -> dict[str, Any]:
    return {"measured": value, "at_least": limit, "met": None if value is None else value >= limit}


# For people.

_COLUMNS = (
    "state   change   step ms  live: pause ms (max)  lost s  moved/bound  raw share  extra/budget  step ratio"
    "    copy: pause ms  lost s  restart s (warm)"
)


def table(cases: Sequence[Mapping[str, Any]]) -> list[str]:
    """One line a case."""
    return [_COLUMNS, *(_row(each) for each in cases)]


def _row(each: Mapping[str, Any]) -> str:
    live, copied, restart = (each[mode] or {} for mode in ("live", "stop_and_copy", "restart"))
    bound, budget = live.get("bytes_lower_bound"), live.get("extra_bytes_budget")
    return "  ".join(
        (
            f"{each['state_bytes'] / 1e6:5.0f}M",
            f"{each['change']:7}",
            _cell(each["step_s"], 7, 1000),
            f"{_pause(live)} ({_cell(live.get('pause_s', {}).get('max'), 5, 1000).strip()})".rjust(22),
            _cell(live.get("lost_s"), 6, digits=2),
            _cell(live["bytes_moved"] / bound if bound else None, 11, digits=3),
            _cell(live.get("bandwidth_fraction"), 9, digits=2),
            _cell(live["extra_bytes_peak"] / budget if budget else None, 12, digits=2),
            _cell(live.get("step_time_ratio_streaming"), 10, digits=2),
            f"{_pause(copied)}".rjust(16),
            _cell(copied.get("lost_s"), 6, digits=2),
            f"{_restart(restart)}".rjust(18),
        )
    )


def _pause(part: Mapping[str, Any]) -> str:
    if not part:
        return "-"
    return f"{part['pause_s']['median'] * 1000:.0f}" if part.get("pause_s") else "FAILED"


def _restart(part: Mapping[str, Any]) -> str:
    if not part:
        return "-"
    if part.get("downtime_s") is None:
        return "FAILED"
    return f"{part['downtime_s']:.1f} ({part['warm_downtime_s']:.1f})"


def _cell(value: float | None, width: int, factor: float = 1, digits: int = 0) -> str:
    return "-".rjust(width) if value is None else f"{value * factor:{width}.{digits}f}"


def verdicts(found: Sequence[Mapping[str, Any]]) -> list[str]:
    """One line a target: met, MISSED, or nothing to judge by."""
    lines = []
    for each in found:
        verdict = {True: "met   ", False: "MISSED", None: "-     "}[each["met"]]
        relation, limit = ("<=", each["at_most"]) if "at_most" in each else (">=", each["at_least"])
        where = f"{each['state_bytes'] / 1e6:5.0f}M {each['change']:8} {each['mode']:14} {each['target']:32}"
        lines.append(f"{verdict} {where} {_figure(each['measured'])} {relation} {_figure(limit)}")
    return lines


def _figure(value: float | None) -> str:
    return "?" if value is None else f"{value:.4g}"
