"""A job of which no order can be made: the nodes that it shares with others get the orders of those, and it is said."""

import logging

from sqlalchemy import text

from service.reconcilers import jobs
from tests.service.fake_agent import another_job


def test_a_job_without_an_order_is_left_out_of_the_answers_of_its_nodes_alone(
    running, make_agent, grant, client, context, clock, caplog
):
    job_id, a, _ = running
    other = client.post("/api/v1/jobs", json=another_job("other")).json()["job_id"]
    agents = [make_agent(name) for name in ("c", "d", "e")]
    for agent in agents:
        agent.sync()
    clock.advance(3)
    jobs.tick(context)
    spare = agents[-1]
    with context.sessions.begin() as session:
        for name in (job_id, other):
            session.execute(
                text("INSERT INTO job_members VALUES (:name, 'e', 'spare') ON CONFLICT DO NOTHING"), {"name": name}
            )
    grant(job_id, "e")
    grant(other, "e")
    assert {order.job_id for order in spare.sync().jobs} == {job_id, other}

    def spoil(key: str) -> None:
        with context.sessions.begin() as session:
            changed = "UPDATE jobs SET peer_key = :key, orders_seq = nextval('orders_seq') WHERE job_id = :job_id"
            session.execute(text(changed), {"key": key, "job_id": job_id})

    spoil("short")
    with caplog.at_level(logging.ERROR):
        assert [order.job_id for order in spare.sync().jobs] == [other]
        assert a.sync().jobs == ()
    why = "its nodes get no orders, since none can be made: peer_key: must have at least 32 characters"
    assert caplog.messages == [f"job {job_id}: {why}"], "once, not at each answer"
    assert client.get(f"/api/v1/jobs/{job_id}").json()["reason"].startswith(f"{why}; ")
    assert not client.get(f"/api/v1/jobs/{other}").json()["reason"].startswith("its nodes get no orders")
    assert client.get("/readyz").json()["detail"] == "1 jobs get no orders, see `liver jobs list`"

    spoil("k" * 32)
    assert [order.job_id for order in a.sync().jobs] == [job_id]
    assert "no orders" not in client.get(f"/api/v1/jobs/{job_id}").json()["reason"]
    assert client.get("/readyz").json()["detail"] == ""
