"""How a node becomes known and what its tokens are good for: the agent's own code against the real application."""

import asyncio
import json
import stat
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import httpx
import pytest

from agent.link.identity import FILE_NAME, KeyFileError, NodeAuth
from agent.protocol import PROTOCOL_VERSION
from agent.protocol.joining import JOIN_PATH
from service.db.wake import TOKENS, notify
from service.nodes.tables import NodeRow, NodeState
from service.reconcilers import keys
from service.tokens.operations import FIRST_REPORT_WITHIN
from service.tokens.recent import FRESH, RENEWED_AFTER
from service.tokens.tables import Role, TokenRow
from tests.service.conftest import bearer
from tests.service.sync.test_cost import statements
from tests.service.tokens.test_revocation import until

WAKE = "/agent/v1/wake"
REPORT = "/agent/v1/sync"


class Nodes:
    """Agents that ask the application for something with their own code."""

    def __init__(self, app, folder: Path, settings) -> None:
        self.app, self.folder = app, folder
        self.join = bearer(settings, "join")["Authorization"].removeprefix("Bearer ")
        self.auths: dict[str, NodeAuth] = {}

    def auth(self, node_id: str, *, token: str | None = None, folder: str | None = None) -> NodeAuth:
        where = self.folder / (folder or node_id)
        return NodeAuth("http://test", node_id=node_id, join_token=token or self.join, run_dir=where)

    def report(self, agent, auth: NodeAuth, *, times: int = 1) -> list[httpx.Response]:
        """So many reports at once."""

        async def run() -> list[httpx.Response]:
            transport = httpx.ASGITransport(app=self.app)
            async with httpx.AsyncClient(base_url="http://test", auth=auth, transport=transport) as client:
                bodies = [agent.report().model_dump_json() for _ in range(times)]
                return await asyncio.gather(*(client.post(REPORT, content=body) for body in bodies))

        return asyncio.run(run())


@pytest.fixture
def nodes(client, settings, tmp_path) -> Nodes:
    return Nodes(client.app, tmp_path, settings)


@pytest.fixture
def admin(settings):
    return bearer(settings, "admin")


def rows(context, role: Role) -> list[TokenRow]:
    with context.sessions() as session:
        return [row for row in session.query(TokenRow).all() if row.role == role]


def make_token(client, admin, **wanted) -> dict:
    answer = client.post("/api/v1/tokens", json={"role": "join", "name": "test"} | wanted, headers=admin)
    assert answer.status_code == 201, answer.text
    return answer.json()


def test_a_node_joins_once_and_reports_with_a_token_of_its_own(nodes, make_agent, context):
    auth = nodes.auth("a")
    answers = [answer.status_code for answer in nodes.report(make_agent("a"), auth, times=3)]
    assert 200 in answers and 401 not in answers, "of several reports at once, a later one takes the place of another"
    (key,) = rows(context, Role.NODE_KEY)
    assert key.node_id == "a"
    assert [row.node_id for row in rows(context, Role.NODE)] == ["a"], "three requests at once fetch one token"
    path = nodes.folder / "a" / FILE_NAME
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert nodes.report(make_agent("a"), nodes.auth("a", token="liver_no_longer"))[0].status_code == 200
    assert len(rows(context, Role.NODE_KEY)) == 1, "another start of the agent has the key already"


def test_a_token_speaks_for_no_other_node(nodes, make_agent, client):
    auth = nodes.auth("a")
    assert nodes.report(make_agent("a"), auth)[0].status_code == 200
    foreign = nodes.report(make_agent("b"), auth)[0]
    assert (foreign.status_code, foreign.json()["errors"]) == (403, [{"field": "node.node_id", "rule": "must be a"}])
    wake = client.get(WAKE, params={"node_id": "a"}, headers=make_agent("b").headers)
    assert (wake.status_code, wake.json()["detail"]) == (
        403, "node_id: this token speaks for node b only, not for a",
    )  # fmt: skip


def test_an_expired_token_is_replaced_with_the_key_and_the_old_one_is_deleted(nodes, make_agent, context, clock):
    auth = nodes.auth("a")
    nodes.report(make_agent("a"), auth)
    clock.advance(context.settings.node_token_s + 1)
    assert nodes.report(make_agent("a"), auth)[0].status_code == 200
    (token,) = rows(context, Role.NODE)
    assert token.expires_at == clock() + timedelta(seconds=context.settings.node_token_s)


def test_a_join_whose_answer_was_lost_is_repeated_with_a_token_that_is_used_up(nodes, make_agent, client, admin):
    once = make_token(client, admin)["token"]
    assert nodes.report(make_agent("a"), nodes.auth("a", token=once))[0].status_code == 200
    path = nodes.folder / "a" / FILE_NAME
    path.write_text(json.dumps(json.loads(path.read_text()) | {"key_id": ""}))
    assert nodes.report(make_agent("a"), nodes.auth("a", token=once))[0].status_code == 200
    refused = nodes.report(make_agent("b"), nodes.auth("b", token=once))[0]
    assert refused.status_code == 409 and "has been used" in refused.json()["detail"]


def test_a_join_token_for_one_node_admits_no_other(nodes, make_agent, client, admin):
    bound = make_token(client, admin, node_id="a", uses=5)["token"]
    refused = nodes.report(make_agent("b"), nodes.auth("b", token=bound))[0]
    assert (refused.status_code, refused.json()["detail"]) == (
        409, "node_id: this join token is for node a, not b",
    )  # fmt: skip
    assert nodes.report(make_agent("a"), nodes.auth("a", token=bound))[0].status_code == 200


