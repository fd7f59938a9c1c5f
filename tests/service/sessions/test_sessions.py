"""Browser sessions: a cookie does what its token may, ends with it, and does nothing that another site asks for."""

from urllib.parse import quote

import pytest
from fastapi.testclient import TestClient

from service.app import create_app
from service.reconcilers import upkeep
from service.sessions.operations import COOKIE, OF_A_TOKEN_MAX
from tests.service.conftest import bearer
from tests.service.fake_agent import JOB

PATH = "/api/v1/session"
CONSOLE = {"Liver-Console": "1"}


@pytest.fixture
def admin(settings):
    return bearer(settings, "admin")


@pytest.fixture
def token_of(client, admin):
    def make(role: str, **more) -> dict:
        return client.post("/api/v1/tokens", json={"role": role, "name": f"a {role}"} | more, headers=admin).json()

    return make


@pytest.fixture
def browser(client):
    """Another client of the same service, which sends no token."""
    return TestClient(client.app)


def log_in(browser, token: dict) -> str:
    answer = browser.post(PATH, json={"token": token["token"]})
    assert answer.status_code == 201, answer.text
    assert answer.json()["token_id"] == token["token_id"]
    return browser.cookies[COOKIE]


def test_a_cookie_is_kept_from_scripts_and_other_sites_and_has_no_part_of_the_token(browser, token_of):
    token = token_of("viewer")
    answer = browser.post(PATH, json={"token": token["token"]})
    cookie = answer.headers["set-cookie"]
    assert "HttpOnly" in cookie and "SameSite=strict" in cookie and "Path=/" in cookie
    assert token["token"].split("_", 2)[2] not in cookie and token["token_id"] not in cookie
    assert (
        "Secure"
        in TestClient(browser.app, base_url="https://x")
        .post(PATH, json={"token": token["token"]})
        .headers["set-cookie"]
    )


@pytest.mark.parametrize("role", ["viewer", "operator", "admin"])
def test_a_cookie_does_what_its_token_may_and_no_more(browser, token_of, role):
    assert browser.get(PATH).status_code == 401
    log_in(browser, token_of(role))
    assert browser.get(PATH).json()["role"] == role
    assert browser.get("/api/v1/jobs").status_code == 200
    assert (browser.post("/api/v1/jobs", json=JOB, headers=CONSOLE).status_code == 201) is (role != "viewer")
    assert (browser.get("/api/v1/tokens").status_code == 200) is (role == "admin")
    assert browser.post("/agent/v1/token", headers=CONSOLE).status_code == 401


def test_a_change_that_another_site_may_have_asked_for_is_refused(client, browser, token_of):
    log_in(browser, token_of("operator"))
    for headers in (
        {},
        {"Liver-Console": "0"},
        *(CONSOLE | {"Sec-Fetch-Site": site} for site in ("cross-site", "none")),
    ):
        answer = browser.post("/api/v1/jobs", json=JOB, headers=headers)
        assert (answer.status_code, answer.json()["code"]) == (403, "forbidden")
        assert browser.delete(PATH, headers=headers).status_code == 403
    assert client.get("/api/v1/jobs").json() == []


def test_wrong_tokens_and_those_of_agents_do_not_log_in(browser, settings):
    assert browser.post(PATH, json={"token": "liver_ab_x"}).status_code == 401
    agent = bearer(settings, "join")["Authorization"].removeprefix("Bearer ")
    answer = browser.post(PATH, json={"token": agent})
    assert answer.status_code == 403 and "is for agents" in answer.json()["detail"]
    assert COOKIE not in browser.cookies
    browser.cookies.set(COOKIE, "x" * 43)
    assert browser.get("/api/v1/jobs").status_code == 401


def test_a_session_ends_with_its_token_its_time_and_a_logout(browser, token_of, client, admin, clock, settings):
    short, revoked, long = token_of("viewer", expires_in_s=60), token_of("viewer"), token_of("operator")
    cookies = {}
    for name, token in {"short": short, "revoked": revoked, "long": long, "ended": long}.items():
        browser.cookies.clear()
        cookies[name] = log_in(browser, token)

    def works(name: str) -> bool:
        browser.cookies.clear()
        browser.cookies.set(COOKIE, cookies[name])
        return browser.get("/api/v1/jobs").status_code == 200

    assert all(works(name) for name in cookies)
    client.post(f"/api/v1/tokens/{revoked['token_id']}/revoke", headers=admin)
    works("ended")
    assert browser.delete(PATH, headers=CONSOLE).status_code == 204
    assert [name for name in cookies if works(name)] == ["short", "long"]
    clock.advance(60)
    assert [name for name in cookies if works(name)] == ["long"]
    clock.advance(settings.session_s)
    assert [name for name in cookies if works(name)] == []
    assert upkeep.tick(client.app.state.context) >= 3


def test_a_session_outlives_the_service_that_began_it(browser, token_of, settings, clock, database):
    log_in(browser, token_of("viewer"))
    with TestClient(create_app(settings, clock=clock, database=database), cookies=dict(browser.cookies)) as other:
        assert other.get(PATH).json()["role"] == "viewer"


def test_a_login_and_a_logout_stand_in_the_audit_log(client, browser, token_of):
    token = token_of("viewer")
    log_in(browser, token)
    assert browser.delete(PATH, headers=CONSOLE).status_code == 204
    log = client.get("/api/v1/audit", params={"target": token["token_id"]}).json()
    assert [(row["actor"], row["action"]) for row in log[:2]] == [
        ("a viewer", "end_session"),
        ("a viewer", "begin_session"),
    ]


def test_one_session_too_many_ends_the_oldest(browser, token_of, clock):
    token, cookies = token_of("viewer"), []
    for _ in range(OF_A_TOKEN_MAX + 1):
        browser.cookies.clear()
        clock.advance(1)
        cookies.append(log_in(browser, token))
    works = []
    for cookie in (cookies[0], cookies[1], cookies[-1]):
        browser.cookies.clear()
        browser.cookies.set(COOKIE, cookie)
        works.append(browser.get(PATH).status_code == 200)
    assert works == [False, True, True]


def test_why_somebody_asks_for_a_change_stands_in_the_audit_log(client):
    why = "Grünes Licht, 10 % teurer"
    assert client.post("/api/v1/jobs", json=JOB, headers={"Liver-Reason": quote(why)}).status_code == 201
    assert client.get("/api/v1/audit").json()[0]["detail"]["why"] == why
    for wrong in ("%00", "%ff", "x" * 501):
        answer = client.post("/api/v1/jobs", json=JOB, headers={"Liver-Reason": wrong})
        assert (answer.status_code, answer.json()["errors"][0]["field"]) == (422, "Liver-Reason")
