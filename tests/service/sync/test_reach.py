"""What the agents of a job can have reached: whatever a report says beyond that is refused by name."""

from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import uuid4

import pytest

from agent.protocol.process_end import ProcessEnd
from agent.protocol.sync import (
    CheckpointFact,
    HandoffMeasures,
    JobFinished,
    MetricsRow,
    NodeInfo,
    Provider,
    RankStatus,
    SyncReport,
)
from liver_core.handoff import FailedPart, FailureCause, RankStage, Reason
from liver_core.handoff.generations import PLACES, STARTS_AHEAD_MAX
from liver_core.layout import ParallelLayout
from liver_core.layout.limits import COUNT_MAX
from service.sync.reach import GENERATIONS_AHEAD_MAX, SLACK, Reach, within_reach
from tests.service.fake_agent import mirror, roster, step_row

NOW = datetime(2026, 1, 1, 12, tzinfo=UTC)
SINCE = NOW - timedelta(seconds=60)
FACTS: dict[str, Any] = {
    "next_generation": 2,
    "active_generation": 1,
    "checkpoints_asked": 0,
    "last_step": 100,
    "since": SINCE,
    "now": NOW,
}
REPORT = SyncReport(
    agent_version="test",
    agent_incarnation=uuid4(),
    report_seq=1,
    issued_utc=NOW,
    node=NodeInfo(node_id="a", provider=Provider.NONE, slots=1, peer_url="http://a:1", private_address="127.0.0.1"),
)
ONE, TWO = ParallelLayout(), ParallelLayout(pp=2)


def kept(parts: dict[str, Any], facts: dict[str, Any] = FACTS) -> tuple[SyncReport, list[str]]:
    """What is left of a report with these parts, and why the rest is refused."""
    report = REPORT.model_copy(update=parts)
    reasons: list[str] = []
    found = within_reach(report, {"j": Reach.of(**facts)}, lambda part, key, why: reasons.append(why))
    return found, reasons


def rank(**more: Any) -> RankStatus:
    values = {"generation": 1, "rank": 0, "slot": 0, "pid": 7, "stage": RankStage.FAILED, "step": 5}
    return RankStatus(job_id="j", **values | more)


def why(**cause: Any) -> Reason:
    return Reason("it failed", "training", cause=FailureCause(FailedPart.START, **cause))


def finished(**more: Any) -> JobFinished:
    return JobFinished(job_id="j", generation=1, step=more.pop("step", 5), **more)


def checkpoint(**more: Any) -> CheckpointFact:
    values = {"generation": 1, "step": 5, "path": "/c/5", "finished_utc": NOW}
    return CheckpointFact(job_id="j", **values | more)


def handoff(parent: int = 1, generation: int = 2, **more: Any):
    source, target = roster("j", parent, TWO, "a", "b"), roster("j", generation, ONE, "a")
    return mirror(source, target, NOW, **more)


FARTHEST = STARTS_AHEAD_MAX * PLACES + 1


@pytest.mark.parametrize(
    ("part", "item"),
    [
        ("ranks", rank(step=100, reason=why(step=100, newer_start=FARTHEST), seconds=60.0)),
        ("ranks", rank(generation=2 + GENERATIONS_AHEAD_MAX)),
        ("steps", step_row("j", 1, 100, NOW, seconds=60.0)),
        ("metrics", MetricsRow(job_id="j", generation=1, step=100, at_utc=SINCE, values={})),
        ("checkpoints", checkpoint(step=100, seconds=60.0, finished_utc=NOW + SLACK)),
        ("finished", finished(step=100, failed=why(newer_start=FARTHEST))),
        ("handoffs", handoff(measures=HandoffMeasures(pause_s=60.0, bytes_moved=10**14))),
    ],
)
def test_what_can_have_been_is_left_as_it_is(part: str, item: Any) -> None:
    found, reasons = kept({part: (item,)})
    assert getattr(found, part) == (item,) and reasons == []


