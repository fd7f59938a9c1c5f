"""Makes the record of a trial from its facts. Pure.

Nothing here asks the product how it fared: lost steps, samples and mixed worlds follow from what the ranks wrote.
"""

from __future__ import annotations

import re
import statistics
from collections import Counter, defaultdict
from dataclasses import dataclass
from datetime import datetime
from itertools import pairwise
from typing import Any

from liver_core.handoff import OUT_OF_TIME
from tests.chaos.facts import Facts
from tests.chaos.trail_reader import HELD
from tests.cluster.undisturbed import undisturbed_samples

_ELSEWHERE = (
    r"promised to handoff |parent: this member trains in generation |"
    r"source: this member runs no rank of generation \d+ \(rank \d+, decision: go:"
)
"""How an order is rejected where another handoff is under way, or has just taken the rank's world over."""
STOPPED = "the job is stopped"
"""The reason of an attempt that was under way when a trial ended its job."""
REPORTED_S = 1.5
"""An agent reports progress within about a second."""
STOPPED_S = 3.0
STOPPED_STEPS = 5.0
"""Stepping has stopped when a step takes longer than this many usual ones, and longer than STOPPED_S."""
RESCUE_STEPS, RESCUE_S = 2.0, 4.0
"""A notice of more than so many usual steps and seconds leaves time for a rescue, as `make bench-notice` has it."""


def record_of(facts: Facts) -> dict[str, Any]:
    """One entry of `trials` in the report."""
    gaps = _long_gaps(facts)
    reasons = _reasons(facts)
    struck = [item for item in facts.struck if item["at"] is not None]
    return {
        "seed": facts.seed,
        "kind": facts.kind,
        "killed": _killed(facts),
        "rung": _rung(facts),
        "outcome": _outcome(facts, reasons),
        "lost_steps": facts.job.get("lost_steps"),
        "lost_steps_computed": lost_steps(facts.logged),
        "lost_steps_partly": partly_lost(facts.logged, [*facts.partly, *unreported(facts)]),
        "samples_ok": samples_problem(facts) == "",
        "generation_reused": reused_generations(facts) != [],
        "cause": reasons[0].ended_by or reasons[0].text if reasons else None,
        "reason_names_killed": _names_any(reasons, struck, facts) if reasons and struck else None,
        "recovery_s": recovery_s(facts, gaps) if gaps else None,
        "build_s": facts.build_s,
        "time_for_rescue": time_for_rescue(facts),
        "bearable": bearable(facts),
        "leaked": facts.leaked,
        "problem": "; ".join(filter(None, (facts.problem, samples_problem(facts), mixed_problem(facts.trail)))),
    }


# What the ranks wrote.


def lost_steps(logged: list[list[int]]) -> int:
    """Steps that a later generation began without, whether the job got as far again or not."""
    return len(_lost(logged))


def partly_lost(logged: list[list[int]], partly: list[list[int]]) -> int:
    """How many of the lost steps only some ranks had made: whether the job had made them depends on who is asked."""
    return len(_lost(logged) & {(item[0], item[1]) for item in partly})


def _lost(logged: list[list[int]]) -> set[tuple[int, int]]:
    firsts: dict[int, int] = {}
    for generation, step in logged:
        firsts[generation] = min(firsts.get(generation, step), step)
    return {
        (generation, step)
        for generation, step in logged
        if any(later > generation and first <= step for later, first in firsts.items())
    }


def unreported(facts: Facts) -> list[list[int]]:
    """[generation, step] of each step made so shortly before a node was taken away that its agent may not have reported
    it any more."""
    made = {(line["generation"], line["step"], line["at"]) for line in facts.trail if line["event"] == "applied"}
    return [
        [generation, step]
        for generation, step, at in sorted(made)
        if any(taken - REPORTED_S <= at <= taken + REPORTED_S for taken in facts.taken.values())
    ]


