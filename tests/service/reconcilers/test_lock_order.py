"""Whoever stores a report locks nodes, then jobs, then the ledger. The watch of nodes does the same: neither waits for
the other in a circle."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor

from sqlalchemy import text
from sqlalchemy.orm import Session, sessionmaker

from tests.service.reconcilers.conftest import Fleet

WITHIN_S = 12.0
ROUND_S = 3.0


def await_a_wait(sessions: sessionmaker[Session]) -> None:
    """Until somebody waits for what another transaction has locked."""
    waits = text(
        "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'"
    )
    deadline = time.monotonic() + WITHIN_S
    while True:
        with sessions() as session:
            if session.scalars(waits).one():
                return
        assert time.monotonic() < deadline, "nobody waits for a lock"
        threading.Event().wait(0.05)


def until_b_is_gone(fleet: Fleet) -> None:
    """Up to the look of the watch that takes node b for gone."""
    fleet.run()
    del fleet.agents["b"]
    for _ in range(int(fleet.context.settings.gone_after_s / ROUND_S)):
        fleet.watch.tick()
        fleet.clock.advance(ROUND_S)
        for agent in fleet.agents.values():
            agent.sync(**fleet.state_of(agent, trains=True))


def test_the_watch_that_takes_a_node_for_gone_waits_for_its_job_before_it_touches_the_ledger(fleet: Fleet):
    until_b_is_gone(fleet)
    with ThreadPoolExecutor(1) as pool:
        with fleet.context.sessions.begin() as session:
            # A report of node a that accounts for b, whose steps it knows: first the job, then b's time.
            session.execute(text("SELECT FROM jobs WHERE job_id = :id FOR NO KEY UPDATE"), {"id": fleet.job_id})
            watched = pool.submit(fleet.watch.tick)
            await_a_wait(fleet.context.sessions)
            of_b = "SELECT interval_id FROM ledger JOIN leases USING (lease_id) WHERE node_id = 'b'"
            assert session.execute(text(f"{of_b} FOR NO KEY UPDATE OF ledger NOWAIT")).all()
        assert watched.result(timeout=WITHIN_S) == 1
    assert {node["node_id"]: node["state"] for node in fleet.client.get("/api/v1/nodes").json()}["b"] == "gone"
