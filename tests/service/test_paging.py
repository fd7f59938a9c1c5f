"""Lists in pages: nothing is left out and nothing shown twice, also among rows of one moment; what is no cursor of a
list is refused; a page costs as many statements for one row as for many."""

import base64
import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from uuid import UUID

import pytest
from sqlalchemy import event

from agent.protocol.values import HandoffCause, HandoffState
from liver_core.handoff import Rung
from liver_core.layout import ParallelLayout
from service.db.roster_rows import stored_roster
from service.handoffs.tables import HandoffRow
from service.jobs.operations import activate, add_generation, lock_job, new_birth
from service.jobs.tables import CheckpointRow, JobStepRow, SourceKind
from service.paging import Pages
from tests.service.conftest import bearer
from tests.service.fake_agent import JOB, another_job, roster

HANDOFFS = [UUID(int=number) for number in (7, 1, 300, 5, 2, 2**100)]
LISTS = {
    "/api/v1/jobs": 5,
    "/api/v1/nodes": 5,
    "/api/v1/notices": 5,
    "/api/v1/leases": 5,
    "/api/v1/instances": 5,
    "/api/v1/ledger/generations?job_id={job}": 5,
    "/api/v1/handoffs": len(HANDOFFS),
    "/api/v1/jobs/{job}/generations": 5,
    "/api/v1/jobs/{job}/checkpoints": 5,
    "/api/v1/jobs/{job}/steps": 10,
    "/api/v1/pools/prices": 5,
    "/api/v1/tokens": 8,
    "/api/v1/audit": None,
}


@pytest.fixture
def full(client, context, clock, settings, make_agent) -> str:
    """Several of everything, all of the same moment. The first of five jobs."""
    ids = [client.post("/api/v1/jobs", json=another_job(f"job-{number}")).json()["job_id"] for number in range(5)]
    for number in range(5):
        agent = make_agent(f"node-{number}", pool=f"pool-{number % 2}")
        agent.sync(notices=(agent.notice(),))
        assert client.put(f"/api/v1/pools/p{number}/price", json={"price_usd_per_hour": 1.5}).status_code == 200
    with context.sessions.begin() as session:
        job = lock_job(session, ids[0])
        for number in range(1, 6):
            members = roster(job.job_id, number, ParallelLayout(), "node-0")
            add_generation(session, job, members, new_birth(SourceKind.INIT, ""), parent=None, now=clock())
            activate(session, job, expected=number - 1 or None, generation=number)
            session.add(
                CheckpointRow(job_id=job.job_id, path=f"/c/{number}", generation=1, step=7, finished_at=clock())
            )
            session.add_all(
                JobStepRow(job_id=job.job_id, generation=number, step=step, seconds=1.0, finished_at=clock())
                for step in (1, 2)
            )
        session.add_all(_handoff(handoff_id, ids[0], clock()) for handoff_id in HANDOFFS)
    return ids[0]


def _handoff(handoff_id: UUID, job_id: str, at: Any) -> HandoffRow:
    return HandoffRow(
        handoff_id=handoff_id, job_id=job_id, parent=1, generation=None, proposer="node-0",
        cause=HandoffCause.NOTICE.value, rung=Rung.LIVE.value, source=None, target_layout="TP1", opened_at=at,
        changed_at=at, recorded_at=at, target=stored_roster(roster(job_id, 2, ParallelLayout(), "node-0")),
        state=(HandoffState.ABORTED if handoff_id.int % 2 else HandoffState.BROKEN).value,
    )  # fmt: skip


def pages_of(client, address: str, headers: dict[str, str], *, limit: int) -> Iterator[list[dict]]:
    following: str | None = f"{address}{'&' if '?' in address else '?'}limit={limit}"
    while following is not None:
        answer = client.get(following, headers=headers)
        assert answer.status_code == 200, answer.text
        yield answer.json()
        following = answer.links.get("next", {}).get("url")


@pytest.mark.thorough
def test_pages_together_are_the_whole_list_once_and_in_its_order(client, settings, full):
    admin = bearer(settings, "admin")
    for path, rows in LISTS.items():
        address = path.format(job=full)
        (whole,) = pages_of(client, address, admin, limit=1_000)
        assert len(whole) == rows if rows is not None else len(whole) >= 10, path
        for limit in (1, 2, 5):
            found = list(pages_of(client, address, admin, limit=limit))
            assert [row for page in found for row in page] == whole, path
            assert {len(page) for page in found[:-1]} <= {limit} and 1 <= len(found[-1]) <= limit, path


