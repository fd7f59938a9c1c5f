"""What the ranks measured, put together: seconds by their maximum, bytes by their sum, the pause over all of them.

Pure. Names of the ranks' measures: `*_s` seconds, `bytes_*` bytes, `*_utc` moments.
"""

from collections.abc import Iterable, Mapping

from agent.protocol.sync import HandoffMeasures

PHASES_MAX = 60
EXTRA_MAX = 60
PER_STEP = {"follow_s"}
"""Seconds of one step, shown apart from the phases of the handoff."""
SHOWN_AS_THEY_ARE = {"bytes_rescued", "bytes_streamed"}
"""Sums over the ranks that have no field of their own."""
NOT_PHASES = {"median_step_s", "optimizer_s", "first_step_s", "pause_s"}


def merge_measures(ranks: Iterable[Mapping[str, float]], driver: HandoffMeasures) -> HandoffMeasures:
    """`driver` holds what the leading agent measured itself; what the ranks say is added."""
    said = tuple(ranks)
    names = sorted({name for measures in said for name in measures})
    largest = {name: max(measures[name] for measures in said if name in measures) for name in names}
    total = {name: sum(measures.get(name, 0.0) for measures in said) for name in names if name.startswith("bytes_")}
    phases = {
        name.removesuffix("_s"): max(0.0, largest[name])
        for name in names
        if name.endswith("_s") and name not in NOT_PHASES | PER_STEP
    }
    pause_s = _pause(said, largest)
    step_s = largest.get("median_step_s", 0.0)
    read_s = largest.get("read_s", 0.0)
    known = {*total, *(f"{name}_s" for name in phases), *NOT_PHASES, "extra_bytes_peak", "extra_bytes_budget"}
    extra = {name: value for name, value in largest.items() if name not in known and not name.endswith("_utc")}
    extra |= {name: total[name] for name in SHOWN_AS_THEY_ARE & total.keys()}
    moved = total.get("bytes_moved")
    return driver.model_copy(
        update={
            "phases_s": dict(list({**phases, **driver.phases_s}.items())[:PHASES_MAX]),
            "pause_s": pause_s,
            "pause_steps": pause_s / step_s if pause_s is not None and step_s > 0 else None,
            "bytes_planned": _count(total.get("bytes_planned")),
            "bytes_moved": _count(moved),
            "bytes_reread": _count(total.get("bytes_reread")),
            "bytes_replayed": _count(total.get("bytes_replayed")),
            "bytes_lower_bound": _count(total.get("bytes_lower_bound")),
            "bandwidth_bytes_per_s": moved / read_s if moved and read_s > 0 else None,
            "extra_bytes_peak": _count(largest.get("extra_bytes_peak")),
            "extra_bytes_budget": _count(largest.get("extra_bytes_budget")),
            "extra": dict(list({**extra, **driver.extra}.items())[:EXTRA_MAX]),
        }
    )


def _pause(said: tuple[Mapping[str, float], ...], largest: Mapping[str, float]) -> float | None:
    """Latest first forward in g+1 minus latest end of gradient reduction in g, minus an ordinary optimizer time.

    That time is the least over ranks: the others' has in it how long they waited for the rank that reduced last.
    """
    if "first_forward_at_utc" in largest and "reduced_at_utc" in largest:
        optimizer = [measures["optimizer_s"] for measures in said if "optimizer_s" in measures]
        usual_s = min(optimizer, default=0.0)
        return max(0.0, largest["first_forward_at_utc"] - largest["reduced_at_utc"] - usual_s)
    return largest.get("pause_s")


def _count(value: float | None) -> int | None:
    return None if value is None else max(0, int(value))
