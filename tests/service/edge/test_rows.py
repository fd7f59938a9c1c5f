"""Lists of many rows: read and written some at a time, and not in the event loop, where agents' requests wait."""

import asyncio
import json
from typing import Any

import pytest
from pydantic import TypeAdapter
from sqlalchemy import event, text

from service import paging
from service.jobs.schemas import LogOut, StepOut
from service.metrics.schemas import MetricsOut
from service.nodes.schemas import NodeOut
from tests.service.fake_agent import JOB
from tests.tiers import sample

ROWS = 23
_STEPS = """
    INSERT INTO steps (job_id, generation, step, seconds, loss, consumed_samples, sample_digest, tokens, finished_at)
    SELECT :job_id, 1, number, 0.125, CASE number % 3 WHEN 0 THEN NULL ELSE number / 7.0 END, number * 8,
           'd' || number, NULL, now() FROM generate_series(1, :rows) AS number"""
_METRICS = """
    INSERT INTO metrics (job_id, step, generation, numbers, at)
    SELECT :job_id, number, 1, jsonb_build_object('loss', number / 7.0, 'lr', NULL), now()
      FROM generate_series(1, :rows) AS number"""
_LOGS = """
    INSERT INTO rank_logs (job_id, generation, rank, start_offset, text, recorded_at)
    SELECT :job_id, 1, 0, number, 'a "piece", of\tΩ ' || number, now() FROM generate_series(1, :rows) AS number"""
LISTS = {
    "/api/v1/jobs/{job}/steps?limit=20000": StepOut,
    "/api/v1/jobs/{job}/metrics?limit=20000": MetricsOut,
    "/api/v1/jobs/{job}/metrics?points=5000": MetricsOut,
    "/api/v1/jobs/{job}/logs?limit=2000": LogOut,
    "/api/v1/nodes?limit=20000": NodeOut,
}


@pytest.fixture
def job_id(client, context, make_agent) -> str:
    """A job with many rows of each kind, and as many nodes."""
    job_id = client.post("/api/v1/jobs", json=JOB).json()["job_id"]
    with context.sessions.begin() as session:
        for statement in (_STEPS, _METRICS, _LOGS):
            session.execute(text(statement), {"job_id": job_id, "rows": ROWS})
    for number in range(ROWS):
        make_agent(f"node-{number:02}").sync()
    return job_id


@pytest.fixture
def at_once(monkeypatch) -> int:
    monkeypatch.setattr(paging, "ROWS_AT_ONCE", 5)
    return 5


def is_in_event_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


@pytest.mark.parametrize("path", sample(LISTS, *list(LISTS)[:1]))
def test_many_rows_are_written_outside_the_event_loop_some_at_a_time(client, job_id, at_once, monkeypatch, path):
    written: list[tuple[bool, int]] = []
    dump = TypeAdapter.dump_json

    def watched(self: TypeAdapter, instance: Any, *args: Any, **options: Any) -> bytes:
        if isinstance(instance, list):
            written.append((is_in_event_loop(), len(instance)))
        return dump(self, instance, *args, **options)

    monkeypatch.setattr(TypeAdapter, "dump_json", watched)
    answer = client.get(path.format(job=job_id))
    assert answer.status_code == 200, answer.text
    assert written == [(False, size) for size in (at_once, at_once, at_once, at_once, ROWS - 4 * at_once)]
    assert len(answer.json()) == ROWS


@pytest.mark.parametrize("path", sample(LISTS, *list(LISTS)[2:4]))
def test_what_is_written_in_parts_is_one_list_as_its_schema_says(client, job_id, at_once, path):
    answer = client.get(path.format(job=job_id))
    whole = TypeAdapter(list[LISTS[path]])  # type: ignore[valid-type]
    assert answer.content == whole.dump_json(whole.validate_json(answer.content))
    assert answer.headers["content-type"] == "application/json"
    assert int(answer.headers["content-length"]) == len(answer.content)


def test_a_list_without_rows_is_an_empty_list(client):
    job_id = client.post("/api/v1/jobs", json=JOB).json()["job_id"]
    for path in LISTS:
        assert client.get(path.format(job=job_id)).content == b"[]"


PAGED = ("/api/v1/jobs/{job}/steps", "/api/v1/jobs/{job}/metrics", "/api/v1/nodes")


@pytest.mark.parametrize("path", sample(PAGED, PAGED[0]))
@pytest.mark.parametrize("limit", sample([4, 5, 6, 10, 22, 23, 24], 5, 23))
def test_pages_that_end_anywhere_among_the_rows_that_are_read_at_once_are_the_whole_list(
    client, job_id, at_once, path, limit
):
    (whole,) = pages_of(client, path.format(job=job_id), limit=1_000)
    assert len(whole) == ROWS
    found = pages_of(client, path.format(job=job_id), limit=limit)
    assert [row for page in found for row in page] == whole
    assert [len(page) for page in found] == [limit] * (ROWS // limit) + [ROWS % limit] * (ROWS % limit > 0)


def pages_of(client, address: str, *, limit: int) -> list[list[dict]]:
    following: str | None = f"{address}?limit={limit}"
    found = []
    while following is not None:
        answer = client.get(following)
        found.append(json.loads(answer.content))
        following = answer.links.get("next", {}).get("url")
    return found


def test_no_statement_brings_more_rows_of_a_page_than_are_read_at_once(client, context, job_id, at_once):
    brought: list[int] = []

    def after(_connection, cursor, statement: str, *_rest) -> None:
        if "FROM steps" in statement:
            brought.append(cursor.rowcount)

    event.listen(context.database.readers_engine, "after_cursor_execute", after)
    assert client.get(f"/api/v1/jobs/{job_id}/steps?limit=20000").status_code == 200
    # One more each time: whether the list goes on.
    assert brought == [at_once + 1] * 4 + [ROWS - 4 * at_once]
