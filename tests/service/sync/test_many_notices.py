"""An agent that reports notices without end: a lease has few that count, and the one that matters is among them."""

from datetime import timedelta

import pytest
from sqlalchemy import func, select

from agent.protocol.notice_life import DRAIN, withdraw
from agent.protocol.sync import NOTICES_PER_REPORT_MAX, NoticeFact, NoticeKind
from service.clouds import operations as clouds
from service.clouds.tables import HearingRow
from service.notices import operations
from service.notices.operations import HISTORY_OF_LEASE_MAX
from service.notices.queries import open_notices
from service.notices.rules import NOTICES_OF_LEASE_MAX, gives_way
from service.notices.tables import NoticeRow
from tests.service.fake_agent import FakeAgent, step_row

HOUR_S = 3_600


def many(agent: FakeAgent, count: int, *, deadline_s: float, kind: NoticeKind = NoticeKind.INTERRUPTION) -> tuple:
    """So many notices, each of a source of its own and a second later than the one before it."""
    fact = agent.notice(kind=kind)
    return tuple(
        fact.model_copy(
            update={
                "source": f"source-{deadline_s}-{number}",
                "deadline_utc": fact.first_seen_utc + timedelta(seconds=deadline_s + number),
            }
        )
        for number in range(count)
    )


def stored(context) -> list[NoticeRow]:
    with context.sessions() as session:
        return list(session.scalars(select(NoticeRow).order_by(NoticeRow.notice_id)))


def sources(context, clock) -> set[str]:
    with context.sessions() as session:
        return {row.source for row in open_notices(session, now=clock())}


def test_beyond_the_limit_a_later_notice_is_refused_and_the_rest_of_the_report_stands(running, context, clock):
    job_id, agent, _ = running
    facts = many(agent, 3 * NOTICES_PER_REPORT_MAX, deadline_s=HOUR_S)
    assert agent.sync(notices=facts[:NOTICES_PER_REPORT_MAX]).refusals == ()
    orders = agent.sync(
        notices=facts[NOTICES_PER_REPORT_MAX : 2 * NOTICES_PER_REPORT_MAX],
        steps=(step_row(job_id, 1, 1, clock(), loss=5.0),),
    )
    reason = "at most 64 notices of a node count at a time, and others press more"
    assert {(item.part, item.reason) for item in orders.refusals} == {("notices", reason)}
    assert [item.key for item in orders.refusals] == [
        f"a/interruption/source-3600-{number}" for number in range(NOTICES_PER_REPORT_MAX, 2 * NOTICES_PER_REPORT_MAX)
    ]
    assert orders.accepted_report_seq == agent.seq
    agent.sync(notices=facts[2 * NOTICES_PER_REPORT_MAX :])
    assert len(stored(context)) == NOTICES_OF_LEASE_MAX
    assert len(agent.job_order().notices) == NOTICES_OF_LEASE_MAX
    assert sources(context, clock) == {fact.source for fact in facts[:NOTICES_OF_LEASE_MAX]}


def test_a_nearer_notice_takes_the_place_of_the_latest_one(running, client, context, clock):
    _, agent, other = running
    facts = many(agent, NOTICES_OF_LEASE_MAX, deadline_s=100)
    # The latest one comes first: the others, and the nearer one, announce the same loss, which has its number.
    agent.sync(notices=facts[::-1])
    assert [len(notice["channels"]) for notice in client.get("/api/v1/notices").json()] == [NOTICES_OF_LEASE_MAX]
    real = agent.notice(deadline_s=60)
    (refusal,) = agent.sync(notices=(real,)).refusals
    assert refusal.key == f"a/interruption/{facts[-1].source}"
    assert sources(context, clock) == {fact.source for fact in facts[:-1]} | {real.source}
    assert real in other.sync().jobs[0].notices
    (shown,) = client.get("/api/v1/notices").json()
    assert (len(shown["channels"]), shown["deadline_at"]) == (
        NOTICES_OF_LEASE_MAX,
        real.deadline_utc.isoformat().replace("+00:00", "Z"),
    )
    # What is said of one that is there is no further one: a nearer deadline, and that it is withdrawn.
    nearer = real.model_copy(update={"deadline_utc": real.deadline_utc - timedelta(seconds=20)})
    assert agent.sync(notices=(nearer,)).refusals == ()
    assert agent.sync(notices=(withdraw(nearer, clock()),)).refusals == ()
    # One that is withdrawn matters least of all, and goes first.
    later = agent.notice(deadline_s=HOUR_S).model_copy(update={"source": "later"})
    (refusal,) = agent.sync(notices=(later,)).refusals
    assert refusal.key == f"a/interruption/{real.source}"
    assert "later" in sources(context, clock)