@pytest.mark.parametrize(
    ("part", "item", "reason"),
    [
        ("ranks", rank(reason=why(newer_start=FARTHEST + 1)), "newer_start 1000000002 is beyond 1000000001"),
        ("ranks", rank(reason=why(newer_start=COUNT_MAX)), f"newer_start {COUNT_MAX} is beyond"),
        ("ranks", rank(reason=why(step=101)), "step 101 is after the last step, 100"),
        ("ranks", rank(ended=ProcessEnd(7, exit_code=1, step=COUNT_MAX)), f"step {COUNT_MAX} is after the last step"),
        ("ranks", rank(step=101), "step 101 is after the last step, 100"),
        ("ranks", rank(seconds=1e9), "seconds: nothing of the job took 1e+09 s, it was submitted 60 s ago"),
        ("ranks", rank(generation=PLACES), "generation 100000 is beyond 1002"),
        ("steps", step_row("j", 1, 101, NOW), "step 101 is after the last step, 100"),
        ("steps", step_row("j", 1, 5, NOW, seconds=1e9), "seconds: nothing of the job took 1e+09 s"),
        (
            "metrics",
            MetricsRow(job_id="j", generation=1, step=101, at_utc=NOW, values={}),
            "step 101 is after the last step, 100",
        ),
        (
            "metrics",
            MetricsRow(job_id="j", generation=COUNT_MAX, step=1, at_utc=NOW, values={}),
            f"generation {COUNT_MAX} is beyond",
        ),
        ("checkpoints", checkpoint(step=101), "step 101 is after the last step, 100"),
        ("checkpoints", checkpoint(seconds=1e9), "seconds: nothing of the job took 1e+09 s"),
        ("checkpoints", checkpoint(asked=1), "checkpoint 1 was not asked for, only 0 were"),
        ("finished", finished(step=101), "step 101 is after the last step, 100"),
        ("finished", finished(failed=why(newer_start=COUNT_MAX)), f"newer_start {COUNT_MAX} is beyond"),
        ("handoffs", handoff(parent=2), "generation 2 must be above parent 2"),
        ("handoffs", handoff(reason=why(step=101)), "step 101 is after the last step, 100"),
    ],
)
def test_what_nobody_can_have_reached_is_refused(part: str, item: Any, reason: str) -> None:
    found, reasons = kept({part: (item,)})
    assert getattr(found, part) == ()
    assert len(reasons) == 1 and reasons[0].startswith(reason), reasons


def test_only_the_service_makes_a_generation_of_another_start() -> None:
    told = handoff(parent=1, generation=3 * PLACES + 2)
    _, reasons = kept({"handoffs": (told,)}, FACTS | {"next_generation": 3 * PLACES + 2})
    assert reasons == ["generation 300002 is of another start than parent 1: no handoff makes it"]


def test_what_the_ledger_cannot_charge_is_left_out_of_a_handoff_and_the_rest_of_it_stands() -> None:
    measures = HandoffMeasures(pause_s=1e9, bytes_moved=COUNT_MAX, lost_s=3.0)
    found, reasons = kept({"handoffs": (told := handoff(measures=measures),)})
    assert found.handoffs == (told.model_copy(update={"measures": HandoffMeasures(lost_s=3.0)}),)
    assert [reason.split(":")[0] for reason in reasons] == ["pause_s", "bytes_moved"]


def test_a_time_outside_of_the_jobs_life_is_the_nearest_one_within() -> None:
    past, future = datetime(2000, 1, 1, tzinfo=UTC), datetime(2099, 1, 1, tzinfo=UTC)
    row = MetricsRow(job_id="j", generation=1, step=5, at_utc=future, values={})
    found, reasons = kept(
        {
            "steps": tuple(step_row("j", 1, 5, at) for at in (past, NOW, future)),
            "checkpoints": (checkpoint(finished_utc=future),),
            "metrics": (row,),
            "handoffs": (handoff(opened_utc=past, changed_utc=future),),
        }
    )
    assert [step.finished_utc for step in found.steps] == [SINCE, NOW, NOW]
    assert found.checkpoints[0].finished_utc == found.metrics[0].at_utc == found.handoffs[0].changed_utc == NOW
    assert found.handoffs[0].opened_utc == SINCE and reasons == []


def test_agents_reach_the_places_of_the_newest_start_only() -> None:
    def highest(next_generation: int) -> int:
        facts: dict[str, Any] = FACTS | {"next_generation": next_generation}
        return Reach.of(**facts).generation

    assert highest(1) == 1 + GENERATIONS_AHEAD_MAX
    assert highest(PLACES - 5) == highest(PLACES) == PLACES - 1
    assert highest(PLACES + 2) == PLACES + 2 + GENERATIONS_AHEAD_MAX