def samples_problem(facts: Facts) -> str:
    """Where the samples differ from those of an undisturbed run; empty if nowhere."""
    batch = facts.global_batch
    last = max((row["step"] for row in facts.steps), default=0)
    expected = undisturbed_samples(last, micro_batch=1, global_batch=batch)
    for row in facts.steps:
        consumed, digest = expected[row["step"]] if row["step"] else (0, 0)
        if row["consumed_samples"] != consumed:
            return f"step {row['step']} has consumed {row['consumed_samples']} samples, not {consumed}"
        if row["sample_digest"] != f"{digest:016x}":
            return f"the samples of step {row['step']} or of one before it differ"
    return _batches_problem(facts)


def _batches_problem(facts: Facts) -> str:
    """Whether each step that was applied was computed whole in one generation, by what the job itself was given."""
    batch = facts.global_batch
    computed: dict[tuple[int, int], dict[int, set[int]]] = defaultdict(lambda: defaultdict(set))
    for line in facts.trail:
        if line["event"] == "batch" and line["ids"]:
            step = line["ids"][0] // batch + 1
            computed[step, line["generation"]][line["dp"]] |= set(line["ids"])
    for step in {line["step"] for line in facts.trail if line["event"] == "applied"}:
        wanted = list(range((step - 1) * batch, step * batch))
        found = [parts for (number, _), parts in computed.items() if number == step]
        if not any(sorted(sample for part in parts.values() for sample in part) == wanted for parts in found):
            return f"no generation computed step {step} from exactly samples {wanted[0]} to {wanted[-1]}"
    return ""


def mixed_problem(trail: list[dict[str, Any]]) -> str:
    """Whether an older generation began another step after a newer one had applied any; empty if not.

    A rank that was stopped may write late that it applied a step which others of its world had applied in time.
    """
    first_at: dict[tuple[int, int], float] = {}
    for line in trail:
        if line["event"] == "applied":
            first_at.setdefault((line["generation"], line["step"]), line["at"])
    begins = {}
    for (generation, _), at in first_at.items():
        begins[generation] = min(begins.get(generation, at), at)
    for (generation, step), at in first_at.items():
        newer = [number for number, began in begins.items() if number > generation and began < at]
        if newer:
            return f"generation {generation} applied step {step} when generation {min(newer)} already stepped"
    return ""


def reused_generations(facts: Facts) -> list[int]:
    """Numbers that more than one handoff or start had, and of worlds of which a rank was started twice."""
    origins: dict[int, set[str]] = defaultdict(set)
    for generation, origin in facts.births:
        origins[generation].add(origin)
    twice = Counter(map(tuple, facts.started))
    again = {generation for (generation, _), count in twice.items() if count > 1}
    return sorted(again | {generation for generation, found in origins.items() if len(found) > 1})


# What a handoff can answer without losing a step.


def time_for_rescue(facts: Facts) -> bool | None:
    """Whether the notice for the node that led an open handoff left time for a rescue, once ranks had built what they
    were building. None where there was no such notice, or something was struck that may cost steps by itself."""
    notice = facts.lead_notice
    if notice is None or not all(item["harmless"] for item in facts.struck if item["at"] is not None):
        return None
    times = [at for at, _ in _first_applied(facts) if at < notice["at"]]
    usual_s = statistics.median(end - start for start, end in pairwise(times))
    builds_s = max(0.0, notice["opened_at"] + facts.build_s - notice["at"])
    return notice["ends_in_s"] > builds_s + RESCUE_STEPS * usual_s + RESCUE_S


def bearable(facts: Facts) -> bool | None:
    """Whether every rank of the next world had the state when a leaver was struck that was held between boundary and
    decision. None where none was, or the handoff was a rescue: its survivors need the leaver's word once more."""
    struck = [item for item in facts.struck if item["point"] and item["at"] is not None]
    if not struck:
        return None
    [item] = struck
    probes = [line for line in facts.trail if line["event"] == "probe" and line["at"] <= item["at"]]
    held = {line["pid"] for line in facts.trail if line["event"] == HELD}
    at_point = [line for line in probes if line["pid"] in held and line["point"] == item["point"]]
    handoff = at_point[-1]["handoff"]
    rungs = [row["rung"] for row in facts.handoffs if row["handoff_id"] == handoff]
    if rungs not in ([rung] for rung in ("live", "drop_step", "stop_and_copy")):
        return None
    ready = [line for line in probes if line["handoff"] == handoff and line["point"] == "state read" and line["target"]]
    return len({line["pid"] for line in ready}) == at_point[-1]["ranks"]


