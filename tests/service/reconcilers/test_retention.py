"""What is old is deleted in bounded parts, and never what is still needed."""

import logging
from dataclasses import replace
from datetime import timedelta

import pytest
from sqlalchemy import func, select, text

from service.audit.tables import AuditRow
from service.capacity.tables import InstanceRow, RequestRow
from service.decisions.tables import DecisionRow
from service.handoffs.tables import HandoffRow
from service.incidents.tables import JobIncidentRow
from service.jobs.tables import JobGrantRow, JobStepRow, RankLogRow
from service.leases.tables import LeaseRow
from service.ledger.tables import IntervalRow
from service.metrics.tables import StepMetricsRow
from service.nodes.operations import mark_gone
from service.nodes.tables import NodeRow
from service.notices.tables import NoticeRow
from service.reconcilers import upkeep
from service.settings import ServiceSettings
from tests.service.reconcilers.conftest import Fleet
from tests.tiers import sample

DAY_S = 86_400.0
KEPT = [name for name in ServiceSettings.model_fields if name.endswith("_kept_days")]


def count(context, *tables) -> list[int]:
    with context.sessions() as session:
        return [session.scalar(select(func.count()).select_from(table)) or 0 for table in tables]


@pytest.fixture
def ended(fleet: Fleet) -> Fleet:
    """A job that has ended, whose node has gone, with something of every kind."""
    fleet.stopped()
    with fleet.context.sessions.begin() as session:
        values = {"job_id": fleet.job_id, "now": fleet.clock()}
        session.execute(text("INSERT INTO metrics VALUES (:job_id, 1, 1, '{}', :now)"), values)
        session.add(
            RankLogRow(job_id=fleet.job_id, generation=1, rank=0, start_offset=0, text="x", recorded_at=fleet.clock())
        )
    fleet.client.post("/api/v1/nodes/a/drain", json={"in_s": 3_600})
    return fleet


def test_nothing_goes_before_its_time(ended: Fleet, context):
    for days in (0.0, 29.0):
        ended.clock.advance(days * DAY_S)
        assert upkeep.tick(context) == 0


KINDS = [
    ("logs_kept_days", 30, [RankLogRow]), ("steps_kept_days", 90, [JobStepRow, StepMetricsRow]),
    ("decisions_kept_days", 90, [DecisionRow]), ("audit_kept_days", 400, [AuditRow]),
]  # fmt: skip


@pytest.mark.parametrize(("setting", "days", "tables"), sample(KINDS, KINDS[1]))
def test_each_kind_is_kept_for_its_own_time(ended: Fleet, context, settings, setting, days, tables):
    for name in KEPT:
        object.__setattr__(settings, name, float(days) if name == setting else 36_500.0)
    assert 0 not in count(context, *tables)
    ended.clock.advance(days * DAY_S - 60)
    assert upkeep.tick(context) == 0
    ended.clock.advance(120)
    before = sum(count(context, *tables))
    assert upkeep.tick(context) >= before and count(context, *tables) == [0] * len(tables)
    assert upkeep.tick(context) == 0


def test_what_a_job_or_a_lease_needs_that_has_not_ended_stays(fleet: Fleet, context, caplog):
    fleet.run()
    fleet.client.post("/api/v1/nodes/a/drain", json={"in_s": 1})
    fleet.round()
    kept = (JobStepRow, JobGrantRow, NoticeRow, LeaseRow)
    before = count(context, *kept)
    assert 0 not in before
    fleet.clock.advance(3_000 * DAY_S)
    with caplog.at_level(logging.INFO, "service.reconcilers.upkeep"):
        upkeep.tick(context)
    assert count(context, *kept) == before
    assert count(context, DecisionRow) == [1], "the newest is what the next one is compared with"
    assert len(caplog.records) == 1, "one line says it all"
    assert "old audit rows" in caplog.text and "old decisions" in caplog.text


def test_a_notice_goes_some_time_after_its_lease_has_ended(ended: Fleet, context):
    with context.sessions.begin() as session:
        mark_gone(session, session.get_one(NodeRow, "a"), reason="test", now=ended.clock())
    notices = count(context, NoticeRow)
    assert notices != [0]
    ended.clock.advance(89 * DAY_S)
    upkeep.tick(context)
    assert count(context, NoticeRow) == notices
    ended.clock.advance(2 * DAY_S)
    upkeep.tick(context)
    assert count(context, NoticeRow) == [0]


def test_an_incident_goes_some_time_after_it_was_over(ended: Fleet, context):
    began = ended.clock()
    with context.sessions.begin() as session:
        row = {"job_id": ended.job_id, "kind": "checkpoint", "reason": "full", "began_at": began, "last_at": began}
        session.add(JobIncidentRow(**row, over_at=began + timedelta(days=60)))
    for days, left in ((91, 1), (60, 0)):
        ended.clock.advance(days * DAY_S)
        upkeep.tick(context)
        assert count(context, JobIncidentRow) == [left]


