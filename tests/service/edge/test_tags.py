"""Answers that the caller has are not sent again, and what somebody else has changed is not overwritten."""

from tests.service.fake_agent import JOB


def test_what_the_caller_has_is_not_sent_again_until_it_changes(client, make_agent):
    job_id = client.post("/api/v1/jobs", json=JOB).json()["job_id"]
    make_agent("a").sync()
    for path in (f"jobs/{job_id}", "nodes/a", "ledger"):
        first = client.get(f"/api/v1/{path}")
        tag = first.headers["etag"]
        for known in (tag, f'"other", W/{tag}', "*"):
            again = client.get(f"/api/v1/{path}", headers={"If-None-Match": known})
            assert (again.status_code, again.content, again.headers["etag"]) == (304, b"", tag)
        assert client.get(f"/api/v1/{path}", headers={"If-None-Match": '"other"'}).content == first.content
    client.post("/api/v1/nodes/a/drain", json={"in_s": 60})
    client.post(f"/api/v1/jobs/{job_id}/stop")
    make_agent("b").sync()
    for path in (f"jobs/{job_id}", "nodes/a"):
        before = client.get(f"/api/v1/{path}").headers["etag"]
        assert client.get(f"/api/v1/{path}", headers={"If-None-Match": before}).status_code == 304
    node = client.get("/api/v1/nodes/a", headers={"If-None-Match": tag})
    assert node.status_code == 200 and node.json()["drained"]


def test_lists_and_refusals_have_no_tag(client):
    assert "etag" not in client.get("/api/v1/jobs").headers
    assert "etag" not in client.get("/api/v1/jobs/none").headers
    assert client.get("/api/v1/jobs/none", headers={"If-None-Match": "*"}).status_code == 404


def test_a_price_that_somebody_else_has_set_meanwhile_is_not_overwritten(client, clock):
    path = "/api/v1/pools/p/price"
    assert client.get(path).status_code == 404
    assert client.put(path, json={"price_usd_per_hour": 9.0}, headers={"If-Match": "*"}).status_code == 412
    assert client.put(path, json={"price_usd_per_hour": 1.0}).status_code == 200
    seen = client.get(path)
    assert seen.json()["price_usd_per_hour"] == 1.0
    clock.advance(1)
    mine = {"If-Match": f'"none.x", {seen.headers["etag"]}'}
    assert client.put(path, json={"price_usd_per_hour": 2.0}, headers=mine).status_code == 200
    late = client.put(path, json={"price_usd_per_hour": 3.0}, headers=mine)
    assert late.status_code == 412 and late.json()["code"] == "precondition-failed"
    assert late.headers["content-type"] == "application/problem+json"
    assert client.get(path).json()["price_usd_per_hour"] == 2.0
    assert [row["detail"]["price_usd_per_hour"] for row in client.get("/api/v1/audit?target=p").json()] == [2.0, 1.0]
