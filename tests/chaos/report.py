"""The report of all trials: merged by seed, written after each of them, with a summary against the targets."""

from __future__ import annotations

import hashlib
import json
import statistics
import subprocess
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tests.chaos.plan import Kind

OF_EACH_KIND = 15
CAUSE_LEAST = 0.98
RECOVERY_MEDIAN_S = 6.0
RECOVERY_MAX_S = 30.0
ROOT = Path(__file__).parents[2]
TRIED = ("agent", "liver_core", "service", "migrations", "constraints.txt")
_PASSED_BY = ("not struck",)


def tree_now(root: Path = ROOT) -> str:
    """What trials try, as a hash of what Git calls its folders and files; with "-changed" where something is not
    committed. Empty outside of a Git repository. Trials of one tree count together, whatever else was committed."""
    where = {"cwd": root, "capture_output": True, "text": True, "check": False}
    found = subprocess.run(["git", "rev-parse", *(f"HEAD:{name}" for name in TRIED)], **where)
    if found.returncode:
        return ""
    changed = subprocess.run(["git", "status", "--porcelain", "--", *TRIED], **where).stdout
    return hashlib.sha256(found.stdout.encode()).hexdigest()[:12] + "-changed" * bool(changed)


def load(path: Path) -> dict[int, dict[str, Any]]:
    """Records by seed; none where there is no report yet. Raises ValueError naming a file that is no report."""
    if not path.exists():
        return {}
    try:
        return {record["seed"]: record for record in json.loads(path.read_text())["trials"]}
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path}: is no report of chaos trials: {error}") from error


def save(path: Path, records: dict[int, dict[str, Any]]) -> None:
    """All records, in the order of their seeds. The old report stays whole until the new one is."""
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = path.with_suffix(".new")
    trials = [records[seed] for seed in sorted(records)]
    fresh.write_text(json.dumps({"trials": trials}, indent=2) + "\n")
    fresh.rename(path)


def lost_as_computed(record: dict[str, Any]) -> bool:
    """Whether the job says as many lost steps as its ranks logged. A rank may be killed when it has made a step that
    others have not: such a step counts either way."""
    lost, computed = record["lost_steps"], record["lost_steps_computed"]
    return lost is not None and computed - record.get("lost_steps_partly", 0) <= lost <= computed


def broken_rules(record: dict[str, Any]) -> list[str]:
    """What one trial broke of the rules that hold in each trial."""
    found = []
    if record["outcome"] in ("mixed", "hung", "failed"):
        found.append(record["outcome"])
    if record["generation_reused"]:
        found.append("generation reused")
    if not record["samples_ok"]:
        found.append("samples")
    if not lost_as_computed(record):
        found.append(f"lost {record['lost_steps']}, computed {record['lost_steps_computed']}")
    if record["lost_steps_computed"] and _may_lose_none(record):
        found.append(f"lost {record['lost_steps_computed']} steps to a {record['killed']['what']}")
    if record["reason_names_killed"] is False:
        found.append("reason")
    if record["leaked"]:
        found.append("leaked")
    if record.get("time_for_rescue") and record["lost_steps_computed"]:
        found.append(f"lost {record['lost_steps_computed']} steps to a notice for the lead")
    if record.get("bearable") and (record["lost_steps_computed"] or record["outcome"] == "restarted"):
        found.append("a loss before the decision not borne")
    if (record["recovery_s"] or 0.0) > RECOVERY_MAX_S + record.get("build_s", 0.0):
        found.append(f"recovery {record['recovery_s']:.0f} s")
    return found


def targets(records: Iterable[dict[str, Any]]) -> list[tuple[str, bool, str]]:
    """(target, whether it is met, what was found) over the trials in which something was struck."""
    trials = [record for record in records if record["outcome"] not in _PASSED_BY]
    counted = Counter(record["kind"] for record in trials)
    named = [record["reason_names_killed"] for record in trials if record["reason_names_killed"] is not None]
    share = sum(named) / len(named) if named else 1.0
    recovered = [record for record in trials if record["recovery_s"] is not None and not record.get("build_s")]
    recoveries = [record["recovery_s"] for record in recovered]
    middle_s, longest_s = (statistics.median(recoveries), max(recoveries)) if recoveries else (0.0, 0.0)
    harmless = [record for record in trials if _may_lose_none(record)]

    def none(what: str, wrong: list[dict[str, Any]]) -> tuple[str, bool, str]:
        seeds = ", ".join(str(record["seed"]) for record in wrong)
        return what, not wrong, f"{len(wrong)} of {len(trials)}" + f" (seeds {seeds})" * bool(wrong)

    return [
        (
            f"at least {OF_EACH_KIND} of each kind",
            all(counted[kind] >= OF_EACH_KIND for kind in Kind),
            ", ".join(f"{kind} {counted[kind]}" for kind in Kind),
        ),
        none("never mixed", [record for record in trials if record["outcome"] == "mixed"]),
        none("none hangs or fails", [record for record in trials if record["outcome"] in ("hung", "failed")]),
        none("no generation reused", [record for record in trials if record["generation_reused"]]),
        none("all samples right", [record for record in trials if not record["samples_ok"]]),
        none(
            "lost steps as computed",
            [record for record in trials if not lost_as_computed(record)],
        ),
        none(
            "no step lost to service, database, agent or zygote",
            [record for record in harmless if record["lost_steps_computed"]],
        ),
        none(
            "no step lost to a notice for the lead that left time for a rescue",
            [record for record in trials if record.get("time_for_rescue") and record["lost_steps_computed"]],
        ),
        none(
            "every loss borne that a handoff can bear",
            [record for record in trials if "a loss before the decision not borne" in broken_rules(record)],
        ),
        (f"the right cause in {CAUSE_LEAST:.0%}", share >= CAUSE_LEAST, f"{sum(named)} of {len(named)}"),
        none("nothing leaked", [record for record in trials if record["leaked"]]),
        (
            f"recovery {RECOVERY_MEDIAN_S:g} s in the median, at most {RECOVERY_MAX_S:g} s",
            middle_s <= RECOVERY_MEDIAN_S and longest_s <= RECOVERY_MAX_S,
            f"{middle_s:.1f} s, {longest_s:.1f} s, in {len(recoveries)} trials without slow building",
        ),
    ]


def summary(records: Iterable[dict[str, Any]]) -> str:
    """For a terminal."""
    records = list(records)
    trees = Counter(record.get("tree", "") for record in records)
    of_trees = ", ".join(f"{count} on {tree or 'an unknown tree'}" for tree, count in trees.most_common())
    lines = [f"{len(records)} trials: {of_trees or 'none'}"]
    lines += [f"  {'met   ' if met else 'MISSED'}  {what}: {found}" for what, met, found in targets(records)]
    lines += [f"  seed {record['seed']}: {', '.join(found)}" for record in records if (found := broken_rules(record))]
    return "\n".join(lines)


def _may_lose_none(record: dict[str, Any]) -> bool:
    """Whether only such were struck as may cost no step, and no notice was too short."""
    if record.get("time_for_rescue") is False:
        return False
    killed = record["killed"]
    struck = [killed, killed.get("and")] if killed else []
    return bool(struck) and all(item["harmless"] for item in struck if item)
