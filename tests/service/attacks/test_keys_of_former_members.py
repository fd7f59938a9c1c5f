"""A former member kept the key of its job. It signs with it what it sends to agents that are still there."""

import time

import pytest
from fastapi.testclient import TestClient

from agent.peer.peer_server import STATUS_PATH, peer_app
from agent.peer.signing import Request, sign, told_time
from agent.protocol.peer import PEER_PATH, Envelope, NoticeBody
from agent.protocol.sync import NoticeKind
from liver_core.layout import ParallelLayout
from service.jobs.grants import GRACE_S
from service.peer_keys.queries import ANSWERED_WITHIN
from service.reconcilers import keys
from tests.service.fake_agent import mirror, roster


@pytest.fixture
def moved_on(running, make_agent, grant, clock):
    """The job has gone from nodes a and b to b and c: a is a former member, and has noted the key."""
    job_id, a, b = running
    old = a.job_order().peer_key
    c = make_agent("c")
    c.sync()
    grant(job_id, "c")
    target = roster(job_id, 2, ParallelLayout(pp=2), "b", "c")
    assert a.sync(handoffs=(mirror(a.roster(), target, clock()),)).refusals == ()
    for agent in (b, c):
        agent.sync()
    return job_id, a, b, c, old


def endpoint_of(agent, taken):
    """The peer endpoint of an agent, with the keys that its orders name."""

    async def take(message):
        taken.append(message)

    def keys_of(job_id):
        order = agent.job_order()
        return [key for key in (order.peer_key, order.peer_key_before) if key is not None]

    app = peer_app(node_id=agent.node_id, keys_of=keys_of, take=take, status=lambda job_id: {}, now=time.time)
    return TestClient(app)


def attack(key, job_id, sender, target):
    """A forged notice and a question, signed with this key: what was taken of it, and what the answers were."""
    taken = []
    notice = target.notice(kind=NoticeKind.INTERRUPTION, deadline_s=30)
    forged = Envelope(
        sender=sender.node_id,
        receiver=target.node_id,
        agent_incarnation=sender.incarnation,
        job_id=job_id,
        issued_utc=sender.clock(),
        body=NoticeBody(notice=notice),
    )
    body = forged.model_dump_json(by_alias=True).encode()
    answers = []
    with endpoint_of(target, taken) as endpoint:
        for method, path, content in (("POST", PEER_PATH, body), ("GET", STATUS_PATH, b"")):
            request, nonce = Request(method, path, job_id, content), "n" * 16 + method.lower() * 4
            headers = sign(request, key, now=time.time(), nonce=nonce)
            answers.append(endpoint.request(method, path, content=content, headers=headers))
            if answers[-1].status_code == 401:
                assert told_time(request, nonce, key, answers[-1].headers) is None
                assert "does not match" in answers[-1].json()["detail"]
    return len(taken), [answer.status_code for answer in answers]


def test_the_key_of_a_former_member_opens_no_endpoint_once_its_grant_has_ended(moved_on, context, clock):
    job_id, former, b, c, old = moved_on
    assert attack(old, job_id, former, b) == (1, [202, 200]), "it may still finish its part"
    clock.advance(GRACE_S + ANSWERED_WITHIN.total_seconds() + 1)
    for _ in range(3):
        for agent in (b, c):
            agent.sync()
        keys.tick(context)
    for agent in (b, c):
        agent.sync()
        assert attack(old, job_id, former, agent) == (0, [401, 401])
    assert attack(c.job_order().peer_key, job_id, c, b) == (1, [202, 200])
    # Its own node learns no newer key, whatever it says it keeps.
    assert former.sync().jobs == ()
    former.orders = former.orders.model_copy(update={"jobs": b.orders.jobs, "orders_digest": b.orders.orders_digest})
    assert b.job_order().peer_key not in former.post(former.report()).text


def test_a_stranger_cannot_have_a_key_dropped_that_members_need(moved_on, make_agent, client, context):
    job_id, _, b, c, _ = moved_on
    assert client.post(f"/api/v1/jobs/{job_id}/rotate-key").status_code == 200
    for _ in range(2):
        b.sync()
    stranger = make_agent("stranger", pool="elsewhere")
    stranger.sync()
    stranger.orders = b.orders
    assert [item.key for item in stranger.sync().refusals] == [job_id]
    assert keys.tick(context) == 0
    # c is cut off and knows the first key only: it and b hear each other both ways.
    assert attack(c.job_order().peer_key, job_id, c, b) == (1, [202, 200])
    assert attack(b.job_order().peer_key_before, job_id, b, c) == (1, [202, 200])
