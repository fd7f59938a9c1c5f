"""Which channels of a node are alive, when each was last heard, and which nodes are deaf: in the API and in numbers."""

from agent.protocol.sync import NoticeKind, Provider, SourceState
from service.clouds.cloud_facts import RAW_CHARS_MAX
from service.clouds.operations import note_channel


def channels(client, node_id="a"):
    node = client.get(f"/api/v1/nodes/{node_id}").json()
    return {item["channel"]: (item["alive"], item["reason"]) for item in node["channels"]}, node["deaf"]


def asked(context, clock, **more):
    with context.sessions.begin() as session:
        note_channel(session, "aws-queue", Provider.AWS, now=clock(), **more)


def test_a_node_with_no_living_channel_is_deaf(on_machines, client, context, clock):
    _, a, _ = on_machines
    assert channels(client) == ({}, True)
    a.watch()
    a.sync()
    assert channels(client) == ({"aws-imds": (True, "")}, False)
    a.watch(state=SourceState.UNKNOWN, reason="/latest/api/token answered 500")
    a.sync()
    assert channels(client) == ({"aws-imds": (False, "/latest/api/token answered 500")}, True)
    asked(context, clock)
    assert channels(client)[0]["aws-queue"] == (True, "") and not channels(client)[1]
    clock.advance(91)
    a.sync()
    assert channels(client)[0]["aws-queue"] == (False, "nobody asks it") and channels(client)[1]


def test_the_queue_tells_nothing_of_a_node_that_has_not_said_which_machine_it_is(running, client, context, clock):
    asked(context, clock)
    found, deaf = channels(client)
    assert found == {"aws-queue": (False, "the agent has not said which machine the node is")} and deaf


def test_trouble_with_a_channel_names_its_reason_and_since_when_and_ends(on_machines, client, context, clock):
    def channel():
        (found,) = client.get("/api/v1/channels").json()
        return found["alive"], found["trouble"], found["trouble_since"]

    began = clock().isoformat().replace("+00:00", "Z")
    asked(context, clock, trouble="no queue")
    clock.advance(30)
    asked(context, clock, trouble="no permission")
    assert channel() == (False, "no permission", began)
    assert channels(client)[0]["aws-queue"] == (False, "no permission")
    clock.advance(1)
    asked(context, clock)
    assert channel() == (True, "", None)
    clock.advance(1)
    again = clock().isoformat().replace("+00:00", "Z")
    asked(context, clock, trouble="no queue")
    assert channel() == (True, "no queue", again), "another replica may still be heard"


def test_when_each_channel_was_last_heard_is_with_the_node(on_machines, tell, client, context, clock):
    _, a, _ = on_machines
    a.watch(NoticeKind.INTERRUPTION)
    asked(context, clock)
    a.sync(notices=(a.notice(),))
    clock.advance(2)
    tell()
    node = client.get("/api/v1/nodes/a").json()
    heard = {item["channel"]: item["heard_at"] for item in node["channels"]}
    assert heard == {"aws-imds": "2026-01-01T12:00:04Z", "aws-queue": "2026-01-01T12:00:06Z"}


def test_numbers_for_prometheus_name_channels_and_never_machines(on_machines, tell, client, context, clock):
    asked(context, clock)
    tell()
    tell("i-stranger")
    answer = client.get("/api/v1/metrics")
    assert answer.status_code == 200 and answer.headers["content-type"].startswith("text/plain; version=0.0.4")
    lines = answer.text.splitlines()
    assert 'liver_notice_messages_total{channel="aws-queue",disposition="acts"} 1' in lines
    assert 'liver_notice_messages_total{channel="aws-queue",disposition="foreign"} 1' in lines
    assert 'liver_notice_channel_alive{channel="aws-queue"} 1' in lines
    assert "liver_nodes_deaf 0" in lines and 'liver_nodes{state="ready"} 2' in lines
    assert "i-a" not in answer.text and "stranger" not in answer.text
    assert client.get("/api/v1/metrics", headers={"Authorization": "none"}).status_code == 401


def test_every_message_about_a_node_is_kept_as_it_was_received(on_machines, tell, client):
    tell(raw='{"a": 1}', ago_s=3)
    (heard,) = client.get("/api/v1/hearings", params={"node_id": "a"}).json()
    assert (heard["raw"], heard["lag_s"], heard["disposition"]) == ('{"a": 1}', 3.0, "acts")
    assert heard["notice_id"] == client.get("/api/v1/notices").json()[0]["notice_id"]


def test_of_a_long_message_the_beginning_is_kept(on_machines, tell, client):
    text = "x" * (3 * RAW_CHARS_MAX)
    tell(raw=text)
    (heard,) = client.get("/api/v1/hearings", params={"node_id": "a"}).json()
    assert len(heard["raw"]) == RAW_CHARS_MAX and heard["raw"][:1_000] == text[:1_000]


def test_what_a_channel_told_is_forgotten_after_a_month(on_machines, tell, client, context, clock):
    from service.reconcilers import upkeep

    tell()
    clock.advance(29 * 86_400)
    upkeep.tick(context)
    assert len(client.get("/api/v1/hearings").json()) == 1
    clock.advance(2 * 86_400)
    upkeep.tick(context)
    assert client.get("/api/v1/hearings").json() == []
