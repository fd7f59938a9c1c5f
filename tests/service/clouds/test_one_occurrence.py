"""What a cloud tells the service becomes a notice as a drained node's does; whoever says it again adds a channel."""

from datetime import timedelta

import pytest
from sqlalchemy import select

from agent.protocol.notice_life import withdraw
from agent.protocol.sync import NoticeKind
from service.clouds.cloud_facts import Disposition, FactKind
from service.clouds.tables import HearingCountRow, HearingRow
from service.notices.tables import NoticeRow
from service.reconcilers import jobs


def notices(client, node_id="a"):
    return client.get("/api/v1/notices", params={"node_id": node_id}).json()


def hearings(context):
    with context.sessions() as session:
        rows = session.scalars(select(HearingRow).order_by(HearingRow.hearing_id)).all()
        return [(row.channel, row.disposition, row.node_id) for row in rows]


def test_what_the_queue_says_is_in_the_orders_of_all_nodes_of_the_job(on_machines, tell, client, clock):
    _, a, b = on_machines
    seq = b.orders.orders_seq
    taken = tell(in_s=120)
    assert (taken.disposition, taken.node_id) == (Disposition.ACTS, "a")
    for agent in (a, b):
        assert agent.sync().orders_seq > seq
        (fact,) = agent.job_order().notices
        assert (fact.node_id, fact.source, fact.kind) == ("a", "aws-queue", NoticeKind.INTERRUPTION)
        assert fact.deadline_utc == clock() + timedelta(seconds=120)
    assert client.get("/api/v1/nodes/a").json()["leaving"]


def test_the_queue_after_the_node_is_one_more_channel_of_one_occurrence(on_machines, tell, client, context, clock):
    _, a, _ = on_machines
    a.sync(notices=(a.notice(deadline_s=118),))
    clock.advance(5)
    taken = tell(in_s=110)
    assert taken.disposition is Disposition.ADDS
    assert taken.reason == "aws-imds said so 5.0 s before, and left 3 s more"
    (entry,) = notices(client)
    assert [(item["source"], item["lag_s"]) for item in entry["channels"]] == [("aws-imds", 0.0), ("aws-queue", 5.0)]
    assert entry["deadline_at"] == min(item["deadline_at"] for item in entry["channels"])
    assert hearings(context) == [("aws-imds", "acts", "a"), ("aws-queue", "adds", "a")]


def test_the_node_after_the_queue_is_one_more_channel_too(on_machines, tell, client, context, clock):
    _, a, _ = on_machines
    tell(in_s=120)
    clock.advance(5)
    a.sync(notices=(a.notice(deadline_s=110),))
    (entry,) = notices(client)
    assert [(item["source"], item["lag_s"]) for item in entry["channels"]] == [("aws-queue", 0.0), ("aws-imds", 5.0)]
    assert (
        entry["deadline_at"]
        == client.get("/api/v1/nodes/a").json()["deadline_at"]
        == entry["channels"][1]["deadline_at"]
    )
    assert hearings(context) == [("aws-queue", "acts", "a"), ("aws-imds", "adds", "a")]


@pytest.mark.parametrize("reporter", ["a", "b"])
@pytest.mark.parametrize(
    "others", [{"kind": NoticeKind.MAINTENANCE}, {"source": "shutdown"}], ids=["two kinds", "two sources"]
)
def test_one_report_with_two_notices_of_one_loss_is_one_occurrence(
    on_machines, client, context, clock, others, reporter
):
    """As after an outage of the service, when all that was said meanwhile waits; a peer passes it on in one too."""
    agents = {agent.node_id: agent for agent in on_machines[1:]}
    first = agents["a"].notice(deadline_s=120)
    second = agents["a"].notice(deadline_s=100).model_copy(update=others)
    agents[reporter].sync(notices=(first, second))
    (entry,) = notices(client)
    assert sorted((item["kind"], item["source"]) for item in entry["channels"]) == sorted(
        (fact.kind.value, fact.source) for fact in (first, second)
    )
    assert entry["deadline_at"] == min(item["deadline_at"] for item in entry["channels"])
    assert hearings(context)[0] == (first.source, "acts", "a")
    agents[reporter].sync(notices=(first, second))
    assert notices(client) == [entry], "said again, it is no news"


def test_a_second_channel_starts_no_second_handoff(training, tell, client, context, clock):
    agents, parts = training
    for name, agent in agents.items():
        agent.provider_id = f"i-{name}"
        agent.sync(**parts(name, 4))
    tell("i-d", in_s=120)
    clock.advance(4)
    jobs.tick(context)
    first = client.get("/api/v1/handoffs").json()
    assert [item["leaving"] for item in first] == [["d"]]
    agents["d"].sync(notices=(agents["d"].notice(deadline_s=110),), **parts("d", 4))
    for _ in range(4):
        clock.advance(1)
        jobs.tick(context)
    again = client.get("/api/v1/handoffs").json()
    assert [item["handoff_id"] for item in again] == [item["handoff_id"] for item in first]


def test_what_is_said_again_or_an_hour_late_changes_nothing(on_machines, tell, client, context, clock):
    _, _, b = on_machines
    assert tell(in_s=120).disposition is Disposition.ACTS
    before = b.sync()
    assert tell(in_s=120).disposition is Disposition.REPEATED
    assert tell("i-b", in_s=-3_480, ago_s=3_600).disposition is Disposition.LATE
    assert b.sync().orders_seq == before.orders_seq
    assert len(notices(client)) == 1 and notices(client, "b") == []
    assert hearings(context) == [
        ("aws-queue", "acts", "a"), ("aws-queue", "repeated", "a"), ("aws-queue", "late", "b"),
    ]  # fmt: skip