def test_jobs_that_are_submitted_while_somebody_turns_pages_shift_nothing(client, settings, full, clock):
    pages = pages_of(client, "/api/v1/jobs", bearer(settings, "admin"), limit=2)
    found = next(pages)
    clock.advance(1)
    client.post("/api/v1/jobs", json=JOB)
    found += [row for page in pages for row in page]
    assert sorted(row["name"] for row in found) == [f"job-{number}" for number in range(5)]


def test_a_cursor_that_is_none_of_this_list_is_refused_by_name(client, settings, full):
    def cursor_of(address: str) -> str:
        return client.get(address).links["next"]["url"].partition("cursor=")[2]

    good = cursor_of("/api/v1/jobs?limit=2")
    assert client.get(f"/api/v1/jobs?limit=3&cursor={good}").status_code == 200, "a page may have another size"
    changed = good[:30] + ("A" if good[30] != "A" else "B") + good[31:]
    others = cursor_of("/api/v1/handoffs?limit=2"), cursor_of("/api/v1/jobs?limit=2&name=job")
    foolish = [base64.urlsafe_b64encode(text.encode()).decode().rstrip("=") for text in ("[]", "{}", "1", "[" * 700)]
    for bad in (changed, good[:-2], "A", "", "%00", "A" * 2_000, *others, *foolish):
        answer = client.get(f"/api/v1/jobs?limit=2&cursor={bad}")
        assert answer.status_code == 422, bad
        assert [error["field"] for error in answer.json()["errors"]] == ["cursor"]


def test_a_cursor_with_a_right_check_but_impossible_values_is_refused_too(client):
    now = "2026-01-01T00:00:00+00:00"
    pages = Pages(2, about=json.dumps(["/api/v1/jobs", []]))
    for values in (
        ["9999-12-31T23:59:59-14:00", "x"],
        [now, "\0"],
        [1e400, "x"],
        [None, None],
        ["x"],
        [2**80],
        [now, {}],
    ):
        content = json.dumps([pages._check(values), *values])
        cursor = base64.urlsafe_b64encode(content.encode()).decode().rstrip("=")
        assert client.get(f"/api/v1/jobs?cursor={cursor}").status_code == 422, values


def test_lists_are_filtered(client, settings, full):
    def found(address: str, name: str) -> list[str]:
        return sorted(row[name] for page in pages_of(client, f"/api/v1/{address}", {}, limit=2) for row in page)

    client.post(f"/api/v1/jobs/{full}/stop")
    assert found("jobs?name=job-3", "name") == ["job-3"] and found("jobs?name=b-3", "name") == []
    assert len(found("jobs?state=pending&state=running", "name")) == 5 and found("jobs?state=failed", "name") == []
    assert found("nodes?pool=pool-1", "node_id") == ["node-1", "node-3"]
    assert len(found("nodes?state=ready", "node_id")) == 5 and found("nodes?state=gone", "node_id") == []
    assert found("notices?node_id=node-4", "node_id") == found("leases?node_id=node-4", "node_id") == ["node-4"]
    assert len(found(f"handoffs?job_id={full}&state=aborted", "job_id")) == 3
    assert found("handoffs?state=active", "job_id") == []
    assert client.get("/api/v1/jobs?state=happy").json()["errors"][0]["field"].startswith("state")
    assert client.get("/api/v1/jobs?" + "&".join(["state=pending"] * 10)).status_code == 422


def test_a_list_of_jobs_takes_as_many_statements_for_one_as_for_many(client, context, full):
    @contextmanager
    def counted() -> Iterator[list[str]]:
        seen: list[str] = []

        def count(_connection, _cursor, statement, *_):
            seen.append(statement)

        event.listen(context.database.engine, "before_cursor_execute", count)
        yield seen
        event.remove(context.database.engine, "before_cursor_execute", count)

    with context.sessions.begin() as session:
        for row in client.get("/api/v1/jobs").json()[:-1]:
            job = lock_job(session, row["job_id"])
            if job.active_generation is None:
                members = roster(job.job_id, 1, ParallelLayout(), "node-0")
                add_generation(session, job, members, new_birth(SourceKind.INIT, ""), parent=None, now=job.created_at)
                activate(session, job, expected=None, generation=1)
    for path in ("/api/v1/jobs", "/api/v1/nodes", "/api/v1/notices"):
        with counted() as one:
            client.get(f"{path}?limit=1")
        with counted() as many:
            assert len(client.get(f"{path}?limit=5").json()) == 5
        assert len(one) == len(many) <= 4, many