def test_attempts_of_handoffs_go_and_handoffs_that_took_place_stay(fleet: Fleet, context):
    fleet.run()
    row = {"parent": 1, "proposer": "x", "cause": "grow", "rung": "live", "target": "{}", "target_layout": "DP2"}
    with context.sessions.begin() as session:
        for number, state in enumerate(("aborted", "active", "broken")):
            session.execute(
                text(
                    "INSERT INTO handoffs (handoff_id, job_id, generation, state, opened_at, changed_at, recorded_at, "
                    "measures, leaving, plan_revision, plan_digest, mirror_seq, stage, source_layout, superseded, "
                    "reason, pause_charged_s, parent, proposer, cause, rung, target, target_layout, why) VALUES "
                    "(gen_random_uuid(), :job_id, :generation, :state, :now, :now, :now, '{}', '[]', 1, '', 1, '', '', "
                    "false, '', 0, :parent, :proposer, :cause, :rung, :target, :target_layout, '')"
                ),
                row | {"job_id": fleet.job_id, "state": state, "now": fleet.clock(), "generation": number + 50},
            )
    fleet.clock.advance(91 * DAY_S)
    upkeep.tick(context)
    with context.sessions() as session:
        assert session.scalars(select(HandoffRow.state)).all() == ["active"]


@pytest.mark.thorough
def test_requests_for_machines_go_when_no_machine_of_theirs_is_a_node_and_the_machines_stay(ended: Fleet, context):
    def requests_of() -> dict[str, bool]:
        return {row["node_id"]: row["request"] is not None for row in ended.client.get("/api/v1/instances").json()}

    with context.sessions.begin() as session:
        session.add(RequestRow(provider="none", pool="a", machines=1, asked_by="x", asked_at=ended.clock()))
    stays, goes, *others = ended.agents
    both = {stays: True, goes: True}
    for days, kept in ((89.0, both), (2.0, both), (89.0, {stays: True, goes: False})):
        ended.clock.advance(days * DAY_S)
        with context.sessions.begin() as session:
            for name in (goes, *others):
                mark_gone(session, session.get_one(NodeRow, name), reason="test", now=ended.clock())
        upkeep.tick(context)
        assert {name: requests_of()[name] for name in (stays, goes)} == kept
    assert count(context, InstanceRow) == [len(ended.agents)]
    with context.sessions() as session:
        assert "a" in session.scalars(select(RequestRow.pool)).all(), "it has not ended"


def test_intervals_go_and_the_answer_of_the_ledger_stays(ended: Fleet, context):
    def answers() -> list:
        return [ended.client.get("/api/v1/ledger", params=which).json() for which in ({}, {"job_id": ended.job_id})]

    with context.sessions.begin() as session:
        for name in ended.agents:
            mark_gone(session, session.get_one(NodeRow, name), reason="test", now=ended.clock())
    before, since = answers(), ended.clock().isoformat()
    assert before[0]["slot_seconds"] > 0 and count(context, IntervalRow) != [0]
    ended.clock.advance(91 * DAY_S)
    upkeep.tick(context)
    assert count(context, IntervalRow) == [0] and answers() == before
    parted = ended.client.get("/api/v1/ledger", params={"until": since})
    assert parted.status_code == 422 and parted.json()["errors"][0]["field"] == "until"
    price = {"price_usd_per_hour": 1.0, "effective_from": since}
    pool = ended.client.get("/api/v1/leases").json()[0]["pool"]
    assert ended.client.put(f"/api/v1/pools/{pool}/price", json=price).status_code == 200, "the first one counts always"
    late = price | {"effective_from": (ended.clock() - timedelta(days=100)).isoformat()}
    refused = ended.client.put(f"/api/v1/pools/{pool}/price", json=late)
    assert refused.status_code == 422 and "must be a full hour" in refused.json()["errors"][0]["rule"]


@pytest.mark.thorough
def test_much_is_deleted_in_parts_each_in_a_transaction_of_its_own(ended: Fleet, context, monkeypatch):
    monkeypatch.setattr(upkeep, "TASKS", tuple(replace(task, most=3) for task in upkeep.TASKS))
    monkeypatch.setattr(upkeep, "PARTS_MAX", 2)
    with context.sessions.begin() as session:
        session.execute(
            text(
                "INSERT INTO rank_logs (job_id, generation, rank, start_offset, text, recorded_at) "
                "SELECT :job_id, 1, 1, n, 'x', :now FROM generate_series(1, 10) AS n"
            ),
            {"job_id": ended.job_id, "now": ended.clock()},
        )
    ended.clock.advance(31 * DAY_S)
    look = upkeep.Upkeep(context)
    assert (look.tick(), look.is_behind) == (6, True)
    assert (look.tick(), look.is_behind) == (5, True)
    assert (look.tick(), look.is_behind) == (0, False)


@pytest.mark.thorough
def test_two_replicas_do_not_do_it_twice(ended: Fleet, context):
    ended.clock.advance(31 * DAY_S)
    with context.sessions.begin() as session:
        session.execute(text("SELECT pg_advisory_xact_lock(:key)"), {"key": upkeep.LOCK_KEY})
        assert upkeep.tick(context) == 0
    assert upkeep.tick(context) == 1


@pytest.mark.parametrize("days", [0, -1, 36_501, float("inf"), float("nan")])
def test_how_long_something_is_kept_has_bounds(days):
    for name in KEPT:
        with pytest.raises(ValueError, match=name):
            ServiceSettings(**{name: days})