def test_one_message_that_is_delivered_again_is_stored_once(on_machines, tell, context):
    for _ in range(3):
        tell(message_id="same")
    assert hearings(context) == [("aws-queue", "acts", "a")]


def test_foreign_machines_are_counted_and_let_go(on_machines, tell, client, context):
    for number in range(5):
        assert tell(f"i-stranger-{number}").disposition is Disposition.FOREIGN
    assert hearings(context) == [] and client.get("/api/v1/notices").json() == []
    with context.sessions() as session:
        (row,) = session.scalars(select(HearingCountRow))
        assert (row.channel, row.disposition, row.heard) == ("aws-queue", "foreign", 5)
        assert row.example.startswith("no node of this installation is aws machine i-stranger-4")


def test_one_channel_takes_back_only_what_it_said_itself(on_machines, tell, client, clock):
    _, a, b = on_machines
    fact = a.notice(deadline_s=120)
    a.sync(notices=(fact,))
    tell(in_s=120)
    clock.advance(1)
    a.sync(notices=(withdraw(fact, clock()),))
    (entry,) = notices(client)
    assert entry["state"] == "heard" and entry["open"] and entry["withdrawn_at"] is None
    assert client.get("/api/v1/nodes/a").json()["leaving"]
    assert tell(is_withdrawal=True).disposition is Disposition.WITHDRAWS
    (entry,) = notices(client)
    assert entry["state"] == "withdrawn" and entry["withdrawn_at"] is not None
    assert not client.get("/api/v1/nodes/a").json()["leaving"]
    assert all(item.withdrawn_utc for item in b.sync().jobs[0].notices)


def test_an_agent_cannot_take_back_what_the_queue_said(on_machines, tell, client, clock):
    _, a, _ = on_machines
    tell(in_s=120)
    (said,) = a.sync().jobs[0].notices
    a.sync(notices=(withdraw(said, clock()),))
    assert client.get("/api/v1/nodes/a").json()["leaving"]


def test_a_withdrawal_that_overtakes_its_notice_counts(on_machines, tell, client):
    assert tell(is_withdrawal=True, ago_s=1).disposition is Disposition.WITHDRAWS
    assert tell(ago_s=5).disposition is Disposition.REPEATED
    assert not client.get("/api/v1/nodes/a").json()["leaving"]


def test_advice_is_recorded_and_moves_nobody(on_machines, tell, client):
    assert tell(kind=FactKind.REBALANCE, in_s=None).disposition is Disposition.ADVICE
    (entry,) = notices(client)
    assert entry["kind"] == "rebalance" and not client.get("/api/v1/nodes/a").json()["leaving"]
    assert tell(in_s=120).disposition is Disposition.ACTS
    assert [item["kind"] for item in notices(client)] == ["interruption", "rebalance"]


def test_a_machine_that_is_stopped_without_a_notice_is_one(on_machines, tell, client):
    assert tell(kind=FactKind.GOING, in_s=0).disposition is Disposition.ACTS
    assert client.get("/api/v1/nodes/a").json()["leaving"]
    assert tell(kind=FactKind.GONE, in_s=None).disposition is Disposition.NOTED
    assert tell("i-b", in_s=120).disposition is Disposition.ACTS
    going = tell("i-b", kind=FactKind.GOING, in_s=0)
    assert (going.disposition, going.reason) == (Disposition.NOTED, "the machine is being stopped, as was announced")


def test_a_warning_that_the_stop_of_its_machine_has_overtaken_is_no_second_loss(on_machines, tell, client, clock):
    """A queue does not keep the order: what one reader holds when it dies comes back after what was said later."""
    assert tell(kind=FactKind.GOING, in_s=0).disposition is Disposition.ACTS
    clock.advance(20)
    assert tell(in_s=80, ago_s=40).disposition is Disposition.REPEATED
    (entry,) = notices(client)
    assert len(entry["channels"]) == 1
    clock.advance(20)
    assert tell(in_s=110, ago_s=10).disposition is Disposition.ACTS  # The machine was started again, and goes again.


def test_two_losses_far_apart_are_two_occurrences(on_machines, tell, client):
    tell(kind=FactKind.MAINTENANCE, in_s=500)
    tell(in_s=120)
    assert [item["kind"] for item in notices(client)] == ["interruption", "maintenance"]
    assert len({item["notice_id"] for item in notices(client)}) == 2


def test_a_notice_after_a_withdrawn_one_is_another_occurrence(on_machines, tell, client, clock):
    tell(in_s=120)
    clock.advance(1)
    tell(is_withdrawal=True)
    clock.advance(1)
    assert tell(in_s=100).disposition is Disposition.ACTS
    assert [item["state"] for item in notices(client)] == ["heard", "withdrawn"]


def test_a_drain_is_apart_from_what_the_cloud_says(on_machines, tell, client):
    client.post("/api/v1/nodes/a/drain", json={"in_s": 120})
    assert tell(in_s=120).disposition is Disposition.ACTS
    assert [item["source"] for item in notices(client)] == ["aws-queue", "drain"]


def test_every_row_of_a_notice_has_an_occurrence(on_machines, tell, context):
    tell(in_s=120)
    tell(in_s=60)
    tell(is_withdrawal=True)
    with context.sessions() as session:
        rows = session.scalars(select(NoticeRow).order_by(NoticeRow.notice_id)).all()
        assert len(rows) == 3 and {row.occurrence_id for row in rows} == {rows[0].notice_id}
