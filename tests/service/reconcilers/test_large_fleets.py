"""What a look at a job costs does not grow with the fleet, and what is left out changes no decision."""

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from decimal import Decimal

import pytest
from sqlalchemy import event, func, insert, select, update

from liver_core.handoff import RankStage
from service.db.wake import CHANNEL
from service.jobs.operations import ALL_WOKEN_UP_TO_NODES, touch
from service.jobs.queries import situation
from service.jobs.tables import JobMemberRow, JobRow, MemberRole
from service.leases.tables import PoolPriceRow
from service.nodes import queries
from service.nodes.queries import NODES_MORE
from service.nodes.tables import NodeRow
from service.planner.inputs import PlannerVerdict
from service.reconcilers import jobs
from service.reconcilers.nodes import NodeWatch
from service.sync.answers import LARGE_MADE_AGAIN_AFTER
from tests.service.fake_agent import step_row
from tests.service.sync.test_cost import statements
from tests.service.sync.test_sync import connect

FLEET = 200
MAX = 4


@contextmanager
def loaded() -> Iterator[list[str]]:
    """The nodes whose rows are read meanwhile."""
    seen: list[str] = []

    def keep(node: NodeRow, _context) -> None:
        seen.append(node.node_id)

    event.listen(NodeRow, "load", keep)
    try:
        yield seen
    finally:
        event.remove(NodeRow, "load", keep)


@pytest.fixture
def fleet(running, context):
    """A job on two nodes, and very many free ones beside it, all as large as its own."""
    job_id, agent, other = running
    for step in (1, 2):
        for each in (agent, other):
            order = each.job_order()
            rank = each.rank(order, stage=RankStage.TRAINING, step=step)
            each.sync(ranks=(rank,), steps=(step_row(job_id, 1, step, each.clock()),))
    with context.sessions.begin() as session:
        row = session.get_one(NodeRow, "a")
        same = {column.key: getattr(row, column.key) for column in NodeRow.__table__.columns} | {"ranks": []}
        session.execute(insert(NodeRow), [same | {"node_id": f"free-{number:03}"} for number in range(FLEET)])
    return job_id


def looked_at(context, job_id, now):
    with context.sessions() as session, loaded() as seen:
        return situation(session, session.get_one(JobRow, job_id), poll_s=1.0, now=now), seen


def test_a_look_at_a_job_reads_only_the_nodes_that_it_could_use(fleet, context, clock, monkeypatch):
    few, seen = looked_at(context, fleet, clock())
    assert len(seen) <= 2 + MAX + NODES_MORE
    monkeypatch.setattr(queries, "NODES_MORE", FLEET)
    every, seen = looked_at(context, fleet, clock())
    assert len(seen) >= FLEET
    assert few.view.decision.verdict is PlannerVerdict.MOVE
    assert few.view.decision.target == every.view.decision.target
    assert few.view.restart.target == every.view.restart.target


def test_nodes_behind_those_that_will_go_are_used(fleet, context, clock):
    going = {"source": "aws-imds", "state": "watching", "reason": "", "since_utc": "2026-01-01T00:00:00Z",
             "announces": ["interruption"]}  # fmt: skip
    with context.sessions.begin() as session:
        first = select(NodeRow.node_id).where(NodeRow.node_id < f"free-{FLEET - 3:03}", NodeRow.node_id.like("free-%"))
        session.execute(update(NodeRow).where(NodeRow.node_id.in_(first)).values(notice_source=going))
    found, _ = looked_at(context, fleet, clock())
    assert found.view.decision.target is not None
    assert set(found.view.decision.target.node_ids()) == {"a", "b", f"free-{FLEET - 3:03}", f"free-{FLEET - 2:03}"}


def test_the_prices_of_pools_are_known_to_a_job_that_weighs_them_and_to_no_other(fleet, context, clock):
    def prices() -> set[float | None]:
        return {node.usd_per_hour for node in looked_at(context, fleet, clock())[0].inputs.nodes}

    with context.sessions.begin() as session:
        early = PoolPriceRow(pool="spot-a", effective_from=clock() - timedelta(hours=1), price_usd_per_hour=Decimal(3))
        later = PoolPriceRow(pool="spot-a", effective_from=clock() + timedelta(hours=1), price_usd_per_hour=Decimal(9))
        session.add_all((early, later))
    assert prices() == {None}
    with context.sessions.begin() as session:
        job = session.get_one(JobRow, fleet)
        job.spec = job.spec | {"policy": {"usd_per_mtok": 2.0}}
    assert prices() == {3.0}


