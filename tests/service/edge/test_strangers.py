"""Whoever has no valid token takes nothing from those who have: no turn of a read, and few look-ups."""

from collections.abc import Callable

import pytest
from fastapi.testclient import TestClient

from service.edge import gate
from service.sessions.operations import COOKIE
from service.settings import ServiceSettings
from tests.service.conftest import bearer
from tests.service.sync.test_cost import statements

PER_S = 4
SESSION = "/api/v1/session"


@pytest.fixture
def settings(tmp_path):
    return ServiceSettings(data_dir=tmp_path, reconcilers=False, requests_per_s=PER_S, agent_requests_per_s=PER_S)


@pytest.fixture
def now(monkeypatch) -> list[float]:
    now = [1_000.0]
    monkeypatch.setattr(gate, "monotonic", lambda: now[0])
    return now


def wrong(number: int) -> dict[str, str]:
    return {"Authorization": f"Bearer liver_{number:x}_{'x' * 43}"}


def test_only_a_person_who_is_admitted_waits_for_a_turn(client, context, settings, make_agent, monkeypatch, now):
    begun: list[str] = []
    begin = context.readers.begin

    async def counted(caller: str) -> Callable[[], None]:
        begun.append(caller)
        return await begin(caller)

    monkeypatch.setattr(context.readers, "begin", counted)
    node = make_agent("a")
    node.sync()
    node_token = {"Authorization": node.headers["Authorization"]}
    stranger = TestClient(client.app)
    asked = [
        stranger.get("/api/v1/jobs", headers=headers).status_code
        for headers in ({}, wrong(1), {"Cookie": f"{COOKIE}={'x' * 43}"}, bearer(settings, "join"), node_token)
    ]
    assert (asked, begun) == ([401, 401, 401, 403, 403], [])
    token_id = client.get(SESSION).json()["token_id"]
    assert begun == [token_id]
    while client.get(SESSION).status_code == 200:
        pass
    assert len(begun) == 2 * PER_S, "nor does who has no request left"


@pytest.mark.parametrize("path", ["/api/v1/jobs", "/agent/v1/node"])
def test_tokens_that_nobody_has_are_soon_refused_without_a_look_up_and_others_from_there_are_served(
    client, context, make_agent, now, path
):
    agent = make_agent("a")
    agent.sync()
    assert client.get(SESSION).status_code == 200
    for number in range(2 * PER_S):
        if client.get(path, headers=wrong(number)).status_code == 429:
            break
    with statements(context) as seen:
        refused = client.get(path, headers=wrong(99))
    assert (refused.status_code, refused.headers["retry-after"], seen) == (429, "1", [])
    assert client.get(SESSION).status_code == 200
    agent.sync()
    now[0] += 1.5 / PER_S
    assert [client.get(path, headers=wrong(number)).status_code for number in (1, 2)] == [401, 429]


def test_a_token_that_ended_is_a_strangers_from_then_on(client, settings, now):
    admin = bearer(settings, "admin")
    made = client.post("/api/v1/tokens", json={"role": "viewer", "name": "a"}, headers=admin).json()
    viewer = {"Authorization": f"Bearer {made['token']}"}
    assert client.get(SESSION, headers=viewer).status_code == 200
    assert client.post(f"/api/v1/tokens/{made['token_id']}/revoke", headers=admin).status_code == 200
    answers = [client.get(SESSION, headers=viewer).status_code for _ in range(2 * PER_S + 1)]
    assert answers[0] == 401 and answers[-1] == 429


def test_a_cookie_whose_token_has_no_request_left_is_refused_without_another_look_at_whose_it_is(
    client, context, settings, now
):
    browser = TestClient(client.app)
    token = bearer(settings, "operator")["Authorization"].removeprefix("Bearer ")
    assert browser.post(SESSION, json={"token": token}).status_code == 201
    while browser.get(SESSION).status_code == 200:
        pass
    with statements(context) as seen:
        assert browser.get(SESSION).status_code == 429
    assert seen == []
    now[0] += 1.5 / PER_S
    assert [browser.get(SESSION).status_code for _ in range(2)] == [200, 429]
