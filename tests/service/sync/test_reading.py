"""What no honest agent sends: the part that breaks a rule is refused by name, and the rest of the report is stored."""

import json

import pytest
from sqlalchemy import func, select

from agent.protocol.sync import REFUSALS_MAX, CheckpointFact, LogChunk, RankStatus, SyncOrders
from agent.protocol.values import HandoffState
from liver_core.handoff import RankStage
from liver_core.handoff.generations import PLACES
from liver_core.layout.limits import COUNT_MAX
from service.jobs.tables import JobRow, JobStepRow
from service.nodes.tables import NodeRow
from service.reconcilers import jobs
from service.sync.reach import GENERATIONS_AHEAD_MAX
from tests.service.fake_agent import FakeAgent, mirror, roster, step_row


@pytest.fixture
def running(running, clock):
    """The same, and its ranks have made a step."""
    for agent in running[1:]:
        agent.sync(ranks=(agent.rank(agent.job_order(), step=1),))
    clock.advance(1)
    return running


def answer_to(agent: FakeAgent, settings, **change):
    """The answer to a report in which these fields are replaced. Two texts stand for numbers that are no JSON."""
    body = agent.report().model_dump(mode="json")
    for path, value in change.items():
        *parents, name = path.split("__")
        part = body
        for parent in parents:
            part = part[parent]
        part[name] = value
    text = json.dumps(body).replace('"1e999"', "1e999").replace('"NaN"', "NaN")
    return agent.client.post("/agent/v1/sync", content=text, headers=agent.headers)


STEP = {"generation": 1, "seconds": 0.5, "finished_utc": "2026-01-01T12:00:00Z", "loss": 2.0}
RANK = {"generation": 1, "rank": 0, "slot": 0, "pid": 7, "stage": "training", "step": 4}
NOTICE = {"node_id": "a", "kind": "interruption", "source": "s", "first_seen_utc": "2026-01-01T12:00:00Z"}


@pytest.mark.parametrize(
    ("part", "good", "wrong", "rule"),
    [
        ("steps", STEP | {"step": 4}, {"step": 5, "generation": 0}, "generation: must be greater than or equal to 1"),
        ("steps", STEP | {"step": 4}, {"step": 5, "loss": "NaN"}, "loss: must be a finite number"),
        ("steps", STEP | {"step": 4}, {"step": 5, "loss": "1e999"}, "loss: must be a finite number"),
        ("steps", STEP | {"step": 4}, {"step": 2**70}, "step: must be less than or equal to 9007199254740991"),
        ("steps", STEP | {"step": 4}, {"step": 5, "finished_utc": "2026-01-01T12:00:00"}, "finished_utc: must have"),
        (
            "steps",
            STEP | {"step": 4},
            {"step": 5, "finished_utc": "9999-12-31T23:59:59-14:00"},
            "finished_utc: must be less than 2100-01-01T00:00:00Z",
        ),
        (
            "ranks",
            RANK,
            {"rank": 1, "stage": "failed", "reason": {"text": "gone\0", "code": "x"}},
            "reason.text: must not contain a NUL character",
        ),
    ],
)
def test_a_part_that_breaks_a_rule_is_refused_by_name_and_the_rest_is_stored(
    running, context, settings, part, good, wrong, rule
):
    job_id, a, _ = running
    answer = answer_to(a, settings, **{part: [good | {"job_id": job_id}, good | {"job_id": job_id} | wrong]})
    assert answer.status_code == 200, answer.text
    (refusal,) = SyncOrders.model_validate_json(answer.content).refusals
    assert (refusal.part, refusal.key.split("/")[0]) == (part, job_id)
    assert refusal.reason.startswith(rule)
    with context.sessions() as session:
        assert session.get_one(NodeRow, "a").report_seq == a.seq
        assert session.get_one(JobRow, job_id).last_step == 4


def test_a_deadline_that_the_database_cannot_say_stops_no_other_job(running, client, context, settings):
    """psycopg cannot read the year 10000: every reconcile, and every list of nodes and notices, read that row."""
    _, a, _ = running
    wrong = NOTICE | {"deadline_utc": "9999-12-31T23:59:59-14:00"}
    answer = answer_to(a, settings, notices=[wrong, NOTICE | {"source": "other", "deadline_utc": None}])
    (refusal,) = SyncOrders.model_validate_json(answer.content).refusals
    assert (refusal.part, refusal.key) == ("notices", "a/interruption/s")
    assert refusal.reason == "deadline_utc: must be less than 2100-01-01T00:00:00Z"
    jobs.tick(context)
    assert [notice["source"] for notice in client.get("/api/v1/notices").json()] == ["other"]
    assert client.get("/api/v1/nodes").status_code == 200


def test_a_list_that_is_none_is_refused_whole(running, settings):
    job_id, a, _ = running
    many = [STEP | {"job_id": job_id, "step": number} for number in range(1_025)]
    for wrong, rule in ((7, "must be a list"), (many, "must have at most 1024 entries")):
        (refusal,) = SyncOrders.model_validate_json(answer_to(a, settings, steps=wrong).content).refusals
        assert (refusal.part, refusal.key, refusal.reason) == ("steps", "(whole)", rule)


