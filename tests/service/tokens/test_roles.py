"""What each role may do, what admins do with tokens, and that every change stands in the audit log."""

from datetime import timedelta

import pytest

from service.tokens.tables import Role
from tests.service.conftest import bearer
from tests.service.fake_agent import JOB

READS = ["/api/v1/jobs", "/api/v1/nodes", "/api/v1/notices", "/api/v1/handoffs", "/api/v1/ledger",
         "/api/v1/pools/prices", "/api/v1/audit", "/api/v1/openapi.json"]  # fmt: skip
ACTS = [
    ("POST", "/api/v1/jobs", JOB),
    ("POST", "/api/v1/jobs/x/stop", None),
    ("POST", "/api/v1/jobs/x/checkpoint", None),
    ("POST", "/api/v1/jobs/x/resume", {}),
    ("POST", "/api/v1/jobs/x/rotate-key", None),
    ("POST", "/api/v1/nodes/a/drain", {"in_s": 60}),
    ("POST", "/api/v1/nodes/a/undrain", None),
    ("POST", "/api/v1/notices/1/end", None),
    ("PUT", "/api/v1/pools/p/price", {"price_usd_per_hour": 1.0}),
]
RULES = [
    ("GET", "/api/v1/tokens", None),
    ("POST", "/api/v1/tokens", {"role": "viewer", "name": "x"}),
    ("POST", "/api/v1/tokens/abc/rotate", {}),
    ("POST", "/api/v1/tokens/abc/revoke", None),
]


@pytest.fixture
def admin(settings):
    return bearer(settings, "admin")


@pytest.fixture
def token_of(client, admin):
    def make(role: Role, **more) -> dict:
        answer = client.post("/api/v1/tokens", json={"role": role, "name": f"a {role}"} | more, headers=admin)
        assert answer.status_code == 201, answer.text
        return answer.json()

    return make


def header(token: dict) -> dict[str, str]:
    return {"Authorization": f"Bearer {token['token']}"}


@pytest.mark.parametrize(
    ("role", "acts", "rules"),
    [(Role.VIEWER, False, False), (Role.OPERATOR, True, False), (Role.ADMIN, True, True)],
)
def test_each_role_may_do_what_its_name_says_and_no_more(client, token_of, role, acts, rules):
    headers = header(token_of(role))
    for path in READS:
        assert client.get(path, headers=headers).status_code == 200, path
    for may, requests in ((acts, ACTS), (rules, RULES)):
        for method, path, body in requests:
            answer = client.request(method, path, json=body, headers=headers)
            assert (answer.status_code != 403) is may, f"{method} {path}: {answer.text}"


def test_join_tokens_and_nodes_read_and_change_nothing(client, token_of, make_agent):
    for headers in (header(token_of(Role.JOIN)), make_agent("a").headers):
        for path in READS:
            assert client.get(path, headers=headers).status_code == 403, path
        for method, path, body in (*ACTS, *RULES):
            assert client.request(method, path, json=body, headers=headers).status_code == 403, path


def test_a_node_and_a_person_cannot_join_and_only_a_nodes_key_fetches_tokens(client, token_of, make_agent, admin):
    body = {"node_id": "b", "secret": "s" * 43}
    for headers in (make_agent("a").headers, admin):
        assert client.post("/agent/v1/join", json=body, headers=headers).status_code == 403
        assert client.post("/agent/v1/token", headers=headers).status_code == 403
    assert client.post("/agent/v1/token", headers=header(token_of(Role.JOIN))).status_code == 403


def test_a_token_ends_when_it_was_made_to(client, token_of, clock):
    token = token_of(Role.VIEWER, expires_in_s=60)
    assert client.get("/api/v1/jobs", headers=header(token)).status_code == 200
    clock.advance(60)
    assert client.get("/api/v1/jobs", headers=header(token)).status_code == 401


def test_a_revoked_token_is_useless_at_once_and_no_longer_listed(client, token_of, admin):
    token = token_of(Role.OPERATOR)
    path = f"/api/v1/tokens/{token['token_id']}/revoke"
    assert client.post(path, headers=admin).json()["revoked_at"] is not None
    assert client.get("/api/v1/jobs", headers=header(token)).status_code == 401
    assert client.post(path, headers=admin).status_code == 200
    listed = client.get("/api/v1/tokens", headers=admin).json()
    assert token["token_id"] not in [item["token_id"] for item in listed]
    everything = client.get("/api/v1/tokens", params={"revoked": True}, headers=admin).text
    assert token["token_id"] in everything and token["token"].split("_", 2)[2] not in everything


