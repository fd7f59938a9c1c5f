"""Steps by layout, read from the rows of a job's worlds."""

from datetime import UTC, datetime, timedelta

import pytest
from sqlalchemy import text

from service.metrics.step_times import WORLDS_MAX, measured_steps, step_seconds
from service.planner.measured_steps import EDGE_STEPS, WARM_UP_STEPS
from tests.service.fake_agent import JOB

START = datetime(2026, 1, 1, tzinfo=UTC)
_WORLD = text(
    "INSERT INTO job_generations (job_id, generation, origin_id, source_kind, layout, nodes, roster, reason,"
    " lost_steps, repeats_until, created_at)"
    " VALUES (:job, :generation, gen_random_uuid(), 'handoff', :layout, 1, '{}', '', 0, 0, now())"
)
_STEP = text(
    "INSERT INTO steps (job_id, generation, step, seconds, finished_at)"
    " VALUES (:job, :generation, :step, :seconds, :at)"
)
_HANDOFF = text(
    "INSERT INTO handoffs (handoff_id, job_id, parent, generation, plan_revision, plan_digest, mirror_seq, proposer,"
    " cause, state, stage, rung, target, source_layout, target_layout, leaving, superseded, why, reason, opened_at,"
    " changed_at, recorded_at, measures, pause_charged_s) VALUES (gen_random_uuid(), :job, :parent, :generation, 1, '',"
    " 0, 'a', 'grow', :state, '', 'live', '{}', '', '', '[]', false, '', '', :at, now(), now(), '{}', 0)"
)


@pytest.fixture
def rows(client, context):
    """A job, to which `add` adds worlds with steps of a second each on the clock, and handoffs."""

    class Rows:
        job = client.post("/api/v1/jobs", json=JOB).json()["job_id"]

        def world(self, generation: int, layout: str, *seconds: float, first: int = 1) -> None:
            with context.sessions.begin() as session:
                session.execute(_WORLD, {"job": self.job, "generation": generation, "layout": layout})
                for step, each in enumerate(seconds, first):
                    at = START + timedelta(seconds=step)
                    values = {"job": self.job, "generation": generation, "step": step, "seconds": each, "at": at}
                    session.execute(_STEP, values)

        def handoff(self, parent: int, generation: int | None, state: str, after: int) -> None:
            with context.sessions.begin() as session:
                at = START + timedelta(seconds=after + 0.5)
                values = {"job": self.job, "parent": parent, "generation": generation, "state": state, "at": at}
                session.execute(_HANDOFF, values)

        def seconds(self) -> dict[str, float]:
            with context.sessions() as session:
                return dict(step_seconds(session, self.job))

    return Rows()


def test_steps_beside_which_the_next_world_was_prepared_do_not_count(rows):
    rows.world(1, "A", *[9.0] * WARM_UP_STEPS, *[2.0] * 10, *[7.0] * 30)
    assert rows.seconds() == {"A": 7.0}
    rows.handoff(1, None, "aborted", after=3)
    assert rows.seconds() == {"A": 7.0}, "what was aborted says nothing of the steps after it"
    rows.handoff(1, 2, "streaming", after=15)
    assert rows.seconds() == {"A": 2.0}
    rows.world(2, "B", *[9.0] * WARM_UP_STEPS, *[1.0] * 25, *[3.0] * 25, first=46)
    assert rows.seconds() == pytest.approx({"A": 6.0, "B": 3.0}), "the machine is three times as slow now"


def test_of_a_long_world_its_first_and_its_last_steps_are_read_and_of_old_worlds_none(rows):
    rows.world(1, "old", *[1.0] * 20)
    for generation in range(2, 2 + WORLDS_MAX - 1):
        rows.world(generation, "B", *[1.0] * 8)
    assert set(rows.seconds()) == {"B", "old"}
    rows.world(2 + WORLDS_MAX, "C", *[9.0] * WARM_UP_STEPS, *[1.0] * 25, *[50.0] * 200, *[2.0] * EDGE_STEPS)
    assert rows.seconds() == pytest.approx({"B": 2.0, "C": 2.0})


def test_a_job_without_steps_has_measured_nothing(rows, context):
    rows.world(1, "A", 0.0, 0.0, 0.0, 0.0)
    with context.sessions() as session:
        assert measured_steps(session, rows.job) == ()
