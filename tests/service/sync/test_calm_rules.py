"""What makes a report calm or not, rule by rule, and what of a job it counts."""

from dataclasses import replace
from datetime import timedelta
from uuid import uuid4

import pytest
from sqlalchemy import select

from agent.protocol.sync import MetricsRow, SyncOrders
from liver_core.handoff import RankStage
from service.jobs.tables import HeldFactRow, JobGrantRow, JobRow, JobStepRow
from service.leases.tables import LeaseRow
from service.ledger.operations import close_lease
from service.ledger.rules import Spent
from service.ledger.tables import Cause, IntervalRow
from service.nodes.tables import NodeRow
from service.sync import calm as calm_reports
from service.sync.calm import CalmAsk, Left
from service.sync.reading import read_report
from tests.service.fake_agent import step_row


@pytest.fixture
def found(training, clock, monkeypatch) -> list[bool]:
    """Of each report from now on that may be calm, whether it is. All nodes have told their fourth step."""
    said: list[bool] = []
    store_calm = calm_reports.store_calm

    def noted(*arguments, **named):
        stored = store_calm(*arguments, **named)
        said.extend(not isinstance(item, Left) for item in stored)
        return stored

    clock.advance(1)
    monkeypatch.setattr(calm_reports, "store_calm", noted)
    return said


def job_of(context) -> JobRow:
    with context.sessions() as session:
        return session.scalars(select(JobRow)).one()


def change_job(context, **values) -> None:
    with context.sessions.begin() as session:
        row = session.scalars(select(JobRow)).one()
        for name, value in values.items():
            setattr(row, name, value)


def test_a_rank_that_is_further_than_the_rows_of_its_steps_counts_as_far_as_it_says(training, context, found):
    """Not every rank reports rows."""
    agents, parts = training
    agents["b"].sync(**parts("b", 6) | {"steps": ()})
    assert found == [True] and job_of(context).last_step == 6


def test_rows_of_steps_that_are_further_than_their_rank_says_count(training, context, found):
    """The state of the rank was read a moment before."""
    agents, parts = training
    rank = parts("a", 4)["ranks"]
    agents["a"].sync(**parts("a", 6) | {"ranks": rank})
    assert found == [True] and job_of(context).last_step == 6


def test_a_rank_that_still_starts_has_made_no_step_whatever_checkpoint_it_starts_from(training, context, clock, found):
    agents, parts = training

    def starting(step: int) -> dict:
        rank = parts("b", step)["ranks"][0]
        return {"ranks": (rank.model_copy(update={"stage": RankStage.STARTING}),)}

    agents["b"].sync(**starting(9))
    clock.advance(1)
    agents["b"].sync(**starting(9))
    assert found == [False, True], "the second says nothing new"
    assert job_of(context).last_step == 4


def test_steps_that_are_done_again_after_a_restart_do_not_lower_the_highest(training, context, clock, found):
    agents, parts = training
    change_job(context, highest_step=50)
    agents["a"].sync(**parts("a", 6))
    assert found == [True]
    job = job_of(context)
    assert (job.last_step, job.last_step_at, job.highest_step) == (6, clock(), 50)


def test_a_report_of_an_agent_start_that_was_replaced_is_stored_by_nobody(training, context, clock, found):
    """It speaks of the same ranks, with a higher number: only its start tells that it is the old one."""
    agents, parts = training
    old = agents["a"]
    new = replace(old, incarnation=uuid4(), seq=0, orders=None)
    new.sync(**parts("a", 4))
    del found[:]
    clock.advance(1)
    assert old.post(old.report(**parts("a", 6))).status_code == 409
    assert found == [False]
    assert job_of(context).last_step == 4
    with context.sessions() as session:
        node = session.get_one(NodeRow, "a")
        assert (node.agent_incarnation, node.report_seq) == (new.incarnation, 1)


def test_where_the_ledger_of_a_node_was_written_meanwhile_nothing_is_stored_without_its_time(
    training, context, clock, found, monkeypatch
):
    agents, parts = training
    grow = calm_reports.grow

    def overtaken(session, tails, *, until):
        """Somebody else has moved the end of the interval since it was read."""
        moved = [replace_end(tail) for tail in tails]
        return grow(session, moved, until=until)

    def replace_end(tail):
        return replace(tail, ends_at=tail.ends_at - timedelta(seconds=1))

    monkeypatch.setattr(calm_reports, "grow", overtaken)
    agents["a"].sync(**parts("a", 6))
    assert found == [], "what was begun together is taken back, and the report stored alone"
    with context.sessions() as session:
        ends = session.scalars(select(IntervalRow.ends_at).order_by(IntervalRow.ends_at)).all()
        assert ends[-1] == clock()
    assert job_of(context).last_step == 6


@pytest.mark.parametrize("part", ["logs", "metrics"])
def test_facts_of_another_world_are_not_calm(training, clock, found, part):
    agents, parts = training
    said = parts("a", 6)
    if part == "logs":
        said["logs"] = (said["logs"][0].model_copy(update={"generation": 2}),)
    else:
        job_id = said["ranks"][0].job_id
        said["metrics"] = (MetricsRow(job_id=job_id, generation=2, step=6, at_utc=clock(), values={"x": 1.0}),)
    agents["a"].sync(**said)
    assert found == [False]