def test_the_last_admin_cannot_lock_everybody_out(client, token_of, admin, clock):
    admins = [each for each in client.get("/api/v1/tokens", headers=admin).json() if each["role"] == "admin"]
    path = f"/api/v1/tokens/{admins[0]['token_id']}/revoke"
    assert len(admins) == 1
    refused = client.post(path, headers=admin)
    assert refused.status_code == 409 and "create another one first" in refused.json()["detail"]
    token_of(Role.ADMIN, expires_in_s=60)
    clock.advance(61)
    assert client.post(path, headers=admin).status_code == 409, "the other one has ended meanwhile"
    other = token_of(Role.ADMIN)
    assert client.post(path, headers=admin).status_code == 200
    assert client.get("/api/v1/jobs", headers=admin).status_code == 401
    assert client.get("/api/v1/tokens", headers=header(other)).status_code == 200


def test_a_rotated_token_works_for_its_grace_and_the_new_one_lasts_as_long_as_the_old_one_did(
    client, token_of, admin, clock
):
    old = token_of(Role.OPERATOR, expires_in_s=1_000)
    clock.advance(400)
    new = client.post(f"/api/v1/tokens/{old['token_id']}/rotate", json={"grace_s": 60}, headers=admin).json()
    assert (new["role"], new["name"]) == (old["role"], old["name"])
    assert new["expires_at"] == (clock() + timedelta(seconds=1_000)).isoformat().replace("+00:00", "Z")
    for token in (old, new):
        assert client.get("/api/v1/jobs", headers=header(token)).status_code == 200
    clock.advance(60)
    assert client.get("/api/v1/jobs", headers=header(old)).status_code == 401
    assert client.get("/api/v1/jobs", headers=header(new)).status_code == 200
    again = client.post(f"/api/v1/tokens/{old['token_id']}/rotate", json={}, headers=admin)
    assert (again.status_code, "no longer works" in again.json()["detail"]) == (409, True)


@pytest.mark.parametrize(
    ("wanted", "field"),
    [
        ({"role": "node", "name": "x"}, "role"),
        ({"role": "viewer", "name": ""}, "name"),
        ({"role": "viewer", "name": "a\u0000b"}, "name"),
        ({"role": "viewer", "name": "x", "uses": 2}, "uses"),
        ({"role": "join", "name": "x", "uses": 0}, "uses"),
        ({"role": "viewer", "name": "x", "node_id": "a"}, "node_id"),
        ({"role": "viewer", "name": "x", "expires_in_s": -1}, "expires_in_s"),
        ({"role": "viewer", "name": "x", "more": 1}, "more"),
    ],
)
def test_a_token_that_cannot_be_made_is_refused_by_field(client, admin, wanted, field):
    answer = client.post("/api/v1/tokens", json=wanted, headers=admin)
    assert (answer.status_code, [item["field"] for item in answer.json()["errors"]]) == (422, [field])


def test_every_change_stands_in_the_audit_log_with_who_made_it(client, token_of, admin, make_agent):
    operator = header(token_of(Role.OPERATOR))
    make_agent("a").sync()
    job_id = client.post("/api/v1/jobs", json=JOB, headers=operator).json()["job_id"]
    for path, body in ((f"jobs/{job_id}/stop", None), ("nodes/a/drain", {"in_s": 60}), ("nodes/a/undrain", None)):
        assert client.post(f"/api/v1/{path}", json=body, headers=operator).status_code == 200
    client.put("/api/v1/pools/p/price", json={"price_usd_per_hour": 1.5}, headers=operator)
    log = client.get("/api/v1/audit").json()
    assert [(row["actor"], row["action"], row["target"]) for row in log[:5]] == [
        ("a operator", "set_price", "p"),
        ("a operator", "undrain_node", "a"),
        ("a operator", "drain_node", "a"),
        ("a operator", "stop_job", job_id),
        ("a operator", "submit_job", job_id),
    ]
    assert (log[5]["action"], log[5]["target"]) == ("join", "a")
    assert log[0]["detail"] == {"price_usd_per_hour": 1.5}
    only = client.get("/api/v1/audit", params={"target": job_id, "limit": 1})
    rest = client.get(only.links["next"]["url"])
    assert [row["action"] for row in (*only.json(), *rest.json())] == ["stop_job", "submit_job"]


def test_what_was_refused_stands_in_no_audit_log(client, settings):
    before = client.get("/api/v1/audit").json()
    assert client.post("/api/v1/jobs/none/stop").status_code == 404
    assert client.get("/api/v1/audit").json() == before
