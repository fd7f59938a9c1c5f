"""The report of the notice benchmark: which runs it plays, what its numbers are made of, and that no loss is left out.

No time is measured here; every number is made up and followed through.
"""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from agent.protocol.jobfile import JobFile
from tests.benchmarks.notice import note, parse, resumed, write_report
from tests.benchmarks.notice_cases import FAST, NOTICES_S, SLOW, Case, cases, gcp_notice_s, job_file
from tests.benchmarks.notice_report import is_short, lines, percentile, report


def run(number: int = 0, **changes: Any) -> dict[str, Any]:
    return {
        "number": number,
        "job": FAST,
        "provider": "aws",
        "notice_s": 10,
        "goes_after_s": 10.0,
        "step_s": 0.5,
        "lost_steps": 0,
        "announced_to_heard_s": 1.0,
        "heard_to_decided_s": 0.04,
        "heard_to_first_order_s": 0.2,
        "notice_to_safe_s": 3.0,
        "rung": "live",
        "tried": [],
    } | changes


def test_a_hundred_runs_take_every_notice_on_every_cloud_and_either_end_for_both_jobs() -> None:
    played = cases(100)
    assert [case.number for case in played] == list(range(100))
    kinds = Counter((case.job, case.provider, case.notice_s) for case in played)
    assert kinds == {
        (job, provider, notice_s): 5 for job in (FAST, SLOW) for provider in ("aws", "gcp") for notice_s in NOTICES_S
    }
    ends = Counter((case.notice_s, case.goes_after_s) for case in played)
    assert set(ends) == {(3, 3.0), (5, 5.0), (10, 10.0), (30, 10.0), (30, 30.0), (120, 10.0), (120, 120.0)}
    assert abs(ends[30, 10.0] - ends[30, 30.0]) <= 4 and abs(ends[120, 10.0] - ends[120, 120.0]) <= 4
    assert len({(case.provider, case.notice_s) for case in cases(20) if case.job == SLOW}) == 10
    assert cases(20) == played[:20], "more runs go on where fewer ended"


def test_a_machine_on_gcp_has_the_longer_notice_only_where_its_next_case_asks_for_it() -> None:
    ahead = (Case(0, FAST, "aws", 120, 10.0), Case(1, FAST, "gcp", 30, 10.0), Case(2, FAST, "gcp", 120, 10.0))
    assert [gcp_notice_s(ahead, skip) for skip in (0, 1, 2)] == [0, 120, 0]


@pytest.mark.parametrize("job", [FAST, SLOW])
def test_the_job_files_are_valid_and_only_the_slow_one_waits(job: str) -> None:
    file = JobFile.model_validate(job_file(job, "/data/corpus", "/checkpoints"))
    assert file.nodes.max == 3
    assert ("micro_batch_s" in file.args) == (job == SLOW)


def test_a_notice_counts_when_it_is_longer_than_two_steps_and_four_seconds() -> None:
    assert [is_short(run(notice_s=5, step_s=step_s)) for step_s in (0.4, 0.5, 2.0)] == [False, True, True]
    assert [is_short(run(notice_s=10, step_s=step_s)) for step_s in (2.0, 3.0)] == [False, True]


def test_lost_steps_are_those_of_runs_that_count_and_short_runs_are_listed_with_what_was_tried() -> None:
    tried = [{"rung": "rescue", "state": "aborted", "reason": "late"}]
    records = [
        run(0, lost_steps=7),
        run(1, notice_s=3, lost_steps=5, rung="checkpoint", tried=tried, notice_to_safe_s=None),
        run(2, notice_s=3),
        run(3),
    ]
    found = report(records)
    assert (found["runs"], found["lost_steps"]) == (4, 7)
    assert [(each["notice_s"], each["rung"], each["lost_steps"]) for each in found["short"]] == [
        (3, "checkpoint", 5),
        (3, "live", 0),
    ]
    assert found["short"][0]["tried"] == tried
    assert [each["number"] for each in found["lost"]] == [0]
    assert found["notice_to_safe_s"] == {"p50": 3.0, "p99": 3.0, "max": 3.0, "known": 3}
    (first, second) = found["by_notice"]
    assert (first["notice_s"], first["runs"], first["short"], first["lost_steps"]) == (3, 2, 2, 5)
    assert second["rungs"] == {"live": 2}


def test_percentiles_are_by_nearest_rank() -> None:
    hundred = [float(value) for value in range(1, 101)]
    assert (percentile(hundred, 50), percentile(hundred, 99)) == (50.0, 99.0)
    assert (percentile([4.0], 99), percentile([], 99)) == (4.0, None)


def test_each_target_says_what_was_measured_and_whether_it_is_met() -> None:
    good = {each["target"]: each["met"] for each in report([run(), run(1)])["targets"]}
    assert set(good.values()) == {True}
    bad = [run(heard_to_decided_s=0.06, heard_to_first_order_s=0.31, notice_to_safe_s=5.6, lost_steps=1)]
    found = report(bad)
    assert {each["met"] for each in found["targets"]} == {False}
    assert sum(line.startswith("MISSED") for line in lines(found)) == 4
    unknown = report([run(notice_s=3, heard_to_decided_s=None, heard_to_first_order_s=None, notice_to_safe_s=None)])
    assert {each["met"] for each in unknown["targets"]} == {None}
    # A step longer than the target is no miss where only the boundary was waited for.
    slow = report([run(step_s=2.0, notice_to_safe_s=6.9)])["targets"][-1]
    assert slow["met"] is True and slow["measured"] == pytest.approx(4.9)


def test_what_is_done_is_not_done_again_by_the_same_tree(tmp_path: Path) -> None:
    path, wanted = tmp_path / "runs.jsonl", cases(4)
    known: dict[int, dict[str, Any]] = {}
    for case in wanted[:2]:
        note({**run(), "load_average": 1.0, **case.as_json()}, path, known, "abc")
    note({**wanted[2].as_json(), "failed": "no answer"}, path, known, "abc")
    with path.open("a") as file:
        file.write('{"number": 3, "job"')
    assert set(resumed(path, wanted, "abc")) == {0, 1}
    assert resumed(path, wanted, "def") == {}
    assert set(resumed(path, cases(100), "abc")) == {0, 1}, "more runs go on with what fewer have done"
    found = write_report(tmp_path / "notice.json", known, {"commit": "abc"})
    assert (found["runs"], [each["failed"] for each in found["failed"]]) == (2, ["no answer"])
    assert json.loads((tmp_path / "notice.json").read_text())["lost_steps"] == 0


@pytest.mark.parametrize("bad", [["--runs", "0"], ["--for-s", "0"]])
def test_an_option_that_means_nothing_is_refused(bad: list[str]) -> None:
    with pytest.raises(SystemExit):
        parse(bad)
