"""Agents are woken for losses that are new, nearer or over. All else is in their next answer, and wakes nobody."""

from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sqlalchemy import select

from agent.protocol.notice_life import moves_jobs
from agent.protocol.sync import NoticeFact, NoticeKind
from service.clouds.cloud_facts import FactKind
from service.db.wake import node_topic
from service.jobs.tables import JobRow
from service.notices.rules import is_urgent
from service.reconcilers import jobs

NOW = datetime(2026, 1, 1, 12, tzinfo=UTC)


@pytest.fixture
def woken(monkeypatch):
    """The nodes that were woken since it was asked last."""
    topics: list[str] = []
    monkeypatch.setattr("service.jobs.operations.notify", lambda session, found: topics.extend(found))

    def take() -> list[str]:
        found = sorted(topic.removeprefix("node/") for topic in topics if topic.startswith(node_topic("")))
        topics.clear()
        return found

    return take


def test_a_node_is_woken_for_a_loss_that_is_new_nearer_or_over_and_for_nothing_else(
    on_machines, tell, context, clock, woken
):
    numbers: list[int] = []

    def orders_changed() -> bool:
        with context.sessions() as session:
            numbers.append(session.scalars(select(JobRow.orders_seq)).one())
        return len(numbers) < 2 or numbers[-1] > numbers[-2]

    steps = (
        ("advice", {"kind": FactKind.REBALANCE, "in_s": None}, True, False),
        ("the first warning", {"in_s": 120}, True, True),
        ("the same again", {"in_s": 120}, False, False),
        ("another channel, a little later", {"in_s": 125, "channel": "aws-other"}, True, False),
        ("another kind, the same time", {"in_s": 120, "kind": FactKind.MAINTENANCE}, True, False),
        ("sooner than was known", {"in_s": 60, "kind": FactKind.MAINTENANCE}, True, True),
        ("a stranger", {"provider_id": "i-stranger"}, False, False),
        ("one channel takes it back", {"channel": "aws-other", "is_withdrawal": True}, True, False),
        ("its end, as announced", {"kind": FactKind.GONE, "in_s": None}, False, False),
    )
    assert orders_changed()
    woken()
    for what, told, changes, wakes in steps:
        tell(**told)
        assert orders_changed() == changes, what
        assert woken() == (["a", "b"] if wakes else []), what
    tell(kind=FactKind.INTERRUPTION, is_withdrawal=True)
    assert woken() == []
    tell(kind=FactKind.MAINTENANCE, is_withdrawal=True)
    assert woken() == ["a", "b"], "it stays after all"


def test_the_planner_looks_at_advice_soon_though_no_agent_is_woken(on_machines, tell, context, clock):
    for _ in range(2):
        jobs.tick(context)
        clock.advance(1)

    def due_in_s() -> float:
        with context.sessions() as session:
            return (session.scalars(select(JobRow.due_at)).one() - clock()).total_seconds()

    tell("i-b", kind=FactKind.REBALANCE, in_s=None)
    assert due_in_s() <= 2
    tell("i-b")
    assert due_in_s() <= 0


notices = st.builds(
    lambda kind, source, in_s, ago_s, is_withdrawn: NoticeFact(
        node_id="a",
        kind=kind,
        source=source,
        deadline_utc=None if in_s is None else NOW + timedelta(seconds=in_s),
        first_seen_utc=NOW - timedelta(seconds=ago_s),
        withdrawn_utc=NOW if is_withdrawn else None,
    ),
    st.sampled_from(NoticeKind),
    st.sampled_from(("aws-queue", "aws-imds")),
    st.none() | st.integers(-300, 300),
    st.integers(0, 700),
    st.booleans(),
)
known = st.lists(notices, max_size=4)


@given(known, known)
def test_who_has_to_leave_or_may_stay_is_told_at_once_and_nobody_twice(before, after):
    goes = [any(moves_jobs(item, NOW) for item in found) for found in (before, after)]
    if goes[0] != goes[1]:
        assert is_urgent(before, after, NOW)
    if not any(goes):
        assert not is_urgent(before, after, NOW)
    assert not is_urgent(after, after, NOW)
    assert not (is_urgent(before, after, NOW) and is_urgent(after, before, NOW) and all(goes))
