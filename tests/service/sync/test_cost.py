"""What a sync may cost: a bound on its SQL statements; and that what is kept between syncs is never older than said.

`python -m tests.benchmarks.sync` measures the CPU; these keep it from creeping up unseen.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import pytest
from sqlalchemy import event, func, select

from agent.protocol.values import HandoffState
from liver_core.layout import ParallelLayout
from service.jobs.operations import touch
from service.jobs.tables import JobRow
from service.ledger.tables import IntervalRow
from service.nodes.operations import mark_gone
from service.nodes.tables import NodeRow
from service.notices.tables import NoticeRow
from service.reconcilers import jobs
from service.reconcilers.nodes import NodeWatch
from service.sync import endpoints
from service.sync.answers import answer
from service.sync.calm import CalmAsk, store_calm
from service.sync.intake import Intake
from service.sync.orders import shared_orders
from service.sync.reading import Reading
from service.tokens.recent import FRESH
from service.tokens.tables import TokenRow
from tests.service.fake_agent import another_job, mirror, roster

STEADY = 8
"""Nodes; their parts in jobs; jobs with their generations; leases; progress; steps with logs; ledger; nodes written."""
WITH_A_MIRROR = 18
WITH_A_NOTICE = 16
IDLE = 5


@pytest.fixture
def kept_orders_equal_new_ones() -> None:
    """Not here, where statements are counted."""


@contextmanager
def statements(context) -> Iterator[list[str]]:
    """Every statement that is sent to the database meanwhile."""
    seen: list[str] = []

    def keep(_connection, _cursor, statement: str, *_) -> None:
        seen.append(statement)

    engines = context.database.engine, context.database.readers_engine
    for engine in engines:
        event.listen(engine, "before_cursor_execute", keep)
    try:
        yield seen
    finally:
        for engine in engines:
            event.remove(engine, "before_cursor_execute", keep)


def test_a_node_with_very_many_slots_takes_no_more_statements(make_agent, context, clock):
    """Also when the account of each slot begins, and when the node goes: each slot cost two, in one transaction."""
    counts = []
    for name, slots in (("few", 4), ("many", 1_024)):
        agent = make_agent(name, slots=slots)
        with statements(context) as seen:
            for _ in range(3):
                clock.advance(1)
                agent.sync()
            with context.sessions.begin() as session:
                mark_gone(session, session.get_one(NodeRow, name), reason="test", now=clock.now + timedelta(seconds=1))
        counts.append(len(seen))
    # Rows are inserted a thousand at a time.
    assert counts[1] <= counts[0] + 3
    with context.sessions() as session:
        assert session.scalar(select(func.count()).select_from(IntervalRow)) == 2 * (4 + 1_024)


def test_a_steady_sync_takes_few_statements(training, context, clock):
    agents, parts = training
    clock.advance(1)
    with statements(context) as seen:
        agents["a"].sync(**parts("a", 6))
    assert len(seen) <= STEADY, "\n".join(seen)
    assert sum("FOR NO KEY UPDATE" in statement for statement in seen) == 3, "node, job, ledger: each locked once"


def test_reports_that_come_at_once_take_the_statements_of_one(training, context, clock):
    agents, parts = training
    clock.advance(1)
    asks = [
        CalmAsk(Reading(agent.report(**parts(name, 6))), clock(), is_gone=lambda: False)
        for name, agent in agents.items()
    ]
    with statements(context) as seen, context.sessions.begin() as session:
        stored = store_calm(session, asks, silent_after_s=6.0, gone_after_s=30.0, now=clock())
    assert all(isinstance(item, Intake) for item in stored)
    assert len(seen) <= STEADY, "\n".join(seen)


def test_a_notice_is_committed_with_few_statements_before_orders_are_made(training, context, clock, monkeypatch):
    """Whoever is woken by it need not wait for the orders of the node that goes; and its members stay the same."""
    agents, parts = training
    clock.advance(1)
    sent: list[int] = []

    def noted(intake, *arguments, **named):
        with context.sessions() as session:
            assert session.scalars(select(NoticeRow.node_id)).all() == ["a"]
        sent.append(len(seen) - 1)
        return answer(intake, *arguments, **named)

    monkeypatch.setattr(endpoints, "answer", noted)
    with statements(context) as seen:
        orders = agents["a"].sync(**parts("a", 6), notices=(agents["a"].notice(),))
    assert [fact.node_id for fact in orders.jobs[0].notices] == ["a"]
    assert sent[0] <= WITH_A_NOTICE, "\n".join(seen)
    assert not any("standing_plans FROM jobs" in statement for statement in seen[: sent[0]])


def test_a_mirror_that_says_nothing_new_to_agents_takes_few_more(training, context, clock):
    agents, parts = training
    source = agents["a"].roster()
    target = roster(source.job_id, 2, ParallelLayout(pp=3), "a", "b", "c")
    said = mirror(source, target, clock(), state=HandoffState.STREAMING)
    agents["a"].sync(**parts("a", 6), handoffs=(said,))
    clock.advance(1)
    agents["b"].sync(**parts("b", 6))
    with statements(context) as seen:
        agents["a"].sync(**parts("a", 8), handoffs=(said.model_copy(update={"mirror_seq": 1}),))
    assert len(seen) <= WITH_A_MIRROR, "\n".join(seen)


def test_all_slots_of_a_node_are_accounted_for_by_one_statement(make_agent, context, clock):
    agent = make_agent("a", slots=8)
    agent.sync()
    clock.advance(1)
    agent.sync()
    clock.advance(1)
    with statements(context) as seen:
        agent.sync()
    assert len(seen) <= IDLE, "\n".join(seen)
    with context.sessions() as session:
        rows = session.scalars(select(IntervalRow).order_by(IntervalRow.slot)).all()
    assert [(row.slot, row.cause, row.ends_at) for row in rows] == [(slot, "idle", clock()) for slot in range(8)]


def test_an_agents_token_is_looked_up_once_in_a_while_and_a_scripts_every_time(training, client, context, clock):
    agents, _ = training
    clock.advance(FRESH.total_seconds())
    with statements(context) as seen:
        for _ in range(3):
            agents["a"].sync()
    assert sum("FROM tokens" in statement for statement in seen) == 1
    with statements(context) as seen:
        for _ in range(3):
            client.get("/api/v1/jobs")
    assert sum("FROM tokens" in statement for statement in seen) == 3


def test_a_nodes_token_whose_end_nobody_tells_works_for_no_more_than_thirty_seconds(training, client, context, clock):
    agents, _ = training
    clock.advance(FRESH.total_seconds())
    agents["a"].sync()
    with context.sessions.begin() as session:
        for row in session.scalars(select(TokenRow)):
            row.revoked_at = clock()
    assert client.get("/api/v1/jobs").status_code == 401
    clock.advance(30)
    agent = agents["a"]
    report, headers = agent.report().model_dump_json(), agent.headers
    assert client.post("/agent/v1/sync", content=report, headers=headers).status_code == 401


def test_orders_follow_the_rows_although_what_was_read_is_kept(training, context, clock):
    agents, _ = training
    before = agents["a"].sync().jobs[0]
    with context.sessions.begin() as session:
        job = session.get_one(JobRow, before.job_id)
        job.standing_plans = job.standing_plans[:1]
        job.layouts_by_count = job.layouts_by_count[:1]
        touch(session, job, now=clock())
    after = agents["a"].sync().jobs[0]
    assert after.standing_plans == before.standing_plans[:1]
    assert after.layouts_by_count.choices == before.layouts_by_count.choices[:1]


def test_members_of_a_world_that_is_over_are_still_told_each_others_addresses_and_notices(
    training, client, context, clock
):
    agents, parts = training
    agents["d"].sync(notices=(agents["d"].notice(),))
    report = parts("a", 6)
    job = f"/api/v1/jobs/{agents['a'].job_order().job_id}"
    client.post(f"{job}/stop")
    for agent in agents.values():
        agent.sync()
    watch = NodeWatch(context)
    for _ in range(3):
        clock.advance(1)
        watch.tick()
        jobs.tick(context)
    assert client.get(job).json()["state"] == "stopped"
    orders = agents["a"].sync(ranks=report["ranks"])
    assert orders.jobs[0].desired == "stop"
    assert sorted(orders.jobs[0].peers) == ["a", "b", "c", "d"]
    assert [notice.node_id for notice in orders.jobs[0].notices] == ["d"]
    assert orders.jobs[0].lead_order[-1] == "d"


def test_the_orders_of_many_jobs_take_as_many_statements_as_those_of_one(training, context, client, clock):
    agents, _ = training
    others = [client.post("/api/v1/jobs", json=another_job(name)).json()["job_id"] for name in ("x", "y")]
    job_ids, counts, made = [agents["a"].job_order().job_id, *others], [], []
    limits = {"lost_after_s": 30.0, "now": clock()}
    for wanted in ([job_ids[0]], job_ids):
        with statements(context) as seen, context.sessions() as session:
            made.append(shared_orders(session, wanted, **limits))
        counts.append(len(seen))
    assert counts[0] == counts[1] <= 3
    assert made[1].keys() == set(job_ids) and made[1][job_ids[0]] == made[0][job_ids[0]]
    with context.sessions() as session:
        assert made[1] == {name: shared_orders(session, [name], **limits)[name] for name in job_ids}
        assert shared_orders(session, ["none"], **limits) == {}
