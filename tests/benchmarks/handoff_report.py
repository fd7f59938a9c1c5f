"""From measured handoffs to the report of the handoff benchmark: cases, targets met or missed, and a table. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import Any

from liver_core.handoff import CostParts, LadderInputs, MeasuredCost, Prefer
from liver_core.handoff.rung_costs import COMPARED, choose_by
from tests.benchmarks.handoff_cluster import Measured

PAUSE_STEPS_MAX, PAUSE_OVER_GRADIENTS_S = 0.1, 0.050
LIVE_BYTES_OVER_BOUND, COPIED_BYTES_OVER_BOUND = 1.10, 1.00
BANDWIDTH_FRACTION_LEAST, SPAN_SHARE_MOST = 0.9, 0.001


@dataclass(frozen=True, slots=True)
class Limits:
    """What is judged otherwise where the host is idle in most of a step. The ratios are of a restart's downtime over
    all that a live handoff costs; None: not judged."""

    pause_s: float
    restart_over_lost: float | None
    forked_over_lost: float | None


ON_HOST, DEVICE_TIME = Limits(0.050, None, None), Limits(0.080, 30.0, 3.0)
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


def targets(
    cases: Sequence[Mapping[str, Any]], steady: Sequence[Mapping[str, Any]], limits: Limits = ON_HOST
) -> list[dict[str, Any]]:
    """Every target of every case: what was measured, what is allowed, whether it is met (None: nothing to judge by)."""
    found = []
    for each in cases:
        where = {"state_bytes": each["state_bytes"], "change": each["change"]}
        for mode in ("live", "stop_and_copy", "restart"):
            part = each[mode]
            if part is None:
                continue
            failed = part.get("failed") or []
            found.append({**where, "mode": mode, "target": "no failure", **_most(len(failed), 0)})
            if part.get("pause_s") is not None:
                judged = _live_targets(each, part, limits) if mode == "live" else _copy_targets(part)
                found += [{**where, "mode": mode, **target} for target in judged]
        found += [{**where, "mode": "live", **target} for target in _ratios(each, limits)]
    found += _by_total(cases)
    for part in steady:
        where = {"state_bytes": part["state_bytes"], "change": "none", "mode": "steady"}
        if "failed" in part:
            found.append({**where, "target": "no failure", **_most(len(part["failed"]), 0)})
            continue
        found.append({**where, "target": "own spans, share of step", **_most(part["span_share"], SPAN_SHARE_MOST)})
        found.append({**where, "target": "bytes copied idle", **_most(part["bytes_copied_idle"], 0)})
    return found


def _ratios(each: Mapping[str, Any], limits: Limits) -> list[dict[str, Any]]:
    """What a restart costs over what a live handoff loses in all; nothing to judge by where that is no loss."""
    live, restart = each["live"] or {}, each["restart"] or {}
    lost_s = live.get("lost_s")
    judged = (
        ("restart", "downtime_s", limits.restart_over_lost),
        ("forked", "warm_downtime_s", limits.forked_over_lost),
    )
    return [
        {"target": f"{name} / lost", **_least(restart[field] / lost_s if lost_s and lost_s > 0 else None, least)}
        for name, field, least in judged
        if least is not None and restart.get(field) is not None
    ]


def _by_total(cases: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """What `prefer: total` would have lost, against stop-and-copy each time: the handoffs of a size in the order in
    which they were made, each on the rung that the ones before it say costs least. The first of all is not judged."""
    found = []
    for state_bytes in dict.fromkeys(each["state_bytes"] for each in cases):
        of_size = [
            each for each in cases if each["state_bytes"] == state_bytes and each["live"] and each["stop_and_copy"]
        ]
        pairs = [list(zip(each["live"]["repeats"], each["stop_and_copy"]["repeats"], strict=False)) for each in of_size]
        played = [pair for of_round in zip_longest(*pairs) for pair in of_round if pair is not None]
        chosen = replay_by_total(played)
        if not chosen:
            continue
        total_s = statistics.fmean(lost_s for lost_s, _ in chosen)
        copied_s = statistics.fmean(lost_s for _, lost_s in chosen)
        where = {"state_bytes": state_bytes, "change": "all", "mode": "by total"}
        found.append({**where, "target": f"mean lost of {len(chosen)}, s", **_most(total_s, copied_s)})
    return found


def replay_by_total(played: Sequence[tuple[Mapping[str, Any], Mapping[str, Any]]]) -> list[tuple[float, float]]:
    """`played`: the same change live and by stop-and-copy, in order. For each but the first, seconds lost on the rung
    that the product would choose from the ones before and from the steps before this one, and by stop-and-copy."""
    measured: list[MeasuredCost] = []
    found = []
    for pair in played:
        if measured:
            known = replace(_UNHURRIED, **{name: pair[0][name] for name in ("step_s", "step_deviation_s")})
            rung = choose_by(Prefer.TOTAL, known, measured)[0].rung
            found.append((pair[COMPARED.index(rung)]["lost_s"], pair[1]["lost_s"]))
        for rung, each in zip(COMPARED, pair, strict=True):
            if each["lost_parts"] is not None:
                measured.append(MeasuredCost(rung, CostParts(**each["lost_parts"])))
    return found


def _live_targets(each: Mapping[str, Any], live: Mapping[str, Any], most: Limits) -> list[dict[str, Any]]:
    pauses, raw = live["pause_s"], each["raw_bytes_per_s"]
    step_s = statistics.median(repeat["step_s"] for repeat in live["repeats"])
    reading = None if not raw else live["gradient_bytes_at_cutover"] / raw + PAUSE_OVER_GRADIENTS_S
    rungs = {repeat["rung_taken"] for repeat in live["repeats"]}
    limits = (("pause", max(most.pause_s, PAUSE_STEPS_MAX * step_s)), ("pause over reading gradients", reading))
    return [
        *(
            {"target": f"{name}, {of}, s", **_most(pauses[of], limit)}
            for name, limit in limits
            for of in ("median", "max")
        ),
        {"target": "repeats on another rung", **_most(len(rungs - {"live"}), 0)},
        {"target": "bytes moved / bound", **_most(_moved_over_bound(live), LIVE_BYTES_OVER_BOUND)},
        {"target": "bandwidth / raw", **_least(live["bandwidth_fraction"], BANDWIDTH_FRACTION_LEAST)},
        {"target": "extra bytes", **_most(live["extra_bytes_peak"], live["extra_bytes_budget"])},
    ]


def _copy_targets(copied: Mapping[str, Any]) -> list[dict[str, Any]]:
    return [
        {"target": "bytes moved / bound", **_most(_moved_over_bound(copied), COPIED_BYTES_OVER_BOUND)},
        {"target": "bandwidth / raw", **_least(copied["bandwidth_fraction"], BANDWIDTH_FRACTION_LEAST)},
        {"target": "extra bytes", **_most(copied["extra_bytes_peak"], copied["extra_bytes_budget"])},
    ]


def _moved_over_bound(part: Mapping[str, Any]) -> float | None:
    return part["bytes_moved"] / part["bytes_lower_bound"] if part["bytes_lower_bound"] else None


def _most(value: float | None, limit: float | None) -> dict[str, Any]:
    met = None if value is None or limit is None else value <= limit
    return {"measured": value, "at_most": limit, "met": met}


def _least(value: float | None, limit: float) -> dict[str, Any]:
    return {"measured": value, "at_least": limit, "met": None if value is None else value >= limit}


_UNHURRIED = LadderInputs(
    bytes_to_move=0,
    bandwidth_bytes_per_s=1.0,
    prepare_s=0.0,
    step_s=1.0,
    seconds_to_boundary=0.0,
    seconds_to_deadline=None,
    margin_s=0.0,
    sources_whole=True,
    nodes_left=1,
    nodes_least=1,
    checkpoint_age_steps=None,
    stream_share=1.0,
    follow_s=0.0,
    one_sided=True,
    replay_refusal="",
    stream_failure="",
    bytes_only_leaving=0,
    endpoints_s=0.0,
    ranks_staying=1,
    rescue_failure="",
)
"""Everything fits, so that only the costs count."""


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
