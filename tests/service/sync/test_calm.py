"""Calm reports: they store what others would, wait for no other report of their job, and notice what they overtake."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from sqlalchemy import select, text

from agent.protocol.sync import LOG_CHUNK_CHARS_MAX, LogChunk, SyncOrders
from liver_core.handoff import RankStage
from service import pressing
from service.jobs.tables import JobRow, JobState, JobStepRow, RankLogRow
from service.ledger.tables import IntervalRow
from service.nodes.tables import NodeRow
from service.sync import calm as calm_reports
from service.sync import endpoints
from tests.service.fake_agent import FakeAgent, step_row
from tests.service.waiting import until

WITHIN_S = 20.0
AT_ONCE = 4


def work(agent: FakeAgent, step: int, clock, **more) -> dict:
    order = agent.job_order()
    assert order.generation is not None
    rank = agent.rank(order, stage=RankStage.TRAINING, step=step)
    rows = tuple(step_row(order.job_id, order.generation, each, clock(), **more) for each in (step - 1, step))
    log = LogChunk(job_id=order.job_id, generation=order.generation, rank=rank.rank, offset=step, text=f"step {step}\n")
    return {"ranks": (rank,), "steps": rows, "logs": (log,)}


@pytest.fixture
def tries(monkeypatch) -> list[bool]:
    """Of each report that may be calm, whether it is."""
    found: list[bool] = []
    store_calm = calm_reports.store_calm

    def noted(*arguments, **named):
        stored = store_calm(*arguments, **named)
        found.extend(not isinstance(item, calm_reports.Left) for item in stored)
        return stored

    monkeypatch.setattr(calm_reports, "store_calm", noted)
    return found


@pytest.fixture
def first_waits(monkeypatch) -> list[int]:
    """The first report at work waits until all others are there; how many were stored together, each time."""
    sizes: list[int] = []
    store_calm, release = calm_reports.store_calm, threading.Event()

    def waits(session, asks, **named):
        sizes.append(len(asks))
        if len(sizes) == 1:
            assert release.wait(WITHIN_S)
        return store_calm(session, asks, **named)

    gather = calm_reports.Gathering.ask
    asked: list[None] = []

    async def counted(self, ask):
        asked.append(None)
        if len(asked) == AT_ONCE:
            release.set()
        return await gather(self, ask)

    monkeypatch.setattr(calm_reports, "store_calm", waits)
    monkeypatch.setattr(calm_reports.Gathering, "ask", counted)
    return sizes


def stored(context) -> tuple:
    with context.sessions() as session:
        job = session.scalars(select(JobRow)).one()
        steps = session.scalars(select(JobStepRow).order_by(JobStepRow.step)).all()
        logs = session.scalars(select(RankLogRow).order_by(RankLogRow.rank, RankLogRow.start_offset)).all()
        ledger = session.scalars(select(IntervalRow).order_by(IntervalRow.lease_id, IntervalRow.starts_at)).all()
        return (
            (job.state, job.last_step, job.last_step_at, job.highest_step, job.lost_steps),
            [(row.step, row.loss, row.tokens) for row in steps],
            [(row.rank, row.start_offset, row.text) for row in logs],
            [(row.lease_id, row.cause, row.starts_at, row.ends_at) for row in ledger],
        )


@pytest.mark.parametrize("calm", [True, False])
def test_a_calm_report_stores_what_any_other_would(running, context, clock, monkeypatch, tries, calm):
    _, agent, other = running
    if not calm:
        monkeypatch.setattr(calm_reports, "may_be_calm", lambda _: False)
    for step in (2, 4, 6):
        agent.sync(**work(agent, step, clock))
        other.sync(**work(other, step, clock, loss=float(step), tokens=step))
        clock.advance(1)
    assert tries == ([False, False, True, True, True, True] if calm else [])
    job, steps, logs, ledger = stored(context)
    at = clock().replace(second=clock().second - 1)
    assert job == (JobState.RUNNING, 6, at, 6, 0)
    assert steps == [(step, step + step % 2, step + step % 2) for step in range(1, 7)]
    assert [row[1:] for row in logs] == 2 * [(step, f"step {step}\n") for step in (2, 4, 6)]
    assert {(cause, ends_at) for _, cause, _, ends_at in ledger if cause == "productive"} == {("productive", at)}


def test_a_calm_report_does_not_wait_for_a_job_that_another_one_has_locked(running, context, clock, tries):
    job_id, agent, other = running
    for step in (2, 4):
        agent.sync(**work(agent, step, clock))
        other.sync(**work(other, step, clock))
    with context.sessions.begin() as session, ThreadPoolExecutor(1) as pool:
        session.execute(text("SELECT 1 FROM jobs WHERE job_id = :job_id FOR NO KEY UPDATE"), {"job_id": job_id})
        # The job has made this step already; a report of more than that waits until it can be counted.
        clock.advance(1)
        taken = pool.submit(other.sync, **work(other, 4, clock))
        assert taken.result(timeout=WITHIN_S).accepted_report_seq == other.seq
    assert tries[-1]


def test_a_calm_report_comes_again_to_be_stored_with_others_where_somebody_changes_its_job(
    running, context, clock, monkeypatch
):
    """Alone it would wait for the job, and then keep it from the other nodes of the job."""
    job_id, agent, other = running
    for step in (2, 4):
        agent.sync(**work(agent, step, clock))
        other.sync(**work(other, step, clock))
    found: list[object] = []
    store_calm, was_busy = calm_reports.store_calm, threading.Event()

    def noted(*arguments, **named):
        stored = store_calm(*arguments, **named)
        found.extend(item if isinstance(item, calm_reports.Left) else None for item in stored)
        if calm_reports.Left.BUSY in found:
            was_busy.set()
        return stored

    monkeypatch.setattr(calm_reports, "store_calm", noted)
    monkeypatch.setattr(calm_reports, "BUSY_WAITS_S", (0.03,) * 1_000)
    clock.advance(1)
    with ThreadPoolExecutor(1) as pool:
        with context.sessions.begin() as session:
            session.execute(text("SELECT 1 FROM jobs WHERE job_id = :job_id FOR NO KEY UPDATE"), {"job_id": job_id})
            taken = pool.submit(other.sync, **work(other, 6, clock))
            assert was_busy.wait(WITHIN_S)
        assert taken.result(timeout=WITHIN_S).accepted_report_seq == other.seq
    assert set(found[:-1]) == {calm_reports.Left.BUSY} and found[-1] is None
    (_, last_step, *_), *_ = stored(context)
    assert last_step == 6


def test_a_calm_report_whose_job_is_never_free_waits_in_line_for_it_and_is_stored_with_others(
    running, context, clock, monkeypatch
):
    job_id, agent, other = running
    for step in (2, 4):
        agent.sync(**work(agent, step, clock))
        other.sync(**work(other, step, clock))
    found: list[tuple[bool, object]] = []
    store_calm, is_in_line = calm_reports.store_calm, threading.Event()

    def noted(*arguments, in_turn: bool, **named):
        if in_turn:
            is_in_line.set()
        stored = store_calm(*arguments, in_turn=in_turn, **named)
        found.extend((in_turn, item if isinstance(item, calm_reports.Left) else None) for item in stored)
        return stored

    monkeypatch.setattr(calm_reports, "store_calm", noted)
    monkeypatch.setattr(calm_reports, "BUSY_WAITS_S", (0.0,))
    clock.advance(1)
    with ThreadPoolExecutor(1) as pool:
        with context.sessions.begin() as session:
            session.execute(text("SELECT 1 FROM jobs WHERE job_id = :job_id FOR NO KEY UPDATE"), {"job_id": job_id})
            # The other one got further meanwhile than this report says.
            session.execute(text("UPDATE jobs SET last_step = 7 WHERE job_id = :job_id"), {"job_id": job_id})
            taken = pool.submit(other.sync, **work(other, 6, clock))
            assert is_in_line.wait(WITHIN_S)
        assert taken.result(timeout=WITHIN_S).accepted_report_seq == other.seq
    assert found == [(False, calm_reports.Left.BUSY), (True, None)]
    (_, last_step, *_), *_ = stored(context)
    assert last_step == 7


def test_a_job_that_ends_while_a_calm_report_is_stored_is_looked_at_again(running, context, client, clock, monkeypatch):
    job_id, agent, other = running
    for step in (2, 4):
        agent.sync(**work(agent, step, clock))
        other.sync(**work(other, step, clock))
    overtaken = []
    store_progress = calm_reports._store_progress

    def late(*arguments, **named) -> dict[str, bool]:
        overtaken.append(client.post(f"/api/v1/jobs/{job_id}/stop").status_code)
        with context.sessions.begin() as session:
            session.get_one(JobRow, job_id).state = JobState.STOPPING
        overtaken.append(store_progress(*arguments, **named))
        return overtaken[-1]

    monkeypatch.setattr(calm_reports, "_store_progress", late)
    clock.advance(1)
    assert agent.sync(**work(agent, 6, clock)).jobs[0].desired == "stop"
    assert overtaken == [200, {job_id: False}]
    (_, last_step, *_), steps, *_ = stored(context)
    assert (last_step, steps[-1][0]) == (6, 6)


@pytest.mark.parametrize(("late_s", "is_calm"), [(25, True), (35, False)])
def test_steps_that_come_late_are_calm_while_no_node_that_was_part_of_them_can_be_gone(
    training, clock, tries, late_s, is_calm
):
    """A service that is slow must not be slower for what comes late."""
    agents, parts = training
    said = parts("a", 6)
    clock.advance(late_s)
    del tries[:]
    agents["a"].sync(**said)
    assert tries == [is_calm]


@pytest.mark.parametrize("part", ["notices", "checkpoints", "finished", "another world", "another rank"])
def test_a_report_with_anything_else_is_not_calm(running, clock, tries, part):
    _, agent, other = running
    for step in (2, 4):
        agent.sync(**work(agent, step, clock))
        other.sync(**work(other, step, clock))
    parts = work(agent, 6, clock)
    order = agent.job_order()
    if part == "notices":
        parts["notices"] = (agent.notice(),)
    elif part == "checkpoints":
        from agent.protocol.sync import CheckpointFact

        fact = CheckpointFact(
            job_id=order.job_id, generation=1, step=6, path="/checkpoints/step-6", finished_utc=clock()
        )
        parts["checkpoints"] = (fact,)
    elif part == "finished":
        from agent.protocol.sync import JobFinished

        parts["finished"] = (JobFinished(job_id=order.job_id, generation=1, step=6),)
    elif part == "another world":
        parts["steps"] += (step_row(order.job_id, 2, 7, clock()),)
    else:
        parts["ranks"] = (agent.rank(order, stage=RankStage.BROKEN, step=6),)
    del tries[:]
    agent.sync(**parts)
    assert not any(tries)


def at_once(agents: dict[str, FakeAgent], parts: dict[str, dict]) -> dict[str, SyncOrders]:
    with ThreadPoolExecutor(AT_ONCE) as pool:
        sent = {name: pool.submit(agents[name].sync, **parts[name]) for name in agents}
        return {name: each.result(timeout=2 * WITHIN_S) for name, each in sent.items()}


@pytest.mark.parametrize("together", [True, False])
def test_reports_that_come_at_once_are_stored_together_as_each_alone_would_be(
    training, context, clock, tries, first_waits, monkeypatch, together
):
    agents, parts = training
    if not together:
        monkeypatch.setattr(calm_reports, "may_be_calm", lambda _: False)
    clock.advance(1)
    orders = at_once(agents, {name: parts(name, 6) for name in agents})
    assert (sum(first_waits), tries) == ((4, 4 * [True]) if together else (0, []))
    assert len(first_waits) <= 2, "those that came while the first was at work are one"
    assert {name: answer.accepted_report_seq for name, answer in orders.items()} == {
        name: agent.seq for name, agent in agents.items()
    }
    job, steps, logs, ledger = stored(context)
    assert (job[0], job[1], job[2], job[3]) == (JobState.RUNNING, 6, clock(), 6)
    assert [step for step, *_ in steps] == list(range(1, 7))
    assert [row for row in logs if row[1] == 6] == [(rank, 6, "x") for rank in range(4)]
    last = {lease_id: (cause, ends_at) for lease_id, cause, _, ends_at in ledger}
    assert list(last.values()) == 4 * [("productive", clock())]
    with context.sessions() as session:
        for node in session.scalars(select(NodeRow)):
            assert (node.last_seen_at, node.ranks[0]["step"]) == (clock(), 6)
            assert node.report_seq == agents[node.node_id].seq


def test_what_several_nodes_know_of_one_step_is_stored_together(training, context, clock, tries, first_waits):
    agents, parts = training
    clock.advance(1)
    said = {name: parts(name, 6) for name in agents}
    known = {"a": {"loss": 6.5}, "b": {"tokens": 7}, "c": {"consumed_samples": 8}, "d": {}}
    for name, values in known.items():
        nothing = {"loss": None, "tokens": None, "consumed_samples": None}
        said[name]["steps"] = tuple(row.model_copy(update=nothing | values) for row in said[name]["steps"])
    at_once(agents, said)
    assert sum(first_waits) == 4 and len(first_waits) <= 2 and all(tries)
    with context.sessions() as session:
        row = session.scalars(select(JobStepRow).where(JobStepRow.step == 6)).one()
    assert (row.loss, row.tokens, row.consumed_samples) == (6.5, 7, 8)


def test_a_node_that_is_locked_holds_up_none_of_the_others(training, context, clock, tries):
    agents, parts = training
    clock.advance(1)
    with ThreadPoolExecutor(AT_ONCE) as pool:
        with context.sessions.begin() as session:
            session.execute(text("SELECT 1 FROM nodes WHERE node_id = 'd' FOR NO KEY UPDATE"))
            sent = {name: pool.submit(agents[name].sync, **parts(name, 6)) for name in agents}
            for name in "abc":
                assert sent[name].result(timeout=WITHIN_S).accepted_report_seq == agents[name].seq
            until(lambda: False in tries)
            assert not sent["d"].done()
        assert sent["d"].result(timeout=WITHIN_S).accepted_report_seq == agents["d"].seq
    assert tries.count(True) >= 3, "it may be tried again before it is stored alone"


def test_where_storing_them_together_fails_each_is_stored_alone(training, context, clock, monkeypatch, first_waits):
    agents, parts = training
    monkeypatch.setattr(calm_reports, "grow", lambda *_, **__: False)
    clock.advance(1)
    orders = at_once(agents, {name: parts(name, 6) for name in agents})
    assert sum(first_waits) == 4
    assert all(orders[name].accepted_report_seq == agent.seq for name, agent in agents.items())
    job, steps, *_ = stored(context)
    assert job[:2] == (JobState.RUNNING, 6) and [step for step, *_ in steps] == list(range(1, 7))


def test_a_report_that_comes_twice_is_no_calm_one(training, clock, tries):
    agents, parts = training
    clock.advance(1)
    a = agents["a"]
    first = a.sync(**parts("a", 6))
    clock.advance(1)
    del tries[:]
    again = a.report(**parts("a", 6)).model_copy(update={"report_seq": first.accepted_report_seq})
    assert a.post(again).status_code == 200
    assert tries == [False]


def test_a_report_that_makes_the_agreed_work_fail_fails_alone(training, context, clock, monkeypatch, first_waits):
    agents, parts = training
    store_rows, fails = calm_reports.store_rows, "unexpected"

    def planted(session, steps, logs, *, now) -> None:
        if any(chunk.text == fails for chunk in logs):
            raise KeyError(fails)
        store_rows(session, steps, logs, now=now)

    monkeypatch.setattr(calm_reports, "store_rows", planted)
    monkeypatch.setattr("service.sync.facts.store_rows", planted)
    clock.advance(1)
    said = {name: parts(name, 6) for name in agents}
    said["b"]["logs"] = tuple(chunk.model_copy(update={"text": fails}) for chunk in said["b"]["logs"])
    with ThreadPoolExecutor(AT_ONCE) as pool:
        sent = {name: pool.submit(agents[name].post, agents[name].report(**said[name])) for name in agents}
        found = {name: each.result(timeout=2 * WITHIN_S).status_code for name, each in sent.items()}
    assert found == {"a": 200, "b": 500, "c": 200, "d": 200}


@pytest.mark.parametrize("part", ["logs", "steps"])
def test_a_large_report_is_stored_alone(training, clock, tries, part):
    agents, parts = training
    clock.advance(1)
    said = parts("a", 6)
    if part == "logs":
        chunk = said["logs"][0].model_copy(update={"text": LOG_CHUNK_CHARS_MAX * "x"})
        offsets = range(chunk.offset, calm_reports.LOG_CHARS_MAX + chunk.offset + 1, LOG_CHUNK_CHARS_MAX)
        said["logs"] = tuple(chunk.model_copy(update={"offset": offset}) for offset in offsets)
    else:
        row = said["steps"][-1]
        said["steps"] += tuple(row.model_copy(update={"step": 7 + n}) for n in range(calm_reports.FACTS_MAX))
    agents["a"].sync(**said)
    assert tries == []


def test_calm_reports_let_a_notice_pass_that_is_being_stored(running, context, clock, monkeypatch, tries):
    """They wait for it without a lock that it needs, and no longer than stated."""
    _, agent, other = running
    for step in (2, 4):
        agent.sync(**work(agent, step, clock))
        other.sync(**work(other, step, clock))
    tries.clear()
    monkeypatch.setattr(pressing, "LET_PASS_S", WITHIN_S)
    is_storing, may_end = threading.Event(), threading.Event()
    apply_report = endpoints.apply_report

    def slow(*arguments, **named):
        found = apply_report(*arguments, **named)
        is_storing.set()
        assert may_end.wait(WITHIN_S)
        return found

    monkeypatch.setattr(endpoints, "apply_report", slow)
    with ThreadPoolExecutor(2) as pool:
        told = pool.submit(agent.sync, notices=(agent.notice(),))
        assert is_storing.wait(WITHIN_S)
        calm = pool.submit(other.sync, **work(other, 6, clock))
        with pytest.raises(TimeoutError):
            calm.result(timeout=0.2)
        assert tries == []
        may_end.set()
        for report in (told, calm):
            report.result(timeout=WITHIN_S)
    assert not context.pressing.is_on