# Whether and how long stepping stopped.


def _first_applied(facts: Facts) -> list[tuple[float, int]]:
    """(moment, generation) of each step, when its first rank applied it; in order."""
    times: dict[tuple[int, int], float] = {}
    for line in facts.trail:
        if line["event"] == "applied":
            times.setdefault((line["generation"], line["step"]), line["at"])
    return sorted((at, generation) for (generation, _), at in times.items())


def _long_gaps(facts: Facts) -> list[tuple[float, float]]:
    """Times between two steps, one of them after the first strike, in which stepping had stopped: long ones, and those
    before a world that was started again."""
    struck_at = [item["at"] for item in facts.struck if item["at"] is not None]
    gaps = list(pairwise(_first_applied(facts)))
    if not gaps or not struck_at:
        return []
    usual_s = statistics.median(end - start for (start, _), (end, _) in gaps)
    long_s = max(STOPPED_S, STOPPED_STEPS * usual_s)
    restarted = {row["generation"] for row in facts.job.get("generations", ())[1:] if row["source"] != "handoff"}
    return [
        (start, end)
        for (start, older), (end, newer) in gaps
        if end > min(struck_at) and (end - start > long_s or (newer != older and newer in restarted))
    ]


def recovery_s(facts: Facts, gaps: list[tuple[float, float]]) -> float:
    """The longest time from when stepping could go on to the next step. It could from the end of the stop or cut, from
    the kill (of service or agent: from when it was started again), and when the job had enough nodes again."""
    longest = 0.0
    for start, end in gaps:
        moments = [item["until"] or item["at"] for item in facts.struck if item["at"] is not None]
        moments += [facts.capacity_at] if facts.capacity_at is not None else []
        since = max([start, *(moment for moment in moments if moment < end)])
        longest = max(longest, end - since)
    return round(longest, 2)


# What the product told.


@dataclass(frozen=True, slots=True)
class Told:
    """Why an attempt or a world ended, as the API shows it: in words, and its typed first cause where there is one."""

    at_utc: float
    text: str
    ended_by: dict[str, Any] | None = None
    restart: bool = False


def _reasons(facts: Facts) -> list[Told]:
    """Reasons of attempts that failed and of worlds that were lost after the first strike, oldest first."""
    since = min((item["at_utc"] for item in facts.struck if item["at_utc"] is not None), default=float("inf"))
    found = []
    for row in facts.handoffs:
        ended = row["state"] in ("aborted", "broken") and not row["superseded"]
        if ended and not _is_withdrawn(row) and not _is_only_late(row, facts):
            detail = row["reason_detail"] or {}
            where = f"rank {detail['rank']}: " if detail.get("rank") is not None else ""
            found.append(Told(_seconds(row["changed_at"]), where + row["reason"], row.get("ended_by")))
    for before, row in pairwise(facts.job.get("generations", ())):
        if row["source"] != "handoff":
            found.append(Told(_seconds(row["created_at"]), row["reason"], before.get("ended_by"), restart=True))
    if facts.job.get("state") == "failed":
        found.append(Told(_seconds(facts.job["state_changed_at"]), facts.job["reason"]))
    planned = facts.kind in ("suspension", "resume")
    return sorted(
        (item for item in found if item.at_utc >= since and not (planned and _is_planned(item))),
        key=lambda item: item.at_utc,
    )


def _is_withdrawn(row: dict[str, Any]) -> bool:
    """A proposal that no agent opened in time, that one declined, or whose ranks already take part in another handoff:
    nothing of it has begun. Or one that the end of the trial came upon."""
    detail = row["reason_detail"] or {}
    if row["reason"] == STOPPED:
        return True
    if detail.get("phase") == "refused" and re.match(_ELSEWHERE, row["reason"]):
        return True
    declined = detail.get("phase") == "declined"
    unopened = declined or row["reason"].startswith(("not opened yet", "no agent opened it"))
    return row["generation"] is None and unopened