def set_policy(context, job_id, **policy):
    """The job needs exactly as many nodes as it may have, and weighs prices."""
    with context.sessions.begin() as session:
        job = session.get_one(JobRow, job_id)
        job.spec = job.spec | {"policy": {"usd_per_mtok": 2.0} | policy, "nodes": {"min": MAX, "max": MAX}}


def test_a_zone_with_enough_nodes_is_seen_behind_many_that_have_too_few(fleet, context, clock):
    set_policy(context, fleet, within="zone")
    few = NODES_MORE + 2 * MAX
    with context.sessions.begin() as session:
        for number in range(FLEET):
            zone = f"few-{number // (MAX - 1)}" if number < few else "large"
            session.execute(update(NodeRow).where(NodeRow.node_id == f"free-{number:03}").values(zone=zone))
    found, seen = looked_at(context, fleet, clock())
    assert found.view.restart.target is not None, found.view.restart.reason
    assert found.view.restart.target.node_ids() == tuple(f"free-{few + number:03}" for number in range(MAX))
    assert len(seen) <= 2 + few + MAX + NODES_MORE


def test_nodes_of_a_cheap_pool_are_seen_behind_many_of_a_dear_one(fleet, context, clock):
    set_policy(context, fleet)
    with context.sessions.begin() as session:
        last = select(NodeRow.node_id).where(NodeRow.node_id >= f"free-{FLEET - MAX:03}")
        session.execute(update(NodeRow).where(NodeRow.node_id.in_(last)).values(pool="cheap"))
    found, seen = looked_at(context, fleet, clock())
    assert sum(node.pool == "cheap" for node in found.inputs.nodes) == MAX
    assert len(seen) <= 2 + MAX + NODES_MORE + MAX


def test_nodes_behind_those_of_their_pool_that_will_go_are_used_though_another_pool_has_enough(fleet, context, clock):
    going = {"source": "aws-imds", "state": "watching", "reason": "", "since_utc": "2026-01-01T00:00:00Z",
             "announces": ["interruption"]}  # fmt: skip
    set_policy(context, fleet)
    with context.sessions.begin() as session:
        cheap = NodeRow.node_id >= f"free-{FLEET // 2:03}"
        session.execute(update(NodeRow).where(cheap).values(pool="cheap"))
        first = NodeRow.node_id < f"free-{FLEET - MAX:03}"
        session.execute(update(NodeRow).where(cheap, first).values(notice_source=going))
    found, _ = looked_at(context, fleet, clock())
    assert sum(node.pool == "cheap" for node in found.inputs.nodes) == MAX


def test_losses_of_a_pool_fall_among_the_nodes_of_ours_that_are_there(fleet, context, clock):
    """Not among those that the job might buy, of which nobody knows how many there are."""
    with context.sessions.begin() as session:
        session.add(PoolPriceRow(pool="spot-a", effective_from=clock(), price_usd_per_hour=Decimal(3)))
        job = session.get_one(JobRow, fleet)
        job.spec = job.spec | {"policy": {"usd_per_mtok": 2.0}}
    clock.advance(1)
    (market,) = looked_at(context, fleet, clock())[0].inputs.markets
    assert (market.pool, market.ours, market.offered) == ("spot-a", 2, MAX + 4)


def test_standing_plans_are_made_again_only_for_other_inputs(fleet, context, clock, monkeypatch):
    made = []
    make = jobs.standing_plans

    def counted(inputs, known):
        made.append(inputs.digest())
        return make(inputs, known)

    monkeypatch.setattr(jobs, "standing_plans", counted)
    facts, _ = looked_at(context, fleet, clock())
    plans = jobs._plans(facts)
    clock.advance(2)
    again, _ = looked_at(context, fleet, clock())
    assert jobs._plans(again) == plans
    assert len(made) == 1
    with context.sessions.begin() as session:
        session.execute(update(NodeRow).where(NodeRow.node_id == "free-000").values(slots=3))
    other, _ = looked_at(context, fleet, clock())
    assert jobs._plans(other) != plans
    assert len(made) == 2