def test_a_stranger_cannot_take_the_name_of_a_living_node_but_of_one_that_is_gone(nodes, make_agent, context):
    assert nodes.report(make_agent("a"), nodes.auth("a"))[0].status_code == 200
    refused = nodes.report(make_agent("a"), nodes.auth("a", folder="elsewhere"))[0]
    assert refused.status_code == 409 and "another agent serves node a" in refused.json()["detail"]
    with context.sessions.begin() as session:
        session.get_one(NodeRow, "a").state = NodeState.GONE
    assert nodes.report(make_agent("a"), nodes.auth("a", folder="elsewhere"))[0].status_code == 200
    old, new = sorted(rows(context, Role.NODE_KEY), key=lambda row: row.revoked_at is None)
    assert old.revoked_at is not None and new.revoked_at is None


def test_of_those_who_join_at_once_under_a_new_name_one_wins(client, settings, admin, context, clock):
    tokens = [bearer(settings, "join"), {"Authorization": f"Bearer {make_token(client, admin, uses=20)['token']}"}]
    asked = [({"node_id": "new", "secret": f"{number:043d}"}, tokens[number % 2]) for number in range(10)]

    def join(number: int) -> int:
        body, headers = asked[number]
        return client.post(JOIN_PATH, json={"protocol_version": PROTOCOL_VERSION} | body, headers=headers).status_code

    with ThreadPoolExecutor(10) as pool:
        answers = list(pool.map(join, range(10)))
    assert sorted(answers) == [201] + [409] * 9
    winner = answers.index(201)
    clock.advance(FIRST_REPORT_WITHIN.total_seconds() - 1)
    assert (join(winner), join((winner + 2) % 10)) == (201, 409), "the first may repeat it, and has yet to report"
    clock.advance(2)
    assert join((winner + 2) % 10) == 201, "who never reports keeps no name"


def test_a_node_whose_key_was_revoked_must_join_again(nodes, make_agent, client, admin, context, clock):
    auth = nodes.auth("a")
    nodes.report(make_agent("a"), auth)
    (key,) = rows(context, Role.NODE_KEY)
    assert client.post(f"/api/v1/tokens/{key.token_id}/revoke", headers=admin).status_code == 200
    clock.advance(5)
    assert nodes.report(make_agent("a"), auth)[0].status_code == 200
    assert [row.revoked_at is None for row in rows(context, Role.NODE_KEY)].count(True) == 1


def test_a_node_that_joins_does_not_have_the_tokens_of_all_others_looked_up_again(make_agent, context):
    recent = context.recent_nodes
    until(lambda: recent.times_forgotten == 1)  # The service listens from now on.
    for name in ("a", "b", "c"):
        make_agent(name).sync()
    with context.sessions.begin() as session:
        notify(session, [TOKENS])
    # What was sent is heard in order: this is the last.
    until(lambda: recent.times_forgotten > 1)
    assert recent.times_forgotten == 2


def test_tokens_of_nodes_are_looked_up_again_together_before_they_are_too_old(
    make_agent, client, admin, context, clock
):
    agents = [make_agent(name) for name in ("a", "b", "c")]
    for agent in agents:
        agent.sync()
    gone = next(row for row in rows(context, Role.NODE_KEY) if row.node_id == "c")
    clock.advance(RENEWED_AFTER.total_seconds())
    keys.tick(context)
    clock.advance(RENEWED_AFTER.total_seconds())
    assert client.post(f"/api/v1/tokens/{gone.token_id}/revoke", headers=admin).status_code == 200
    until(lambda: context.recent_nodes.times_forgotten == 2)
    with statements(context) as seen:
        keys.tick(context)
    assert sum("FROM tokens" in statement for statement in seen) == 1, "one statement for all of them"
    clock.advance(FRESH.total_seconds() - 1)
    with statements(context) as seen:
        agents[0].sync()
        agents[1].sync()
    assert not any("FROM tokens" in statement for statement in seen)
    answer = client.post(REPORT, content="{}", headers=agents[2].headers)
    assert answer.status_code == 401


def test_an_expired_join_token_admits_nobody(nodes, make_agent, client, admin, clock):
    short = make_token(client, admin, expires_in_s=60)["token"]
    clock.advance(60)
    assert nodes.report(make_agent("a"), nodes.auth("a", token=short))[0].status_code == 401


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"node_id": "a b", "secret": "s" * 43}, "node_id"),
        ({"node_id": "a", "secret": "short"}, "secret"),
        ({"node_id": "a", "secret": "s" * 43, "more": 1}, "more"),
    ],
)
def test_a_malformed_join_names_the_field(client, settings, body, field):
    answer = client.post("/agent/v1/join", json=body, headers=bearer(settings, "join"))
    assert (answer.status_code, [item["field"] for item in answer.json()["errors"]]) == (422, [field])


def test_an_agent_of_another_version_is_told_so_when_it_joins(client, settings):
    body = {"node_id": "a", "secret": "s" * 43, "protocol_version": 99}
    answer = client.post("/agent/v1/join", json=body, headers=bearer(settings, "join"))
    assert (answer.status_code, answer.json()["code"]) == (409, "protocol-version")


def test_a_key_that_cannot_be_stored_is_an_error_before_anything_is_asked(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(KeyFileError, match="cannot be written"):
        NodeAuth("http://test", node_id="a", join_token="x", run_dir=tmp_path / "file" / "run")