def _is_only_late(row: dict[str, Any], facts: Facts) -> bool:
    """An attempt that names nobody, since its deadline passed while the job trained on: it had made a step after all
    that was struck by then was over."""
    if row["ended_by"] is not None or (row["reason_detail"] or {}).get("phase") != OUT_OF_TIME:
        return False
    at = _seconds(row["changed_at"]) - (facts.triggered_utc - facts.triggered_at)
    before = [item["until"] or item["at"] for item in facts.struck if item["at"] is not None and item["at"] < at]
    return bool(before) and any(line["event"] == "applied" and max(before) < line["at"] < at for line in facts.trail)


def _is_planned(told: Told) -> bool:
    """The start of a suspended job tells where it goes on, and no loss."""
    return (
        told.restart
        and told.ended_by is None
        and told.text.startswith(("suspended because", "from checkpoint", "start "))
    )


def _names_any(reasons: list[Told], struck: list[dict[str, Any]], facts: Facts) -> bool:
    first = reasons[0]
    return any(_names(first, item) for item in struck) or _names_taken(first, facts) or _names_noticed(first, facts)


def _names_taken(told: Told, facts: Facts) -> bool:
    """Whether a world ended for a node that the scenario had taken away by then: that is its first cause, whatever was
    struck before."""
    typed, since = told.ended_by or {}, facts.triggered_utc - facts.triggered_at
    at = facts.taken.get(typed.get("node") or "")
    return told.restart and typed.get("what") == "node" and at is not None and told.at_utc >= at + since


def _names_noticed(told: Told, facts: Facts) -> bool:
    """Whether what ended had no time because of the notice for the lead of an open handoff."""
    return facts.lead_notice is not None and (told.ended_by or {}).get("node") == facts.lead_notice["node"]


def _names(told: Told, struck: dict[str, Any]) -> bool:
    """Whether a reason names what was struck, and where that is on a node, the node, the rank or the process."""
    text, what, typed = told.text.lower(), struck["what"], told.ended_by or {}
    if typed and (typed["what"] != "peer" or typed["node"] is not None):
        return typed["what"] == what or (bool(struck["node"]) and typed["node"] == struck["node"])
    if what in ("service", "database"):
        return what in text
    if what == "store" and "store" in text:
        return True
    rank = struck["rank"]
    names_rank = rank is not None and re.search(rf"\brank {rank}\b", text) is not None
    return struck["node"] in text or names_rank or re.search(rf"\bpid {struck['pid']}\b", text) is not None


def _killed(facts: Facts) -> dict[str, Any] | None:
    """The first victim; a second one stands under `and`."""
    named = [
        {name: item[name] for name in ("what", "node", "signal", "after_s", "harmless")}
        for item in sorted(facts.struck, key=lambda item: item["at"] or float("inf"))
        if item["at"] is not None
    ]
    if not named:
        return None
    return named[0] | ({"and": named[1]} if len(named) > 1 else {})


def _rung(facts: Facts) -> str | None:
    """Of the last handoff that was opened and became active after the trigger, which may be a notice for the lead of
    an open one; `checkpoint` where a restart came after it."""
    since, counts_from = facts.triggered_utc, "opened_at" if facts.lead_notice is None else "changed_at"
    moves = [
        (_seconds(row["changed_at"]), row["rung"])
        for row in facts.handoffs
        if row["state"] == "active" and _seconds(row[counts_from]) >= since - 1.0
    ]
    moves += [
        (_seconds(row["created_at"]), "checkpoint")
        for row in facts.job.get("generations", ())[1:]
        if row["source"] != "handoff" and _seconds(row["created_at"]) >= since
    ]
    return max(moves)[1] if moves else None


def _outcome(facts: Facts, reasons: list[Told]) -> str:
    """In one or two words."""
    if mixed_problem(facts.trail):
        return "mixed"
    if facts.job.get("state") == "failed":
        return "failed"
    if facts.problem:
        return "hung"
    if facts.lead_notice is None and not any(item["at"] is not None for item in facts.struck):
        return "not struck"
    if any(item.restart for item in reasons):
        return "restarted"
    return {"live": "handed over", None: "trained on", "checkpoint": "resumed"}.get(_rung(facts), "handed over")


def _seconds(text: str) -> float:
    return datetime.fromisoformat(text).timestamp()