@pytest.fixture
def woken(context):
    """Calls what it is given, and tells which nodes that has woken."""
    with connect(context.database.engine.url) as listening:
        listening.execute(f"LISTEN {CHANNEL}")

        def heard() -> list[str]:
            listening.execute("SELECT 1")
            return [item.payload for item in listening.notifies(timeout=0.2)]

        def call(do) -> set[str]:
            heard()
            do()
            payloads = heard()
            return {topic for payload in payloads for topic in payload.split(",") if topic.startswith("node/")}

        yield call


def add_members(context, job_id: str, count: int) -> int:
    """So many free nodes more are members of the job; how many it has."""
    with context.sessions.begin() as session:
        rows = [{"job_id": job_id, "node_id": f"free-{n:03}", "role": MemberRole.SPARE.value} for n in range(count)]
        session.execute(insert(JobMemberRow), rows)
        touch(session, session.get_one(JobRow, job_id), now=context.clock())
        return session.scalars(select(func.count()).select_from(JobMemberRow)).one()


def touched(context, job_id: str, **how) -> int:
    """By how much the number of its orders is larger then."""
    with context.sessions.begin() as session:
        job = session.get_one(JobRow, job_id)
        before, job.due_at = job.orders_seq, None
        touch(session, job, now=context.clock(), **how)
        assert job.due_at == context.clock()
        return job.orders_seq - before


def test_all_nodes_of_a_job_are_woken_for_what_is_urgent_and_those_of_a_small_one_for_all_else(fleet, context, woken):
    count = add_members(context, fleet, ALL_WOKEN_UP_TO_NODES - 2)
    assert count == ALL_WOKEN_UP_TO_NODES
    assert len(woken(lambda: touched(context, fleet, is_urgent=False))) == count
    assert touched(context, fleet, is_urgent=False) == 1
    with context.sessions.begin() as session:
        session.add(JobMemberRow(job_id=fleet, node_id=f"free-{FLEET - 1:03}", role=MemberRole.SPARE))
    assert woken(lambda: touched(context, fleet, is_urgent=False)) == set()
    assert touched(context, fleet, is_urgent=False) == 0
    assert touched(context, fleet) > 0
    assert len(woken(lambda: touched(context, fleet))) == count + 1


def test_the_nodes_of_a_large_job_are_woken_by_a_notice_and_not_by_a_node_that_is_silent_or_back(
    fleet, running, context, clock, woken
):
    _, agent, other = running
    assert add_members(context, fleet, ALL_WOKEN_UP_TO_NODES) > ALL_WOKEN_UP_TO_NODES
    with context.sessions.begin() as session:
        free = update(NodeRow).where(NodeRow.node_id.like("free-%"))
        session.execute(free.values(last_seen_at=clock() + timedelta(hours=1)))
    watch = NodeWatch(context)
    watch.tick()
    for _ in range(int(context.settings.silent_after_s) + 5):
        clock.advance(1)
        other.sync()
        watch.tick()
    with context.sessions() as session:
        assert session.get_one(NodeRow, "a").state == "silent"
    before = other.job_order()
    assert before.lead_order == ("b",)
    assert woken(agent.sync) == set()
    clock.advance(LARGE_MADE_AGAIN_AFTER.total_seconds())
    assert other.sync().jobs[0].lead_order == ("a", "b")
    assert len(woken(lambda: agent.sync(notices=(agent.notice(),)))) > ALL_WOKEN_UP_TO_NODES


def test_a_job_is_claimed_and_locked_without_its_plans(fleet, context):
    with context.sessions.begin() as session:
        session.get_one(JobRow, fleet).due_at = context.clock()
    with statements(context) as seen:
        assert jobs.tick(context) == 1
    assert any("FOR NO KEY UPDATE" in statement for statement in seen)
    assert not any("standing_plans" in each and "FOR NO KEY UPDATE" in each for each in seen)
