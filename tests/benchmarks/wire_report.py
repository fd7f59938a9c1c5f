"""From what was measured of handoffs over shaped links to the report: cases, targets met or missed, and lines. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

PAUSE_S_LEAST, PAUSE_STEPS_MOST, PAUSE_OF_LINK_MOST = 0.080, 0.1, 1.5
"""A pause may be the longest of: so many seconds, so much of a step, so often what the last gradients take."""
OF_IPERF_LEAST, OF_BOUND_MOST, SLOWER_MOST = 0.85, 1.02, 1.05
JUDGED_GBPS_MOST = 10.0
"""A faster link than this is not filled by two cores, whoever sends."""
ACTIVE_WITHIN_S = 120.0

Case = Mapping[str, Any]


def case(named: Mapping[str, Any], rung: str, measured: Mapping[str, Any], seen: Any) -> dict[str, Any]:
    """One handoff. Rates are Gb/s of one link; `stream_gbps` from the first to the last byte of the first pass, waits
    included, of the slowest target; `sent_gbps` is all that the busiest source sent in the best stretch that long;
    cores are those of that stretch."""
    stream = measured["stream_bytes_per_s"]
    moved = measured["bytes_moved"] + measured["bytes_reread"]
    relayed = moved + measured["bytes_replayed"]
    stretch = None if stream is None else _best(measured["copied_s"], seen)
    return {
        **named,
        "rung": rung,
        "rung_taken": measured["rung_taken"],
        "rung_reason": measured["rung_reason"],
        "pause_s": measured["pause_s"],
        "step_s": measured["step_s"],
        "pause_bound_s": _pause_bound_s(named, measured),
        "lost_s": measured["lost_s"],
        "bytes": moved,
        "bytes_bound": measured["bytes_lower_bound"],
        "stream_gbps": None if stream is None else 8 * stream / 1e9,
        "sent_gbps": None if stretch is None else stretch.gbps,
        "copied_s": measured["copied_s"],
        "open_to_boundary_s": measured["open_to_boundary_s"],
        "torn": measured["torn_reads"],
        "slowdown_of_steps": measured["step_time_ratio_streaming"],
        "relay_cpu_s_per_gb": _taken(seen.cpu_s["relays"]) / (relayed / 1e9) if relayed else None,
        "cores_while_streaming": _cores(stretch, seen),
        "load_average": seen.load_average,
    }


def _pause_bound_s(named: Mapping[str, Any], measured: Mapping[str, Any]) -> float:
    link = named["iperf_gbps"] * 1e9 / 8
    gradients = measured["gradient_bytes_at_cutover"] / measured["targets"] / link
    return max(PAUSE_S_LEAST, PAUSE_STEPS_MOST * measured["step_s"], PAUSE_OF_LINK_MOST * gradients)


@dataclass(frozen=True, slots=True, order=True)
class Stretch:
    """`gbps`: what was sent from `since` to `until`, seconds since 1970."""

    gbps: float
    since: float
    until: float


def _best(seconds: float, seen: Any) -> Stretch | None:
    """Of the source that sent most in a stretch of so many seconds."""
    found = [most_sent(samples, seconds) for samples in seen.sent.values()]
    return max((each for each in found if each is not None), default=None)


def most_sent(samples: Sequence[tuple[float, int]], seconds: float) -> Stretch | None:
    """The most that was sent in any stretch of so many seconds or a little more, by samples of (time, bytes so far)."""
    best, first = None, 0
    for at, (time, sent) in enumerate(samples):
        while first + 1 < at and time - samples[first + 1][0] >= seconds:
            first += 1
        if time - samples[first][0] >= seconds > 0:
            since, before = samples[first]
            stretch = Stretch(8 * (sent - before) / (time - since) / 1e9, since, time)
            best = stretch if best is None else max(best, stretch)
    return best


def _taken(samples: Sequence[tuple[float, float]]) -> float:
    return samples[-1][1] - samples[0][1] if samples else 0.0


def _cores(stretch: Stretch | None, seen: Any) -> dict[str, float] | None:
    """How many cores relays, sources and targets kept busy meanwhile."""
    if stretch is None:
        return None
    cores = {who: cores_taken(samples, stretch.since, stretch.until) for who, samples in seen.cpu_s.items()}
    return {who: taken for who, taken in cores.items() if taken is not None} or None


def cores_taken(samples: Sequence[tuple[float, float]], since: float, until: float) -> float | None:
    """Processor seconds a second between the two samples that surround a stretch, by samples of (time, seconds)."""
    first = max((at for at, (time, _) in enumerate(samples) if time <= since), default=0)
    last = min((at for at, (time, _) in enumerate(samples) if time >= until), default=len(samples) - 1)
    if last <= first:
        return None
    return (samples[last][1] - samples[first][1]) / (samples[last][0] - samples[first][0])


def targets(cases: Sequence[Case]) -> list[dict[str, Any]]:
    """Each target: whether all cases that it is about meet it, and the worst of them."""
    done = [each for each in cases if "failed" not in each]
    live = [each for each in done if each["rung"] == "live"]
    judged = [each for each in live if each["gbps"] <= JUDGED_GBPS_MOST]
    alone = [each for each in judged if each["change"] != "data_parallel"]
    clean = [each for each in live if not each["torn"]]
    return [
        _target("failed cases", [1.0 for each in cases if "failed" in each], 0.0),
        _target("live cases that fell to another rung", [1.0 for each in live if each["rung_taken"] != "live"], 0.0),
        _target("seconds to the boundary", [each["open_to_boundary_s"] for each in live], ACTIVE_WITHIN_S),
        _target("pause over its bound", [each["pause_s"] / each["pause_bound_s"] for each in live], 1.0),
        _target("iperf3 over what is sent", [_of_iperf(each) for each in alone], 1 / OF_IPERF_LEAST),
        _target("bytes over the bound", [each["bytes"] / each["bytes_bound"] for each in clean], OF_BOUND_MOST),
        _target("steps beside the stream", [each["slowdown_of_steps"] for each in live], SLOWER_MOST),
    ]


def _of_iperf(case: Case) -> float | None:
    rate = max(case["stream_gbps"] or 0.0, case["sent_gbps"] or 0.0)
    return case["iperf_gbps"] / rate if rate else None


def _target(name: str, values: Sequence[float | None], most: float) -> dict[str, Any]:
    known = [value for value in values if value is not None]
    worst = max(known, default=0.0)
    return {"target": name, "at_most": most, "worst": worst, "of": len(known), "met": worst <= most}


def verdicts(found: Sequence[Mapping[str, Any]]) -> list[str]:
    """A line for each target."""
    return [
        f"{'met   ' if each['met'] else 'MISSED'} {each['target']}: worst {each['worst']:.3f} of {each['of']}, "
        f"at most {each['at_most']:.3f}"
        for each in found
    ]


def line(case: Case) -> str:
    """One case for people."""
    late = "".join(
        f" {word} {case[name]:g}{unit}"
        for word, name, unit in (("late", "delay_ms", " ms"), ("lost", "loss", ""), ("overtaking", "overtaking", ""))
        if case[name] > 0
    )
    head = f"{case['gbps']:g} Gb/s{late} {case['change']} {case['size']}"
    if "failed" in case:
        return f"{head}: FAILED {case['failed']}"

    def told(name: str, form: str = ".2f") -> str:
        return "-" if case[name] is None else format(case[name], form)

    return (
        f"{head} {case['rung']}: pause {1000 * case['pause_s']:.0f} of {1000 * case['pause_bound_s']:.0f} ms, "
        f"step {case['step_s']:.2f} s, lost {told('lost_s')} s, stream {told('stream_gbps')} and sent "
        f"{told('sent_gbps')} of {case['iperf_gbps']:.2f} Gb/s, bytes "
        f"{case['bytes'] / max(1.0, case['bytes_bound']):.3f} of the bound, {case['torn']:.0f} torn, "
        f"steps x{told('slowdown_of_steps')}, relays {told('relay_cpu_s_per_gb')} s/GB, took {case['rung_taken']}"
    )