def test_what_is_new_of_the_node_itself_is_not_calm_and_is_stored(training, client, found):
    agents, parts = training
    agents["a"].watch()
    agents["a"].sync(**parts("a", 6))
    assert found == [False]
    assert client.get("/api/v1/nodes/a").json()["notice_source"]["state"] == "watching"


def test_a_node_whose_lease_has_ended_is_not_calm_and_gets_another(training, context, clock, found):
    agents, parts = training
    with context.sessions.begin() as session:
        lease = session.scalars(select(LeaseRow).where(LeaseRow.node_id == "a")).one()
        close_lease(session, lease=lease, at=clock(), spent=lease.slots * [Spent(Cause.IDLE)], reason="test")
    clock.advance(1)
    agents["a"].sync(**parts("a", 6))
    assert found == [False]
    with context.sessions() as session:
        leases = session.scalars(select(LeaseRow).where(LeaseRow.node_id == "a")).all()
        assert [each.ended_at is None for each in sorted(leases, key=lambda each: each.started_at)] == [False, True]


def test_a_part_that_broke_a_rule_is_refused_by_name_in_the_answer_to_a_calm_report(training, clock, found):
    agents, parts = training
    body = agents["a"].report(**parts("a", 6)).model_dump(mode="json")
    body["steps"][0]["loss"] = "much"
    answer = agents["a"].client.post("/agent/v1/sync", json=body, headers=agents["a"].headers)
    refusals = SyncOrders.model_validate_json(answer.content).refusals
    assert found == [True] and [item.part for item in refusals] == ["steps"]


def test_times_of_a_node_whose_clock_is_off_are_stored_by_the_clock_of_the_service(training, context, clock, found):
    agents, parts = training
    agents["a"].clock = lambda: clock() + timedelta(seconds=300)
    agents["a"].sync(**parts("a", 4))  # How far it is off is news.
    clock.advance(1)
    del found[:]
    said = parts("a", 6)
    rows = tuple(row.model_copy(update={"finished_utc": agents["a"].clock()}) for row in said["steps"])
    agents["a"].sync(**said | {"steps": rows})
    assert found == [True]
    with context.sessions() as session:
        assert session.scalars(select(JobStepRow.finished_at).where(JobStepRow.step == 6)).one() == clock()


def test_nothing_is_stored_for_an_agent_that_does_not_wait_for_the_answer_any_more(training, context, clock, settings):
    """It says the same again, and is stored then."""
    agents, parts = training
    clock.advance(1)
    asks = [
        CalmAsk(
            read_report(agents[name].report(**parts(name, 6)).model_dump_json().encode()),
            clock(),
            lambda gone=gone: gone,
        )
        for name, gone in (("a", True), ("b", False))
    ]
    silences = {"silent_after_s": settings.silent_after_s, "gone_after_s": settings.gone_after_s}
    with context.sessions.begin() as session:
        stored = calm_reports.store_calm(session, asks, **silences, now=clock())
    assert [isinstance(item, Left) for item in stored] == [True, False]
    with context.sessions() as session:
        seqs = {node.node_id: node.report_seq for node in session.scalars(select(NodeRow))}
    assert (seqs["a"], seqs["b"]) == (agents["a"].seq - 1, agents["b"].seq)


@pytest.mark.parametrize("what", ["metrics after the last step", "a log of another rank"])
def test_a_report_that_says_what_the_node_may_not_say_is_not_calm_and_the_part_is_refused(
    training, context, clock, found, what
):
    agents, parts = training
    said = parts("a", 6)
    if what.startswith("metrics"):
        job_id = said["ranks"][0].job_id
        said["metrics"] = (MetricsRow(job_id=job_id, generation=1, step=1001, at_utc=clock(), values={"x": 1.0}),)
    else:
        said["logs"] = (said["logs"][0].model_copy(update={"rank": said["ranks"][0].rank + 1}),)
    refusals = agents["a"].sync(**said).refusals
    assert found == [False] and len(refusals) == 1
    assert job_of(context).last_step == 6


def test_while_facts_of_a_job_wait_for_their_handoff_its_reports_are_stored_alone(training, context, clock, found):
    """Only that looks whether they have to wait any longer."""
    agents, parts = training
    with context.sessions.begin() as session:
        job_id = session.scalars(select(JobRow.job_id)).one()
        fact = step_row(job_id, 2, 7, clock()).model_dump(mode="json")
        held = {"part": "steps", "generation": 2, "fact": fact, "held_at": clock()}
        session.add(HeldFactRow(job_id=job_id, node_id="a", **held))
    agents["b"].sync(**parts("b", 6))
    assert found == [False]


def test_what_a_node_says_that_has_no_part_in_the_job_any_more_is_not_calm(training, context, clock, found):
    agents, parts = training
    with context.sessions.begin() as session:
        job_id = session.scalars(select(JobRow.job_id)).one()
        session.add(JobGrantRow(job_id=job_id, node_id="b", role=None, at=clock(), ends_at=clock()))
    said = parts("b", 6)
    clock.advance(1)
    refusals = agents["b"].sync(**said).refusals
    assert found == [False] and [item.part for item in refusals] == ["jobs"]
    assert job_of(context).last_step == 4