def test_a_wrong_notice_source_costs_only_itself(running, context, settings):
    _, a, _ = running
    wrong = {"source": "imds", "state": "unknown", "reason": "\0", "since_utc": "2026-01-01T00:00:00Z"}
    (refusal,) = SyncOrders.model_validate_json(answer_to(a, settings, node__notice_source=wrong).content).refusals
    assert (refusal.part, refusal.reason) == ("notice_source", "reason: must not contain a NUL character")
    with context.sessions() as session:
        assert session.get_one(NodeRow, "a").notice_source is None


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("node__device", "cpu\0"),
        ("report_seq", 2**70),
        ("agent_version", "1" * 300),
        ("issued_utc", "1999-12-31T00:00:00Z"),
    ],
)
def test_only_a_wrong_envelope_is_422_as_a_whole(running, context, settings, field, value):
    _, a, _ = running
    answer = answer_to(a, settings, **{field: value})
    assert answer.status_code == 422
    assert answer.headers["content-type"] == "application/problem+json"
    assert [error["field"] for error in answer.json()["errors"]] == [field.replace("__", ".")]


@pytest.mark.parametrize("body", ["[" * 5_000, '{"a":' * 5_000, '{"protocol_version": "\\ud800"}', "\x00", "7"])
def test_what_is_no_json_is_422(client, make_agent, body):
    answer = client.post("/agent/v1/sync", content=body, headers=make_agent("a").headers)
    assert answer.status_code in (409, 422)
    assert answer.headers["content-type"] == "application/problem+json"


def test_a_generation_that_no_agent_can_have_made_bricks_no_job(running, context, clock):
    """The number after it would be the job's next generation, which no order can carry: every member would get 500."""
    job_id, a, b = running
    far = a.report(
        handoffs=(
            mirror(
                a.roster(),
                roster(job_id, COUNT_MAX, a.roster().layout, "a", "b"),
                clock(),
                state=HandoffState.ABORTED,
            ),
        ),
        ranks=(a.rank(a.job_order()), a.rank(a.job_order(), generation=PLACES)),
        logs=(LogChunk(job_id=job_id, generation=GENERATIONS_AHEAD_MAX + 3, rank=0, offset=0, text="x"),),
        steps=(step_row(job_id, 1, 9, clock()), step_row(job_id, COUNT_MAX, 9, clock())),
    )
    orders = SyncOrders.model_validate_json(a.post(far).content)
    assert sorted(refusal.part for refusal in orders.refusals) == ["handoffs", "logs", "ranks", "steps"]
    assert {refusal.reason for refusal in orders.refusals if refusal.part == "handoffs"} == {
        f"generation {COUNT_MAX} is beyond {2 + GENERATIONS_AHEAD_MAX}, which this job cannot have passed"
    }
    assert b.sync().jobs[0].next_generation == 2
    with context.sessions() as session:
        assert session.scalars(select(JobStepRow.generation)).all() == [1]
        assert [rank["generation"] for rank in session.get_one(NodeRow, "a").ranks] == [1]


def test_who_tells_of_worlds_that_nobody_knows_again_and_again_uses_up_no_more_numbers(running):
    _, a, b = running
    for _ in range(3):
        far = b.sync().jobs[0].next_generation + GENERATIONS_AHEAD_MAX
        a.sync(ranks=(a.rank(a.job_order()), a.rank(a.job_order(), generation=far)))
    assert b.sync().jobs[0].next_generation == 1 + GENERATIONS_AHEAD_MAX + 1


def test_a_handoff_that_is_not_after_its_parent_is_refused(running, clock):
    job_id, a, _ = running
    wrong = mirror(a.roster(), roster(job_id, 2, a.roster().layout, "a", "b"), clock(), parent=2)
    (refusal,) = a.sync(handoffs=(wrong,)).refusals
    assert refusal.reason == "generation 2 must be above parent 2"


def test_an_answer_to_a_request_that_was_never_made_does_not_end_all_later_requests(running, client, context):
    job_id, a, b = running
    for agent in (a, b):
        agent.sync(ranks=(agent.rank(agent.job_order(), step=2),))
    fact = CheckpointFact(
        job_id=job_id, generation=1, step=2, path="/checkpoints/step-2", finished_utc=a.clock(), asked=COUNT_MAX
    )
    (refusal,) = a.sync(checkpoints=(fact,), ranks=(a.rank(a.job_order(), step=2),)).refusals
    assert refusal.reason == f"checkpoint {COUNT_MAX} was not asked for, only 0 were"
    assert client.post(f"/api/v1/jobs/{job_id}/checkpoint").status_code == 200
    assert client.get(f"/api/v1/jobs/{job_id}").json()["checkpoint_asked"]


def test_of_very_many_refusals_the_answer_holds_as_many_as_it_can(make_agent, clock):
    agent = make_agent("a")
    steps = tuple(step_row(f"none-{number}", 1, 1, clock()) for number in range(1_024))
    ranks = tuple(
        RankStatus(job_id=f"gone-{number}", generation=1, rank=0, slot=0, pid=1, stage=RankStage.TRAINING)
        for number in range(1_024)
    )
    assert len(agent.sync(steps=steps, ranks=ranks).refusals) == REFUSALS_MAX


def test_a_report_that_breaks_too_many_rules_is_refused_whole(make_agent, settings, context):
    answer = answer_to(make_agent("a"), settings, steps=[{str(number): 0 for number in range(25)}] * 1_000)
    assert answer.status_code == 422
    assert "rules, more than 20000" in answer.json()["detail"]
    with context.sessions() as session:
        assert session.scalar(select(func.count()).select_from(NodeRow)) == 0


def test_times_count_in_utc_whatever_their_zone(running, settings):
    job_id, a, _ = running
    row = STEP | {"job_id": job_id, "step": 4}
    late = row | {"finished_utc": "2100-01-01T05:00:00+14:00"}
    early = row | {"finished_utc": "1999-12-31T20:00:00-05:00", "step": 5}
    orders = SyncOrders.model_validate_json(answer_to(a, settings, steps=[late, early]).content)
    assert orders.refusals == ()