@pytest.mark.thorough
def test_what_is_withdrawn_and_heard_anew_without_end_leaves_few_rows(running, client, context, clock, monkeypatch):
    monkeypatch.setattr(operations, "HISTORY_OF_LEASE_MAX", 9)
    _, agent, other = running
    facts: list[NoticeFact] = []
    for _ in range(4):
        facts.clear()
        for _ in range(NOTICES_PER_REPORT_MAX // 2):
            clock.advance(1)
            fact = agent.notice(deadline_s=HOUR_S)
            facts += [fact, withdraw(fact, clock())]
        agent.sync(notices=tuple(facts[:-1]))
    assert len(stored(context)) == 9 + 1
    assert other.sync().jobs[0].notices == (facts[-2],)
    shown = client.get("/api/v1/notices?limit=1000").json()
    assert [notice["open"] for notice in shown] == [True] + [False] * (len(shown) - 1)
    numbers = {row.occurrence_id for row in stored(context)}
    assert {notice["notice_id"] for notice in shown} == numbers, "each row that is left is shown"
    heard = client.get("/api/v1/hearings?limit=1000").json()
    assert numbers <= {hearing["notice_id"] for hearing in heard}, "by their present numbers"


@pytest.mark.thorough
def test_what_an_agent_hears_anew_without_end_leaves_few_hearings(running, client, context, clock, monkeypatch):
    """What the cloud told its account is not the agent's to push out."""
    monkeypatch.setattr(clouds, "HEARD_OF_LEASE_MAX", 10)
    _, agent, other = running
    for heard_by in (other, agent):
        heard_by.sync(notices=(heard_by.notice(deadline_s=HOUR_S),))
    with context.sessions.begin() as session:
        of_cloud = session.scalars(select(HearingRow).where(HearingRow.node_id == "a")).one()
        of_cloud.provider = "aws"
    for _ in range(3):
        facts: list[NoticeFact] = []
        for _ in range(NOTICES_PER_REPORT_MAX // 2):
            clock.advance(1)
            fact = agent.notice(deadline_s=HOUR_S)
            facts += [fact, withdraw(fact, clock())]
        agent.sync(notices=tuple(facts))
    with context.sessions() as session:
        heard = session.scalars(select(HearingRow).order_by(HearingRow.hearing_id)).all()
    assert [row.node_id for row in heard] == ["b", "a"] + ["a"] * 10
    assert [row.provider for row in heard if row.provider] == ["aws"]
    assert heard[-1].disposition == "withdraws", "the newest stay"


def test_what_is_over_when_it_is_told_leaves_few_rows(running, context, clock, monkeypatch):
    monkeypatch.setattr(operations, "HISTORY_OF_LEASE_MAX", 10)
    _, agent, _ = running
    for hour in range(2, 6):
        old = many(agent, NOTICES_PER_REPORT_MAX, deadline_s=-hour * HOUR_S)
        at = clock() - timedelta(hours=hour)
        agent.sync(notices=tuple(fact.model_copy(update={"first_seen_utc": at}) for fact in old))
    real = agent.notice()
    assert agent.sync(notices=(real,)).refusals == ()
    assert len(stored(context)) <= NOTICES_OF_LEASE_MAX + 10
    assert sources(context, clock) == {real.source}


def test_one_lease_is_not_short_of_notices_since_another_has_many(running, context, clock):
    _, agent, other = running
    agent.sync(notices=many(agent, NOTICES_OF_LEASE_MAX, deadline_s=60))
    real = other.notice(deadline_s=HOUR_S)
    assert other.sync(notices=(real,)).refusals == ()
    assert real.source in sources(context, clock)


def test_a_person_can_drain_a_node_of_which_many_notices_are_known(running, client, context, clock):
    _, agent, _ = running
    agent.sync(notices=many(agent, NOTICES_OF_LEASE_MAX, deadline_s=60))
    assert client.post("/api/v1/nodes/a/drain", json={"in_s": 7_200}).status_code == 200
    real = agent.notice(deadline_s=30)
    agent.sync(notices=(real,))
    assert {DRAIN, real.source} <= sources(context, clock)


@pytest.mark.parametrize("kind", [NoticeKind.INTERRUPTION, NoticeKind.MAINTENANCE])
def test_what_moves_jobs_presses_more_than_what_is_due_and_that_more_than_advice(running, clock, kind):
    agent, now = running[1], clock()
    heard_at = now - timedelta(seconds=120)
    *full, due = (
        fact.model_copy(update={"first_seen_utc": heard_at})
        for fact in many(agent, NOTICES_OF_LEASE_MAX, deadline_s=-10 - NOTICES_OF_LEASE_MAX)
    )
    advice = agent.notice(deadline_s=None, kind=NoticeKind.REBALANCE)
    real = agent.notice(deadline_s=HOUR_S, kind=kind).model_copy(update={"source": "real"})
    silent = agent.notice(deadline_s=None, kind=kind).model_copy(update={"source": "real"})
    assert gives_way([*full, due], real, now) == due
    assert gives_way([*full, due], silent, now) == due
    assert gives_way([*full, due], advice, now) is advice
    assert gives_way([*full, advice], due, now) == advice
    assert gives_way([*full, advice], real, now) == advice
    assert gives_way(full, advice, now) is None, "there is room"
    withdrawn = withdraw(real, now)
    assert gives_way([*full, withdrawn], advice, now) == withdrawn


def test_history_is_long_enough_for_a_node_that_lives_for_months():
    assert HISTORY_OF_LEASE_MAX >= 4 * NOTICES_OF_LEASE_MAX


def test_rows_of_other_leases_are_left_alone(running, context, clock, monkeypatch):
    monkeypatch.setattr(operations, "HISTORY_OF_LEASE_MAX", 0)
    _, agent, other = running
    for one in (other, agent):
        fact = one.notice(deadline_s=HOUR_S)
        one.sync(notices=(fact,))
        one.sync(notices=(fact.model_copy(update={"deadline_utc": clock() + timedelta(seconds=60)}),))
    with context.sessions() as session:
        counted = select(NoticeRow.node_id, func.count()).group_by(NoticeRow.node_id)
        assert dict(session.execute(counted).all()) == {"a": 1, "b": 1}
