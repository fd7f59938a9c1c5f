"""A node says which machine of its provider it is. What another node is, that is not gone, it may not be."""

from sqlalchemy import select

from agent.protocol.sync import Provider
from service.capacity.tables import InstanceRow
from service.clouds.cloud_facts import Disposition
from service.nodes.operations import mark_gone
from service.nodes.tables import NodeRow


def instances(client, node_id):
    found = client.get("/api/v1/instances", params={"node_id": node_id}).json()
    return [(item["provider_id"], item["zone"], item["released_at"] is None) for item in found]


def test_a_node_that_learns_later_which_machine_it_is_says_so_then(running, client):
    _, a, _ = running
    a.sync()
    assert instances(client, "a") == [(None, None, True)]
    a.provider_id, a.zone = "i-a", "us-east-1b"
    a.sync()
    a.provider_id = None
    a.sync()
    assert instances(client, "a") == [("i-a", "us-east-1b", True)]


def test_a_stranger_does_not_get_the_machine_of_a_node_and_the_rest_of_its_report_stands(on_machines, client, tell):
    _, _, b = on_machines
    b.provider_id = "i-a"
    notice = b.notice(deadline_s=100)
    orders = b.sync(notices=(notice,))
    (refusal,) = orders.refusals
    assert (refusal.part, refusal.key) == ("provider_id", "i-a")
    assert refusal.reason == "machine i-a is node a, which is not gone"
    assert client.get("/api/v1/nodes/b").json()["leaving"]
    assert tell("i-a").node_id == "a" and tell("i-b").node_id == "b"


def test_a_machine_whose_node_is_gone_may_be_another_node(on_machines, client, context, clock, make_agent, tell):
    with context.sessions.begin() as session:
        mark_gone(session, session.get_one(NodeRow, "a"), reason="test", now=clock())
    assert tell("i-a").disposition is Disposition.LATE
    again = make_agent("again")
    again.provider_id = "i-a"
    assert again.sync().refusals == ()
    assert instances(client, "a") == [("i-a", None, False)] and instances(client, "again") == [("i-a", None, True)]
    assert tell("i-a").node_id == "again"


def test_another_machine_under_the_name_of_a_node_begins_without_its_notices(on_machines, client, tell):
    _, a, _ = on_machines
    tell("i-a")
    assert client.get("/api/v1/nodes/a").json()["leaving"]
    a.provider_id = "i-new"
    a.sync()
    assert not client.get("/api/v1/nodes/a").json()["leaving"]
    assert instances(client, "a") == [("i-new", None, True), ("i-a", None, False)]
    leases = client.get("/api/v1/leases", params={"node_id": "a"}).json()
    assert [item["end_reason"] for item in leases] == ["", "the node is machine i-new now"]
    assert tell("i-a").disposition is Disposition.FOREIGN and tell("i-new").node_id == "a"


def test_a_machine_that_was_ordered_here_becomes_the_node_that_says_it_is_it(
    running, client, context, clock, make_agent
):
    with context.sessions.begin() as session:
        before = session.scalars(select(InstanceRow)).first()
        assert before is not None
        ordered = InstanceRow(
            request_id=before.request_id, provider="aws", provider_id="i-9", pool="spot-a", known_since=clock()
        )
        session.add(ordered)
        session.flush()
        number = ordered.instance_id
    agent = make_agent("n")
    agent.provider_id = "i-9"
    agent.sync()
    assert [item["instance_id"] for item in client.get("/api/v1/instances?node_id=n").json()] == [number]


def test_a_wrong_name_of_a_machine_is_refused_by_name(running, client):
    _, a, _ = running
    report = a.report(notices=(a.notice(),)).model_dump(mode="json")
    report["node"]["provider_id"] = "i a"
    answer = client.post("/agent/v1/sync", json=report, headers=a.headers)
    assert answer.status_code == 200
    assert [item["part"] for item in answer.json()["refusals"]] == ["provider_id"]
    assert client.get("/api/v1/nodes/a").json()["leaving"]


def test_the_same_name_at_another_provider_is_another_machine(on_machines, tell):
    assert tell("i-a", provider=Provider.GCP).disposition is Disposition.FOREIGN
