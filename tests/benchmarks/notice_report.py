"""From the records of runs to the report of the notice benchmark: numbers, targets met or missed, and lines. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

STEPS_LEAST, SECONDS_LEAST = 2, 4.0
"""A notice that is longer than so many steps and so many seconds must cost no step."""
DECIDED_S_MOST, FIRST_ORDER_S_MOST, SAFE_LESS_STEP_S_MOST = 0.050, 0.300, 5.0
TIMES = ("announced_to_heard_s", "heard_to_decided_s", "heard_to_first_order_s", "notice_to_safe_s")

Record = Mapping[str, Any]


def is_short(record: Record) -> bool:
    """Whether the notice is too short to ask anything of the run."""
    return record["notice_s"] <= STEPS_LEAST * record["step_s"] + SECONDS_LEAST


def report(records: Sequence[Record]) -> dict[str, Any]:
    """What the benchmark found. `lost_steps`: of all runs that are not short."""
    asked = [record for record in records if not is_short(record)]
    times = {name: spread(record[name] for record in records) for name in TIMES}
    return {
        "runs": len(records),
        "lost_steps": sum(record["lost_steps"] for record in asked),
        "short": [_told(record) for record in records if is_short(record)],
        "lost": [_told(record) for record in asked if record["lost_steps"]],
        **times,
        "by_notice": [_of_notice(records, job, notice_s) for job, notice_s in sorted(_kinds(records))],
        "targets": targets(records),
    }


def spread(values: Iterable[float | None]) -> dict[str, float | None]:
    """Percentiles by nearest rank, of what is known; `known` says of how many."""
    known = sorted(value for value in values if value is not None)
    return {
        "p50": percentile(known, 50),
        "p99": percentile(known, 99),
        "max": known[-1] if known else None,
        "known": len(known),
    }


def percentile(ordered: Sequence[float], percent: int) -> float | None:
    """The least value that so many percent of `ordered` do not exceed."""
    return ordered[max(0, math.ceil(len(ordered) * percent / 100) - 1)] if ordered else None


def targets(records: Sequence[Record]) -> list[dict[str, Any]]:
    """Each target: what was measured, what is allowed, whether it is met (None: nothing to judge by)."""
    asked = [record for record in records if not is_short(record)]
    less_step = [record["notice_to_safe_s"] - record["step_s"] for record in records if record["notice_to_safe_s"]]
    return [
        _most("lost steps", sum(record["lost_steps"] for record in asked) if asked else None, 0),
        _most("heard to decided, p99, s", _p99(record["heard_to_decided_s"] for record in records), DECIDED_S_MOST),
        _most(
            "heard to first order, p99, s",
            _p99(record["heard_to_first_order_s"] for record in records),
            FIRST_ORDER_S_MOST,
        ),
        _most("notice to safe less a step, p99, s", _p99(less_step), SAFE_LESS_STEP_S_MOST),
    ]


def lines(found: Mapping[str, Any]) -> list[str]:
    """For people."""
    rows = ["job   notice s  runs  short  lost steps  safe s p50 (max)  rungs"]
    for each in found["by_notice"]:
        safe = each["notice_to_safe_s"]
        rungs = ", ".join(f"{rung} {count}" for rung, count in each["rungs"].items())
        rows.append(
            f"{each['job']:4}  {each['notice_s']:8}  {each['runs']:4}  {each['short']:5}  {each['lost_steps']:10}  "
            f"{_figure(safe['p50'])} ({_figure(safe['max'])})  {rungs}"
        )
    for each in found["targets"]:
        verdict = {True: "met   ", False: "MISSED", None: "-     "}[each["met"]]
        rows.append(f"{verdict} {each['target']:36} {_figure(each['measured'])} <= {_figure(each['at_most'])}")
    return rows


def _of_notice(records: Sequence[Record], job: str, notice_s: float) -> dict[str, Any]:
    here = [record for record in records if (record["job"], record["notice_s"]) == (job, notice_s)]
    rungs = [record["rung"] or "none" for record in here]
    return {
        "job": job,
        "notice_s": notice_s,
        "runs": len(here),
        "short": sum(is_short(record) for record in here),
        "lost_steps": sum(record["lost_steps"] for record in here),
        "rungs": {rung: rungs.count(rung) for rung in sorted(set(rungs))},
        **{name: spread(record[name] for record in here) for name in TIMES},
    }


def _kinds(records: Sequence[Record]) -> set[tuple[str, float]]:
    return {(record["job"], record["notice_s"]) for record in records}


def _told(record: Record) -> dict[str, Any]:
    names = ("number", "job", "provider", "notice_s", "goes_after_s", "rung", "lost_steps", "step_s", "tried")
    return {name: record[name] for name in names}


def _p99(values: Iterable[float | None]) -> float | None:
    return spread(values)["p99"]


def _most(target: str, measured: float | None, limit: float) -> dict[str, Any]:
    met = None if measured is None else measured <= limit
    return {"target": target, "measured": measured, "at_most": limit, "met": met}


def _figure(value: float | None) -> str:
    return "?" if value is None else f"{value:.3g}"
