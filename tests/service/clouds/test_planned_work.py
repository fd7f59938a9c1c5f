"""Work on a machine that a channel of an account announces long ahead: advice until it is near. Then it takes the node,
though nobody says so again."""

from datetime import UTC, datetime, timedelta

from hypothesis import given
from hypothesis import strategies as st

from agent.protocol.notice_life import LEAD, bars_ranks, moves_jobs, withdraw
from agent.protocol.sync import NoticeFact, NoticeKind
from service.clouds.cloud_facts import Disposition, FactKind
from service.clouds.rules import begun
from service.nodes.operations import mark_gone
from service.nodes.tables import NodeRow
from service.reconcilers import planned_work

NOON = datetime(2026, 1, 1, 12, tzinfo=UTC)
DAYS_S = 14 * 86_400
ALMOST_S = DAYS_S - LEAD.total_seconds() - 1


def advice(in_s: float | None, *, kind: NoticeKind = NoticeKind.REBALANCE, source: str = "aws-queue") -> NoticeFact:
    ends = None if in_s is None else NOON + timedelta(seconds=in_s)
    return NoticeFact(node_id="a", kind=kind, source=source, first_seen_utc=NOON, deadline_utc=ends)


def node(client) -> dict:
    return client.get("/api/v1/nodes/a").json()


def test_a_scheduled_change_of_health_leaves_its_node_at_work_until_ten_minutes_before_it(
    on_machines, tell, client, context, clock
):
    _, a, b = on_machines
    taken = tell(kind=FactKind.MAINTENANCE, in_s=DAYS_S)
    assert taken.disposition is Disposition.ADVICE and "planned" in taken.reason
    ends = clock() + timedelta(seconds=DAYS_S)
    assert planned_work.tick(context) == 0 and not node(client)["leaving"]
    clock.advance(ALMOST_S)
    assert planned_work.tick(context) == 0 and not any(
        fact.kind in ("maintenance",) for fact in b.sync().jobs[0].notices
    )
    clock.advance(2)
    assert [planned_work.tick(context), planned_work.tick(context)] == [1, 0]
    assert node(client)["leaving"]
    for agent in (a, b):
        agent.sync()
        (moving,) = [fact for fact in agent.job_order().notices if moves_jobs(fact, clock())]
        assert (moving.kind, moving.source, moving.deadline_utc) == (NoticeKind.MAINTENANCE, "aws-queue", ends)


def test_what_the_cloud_has_taken_back_takes_no_node_when_its_time_comes(on_machines, tell, client, context, clock):
    tell(kind=FactKind.MAINTENANCE, in_s=DAYS_S)
    assert tell(kind=FactKind.MAINTENANCE, in_s=DAYS_S, is_withdrawal=True).disposition is Disposition.WITHDRAWS
    clock.advance(ALMOST_S + 2)
    assert planned_work.tick(context) == 0 and not node(client)["leaving"]


def test_what_is_taken_back_shortly_before_does_not_come_again(on_machines, tell, client, context, clock):
    tell(kind=FactKind.MAINTENANCE, in_s=DAYS_S)
    clock.advance(ALMOST_S + 2)
    assert planned_work.tick(context) == 1
    clock.advance(1)
    tell(kind=FactKind.MAINTENANCE, in_s=LEAD.total_seconds() - 2, is_withdrawal=True)
    assert planned_work.tick(context) == 0 and not node(client)["leaving"]


def test_the_next_machine_under_the_name_does_not_inherit_the_work(on_machines, tell, context, clock):
    tell(kind=FactKind.MAINTENANCE, in_s=DAYS_S)
    with context.sessions.begin() as session:
        mark_gone(session, session.get_one(NodeRow, "a"), reason="test", now=clock())
    clock.advance(ALMOST_S + 2)
    assert planned_work.tick(context) == 0


def test_a_recommendation_without_a_time_and_advice_of_an_agent_never_take_a_node():
    assert begun([advice(None)], NOON) == ()
    assert begun([advice(60, source="aws-imds")], NOON) == (), "the agent says so itself when it is near"


@given(st.integers(-3_600, DAYS_S) | st.integers(-2, 602), st.booleans(), st.booleans())
def test_work_begins_once_from_the_lead_on_and_only_while_nobody_took_it_back(in_s, is_withdrawn, is_told):
    said = withdraw(advice(in_s), NOON) if is_withdrawn else advice(in_s)
    before = (advice(in_s, kind=NoticeKind.MAINTENANCE),) if is_told else ()
    found = begun([said, *before], NOON)
    assert bool(found) == (0 < in_s <= LEAD.total_seconds() and not is_withdrawn and not is_told)
    for notice in found:
        assert bars_ranks(notice, NOON) and notice.deadline_utc == said.deadline_utc
        assert begun([said, notice], NOON + timedelta(seconds=1)) == ()
