"""A silence that is the service's own fault does not count against nodes; a loss is still noticed."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import httpx
import pytest
from sqlalchemy import create_engine, text
from sqlalchemy.exc import DBAPIError

from liver_core.handoff.generations import next_start
from service.context import utc_now
from service.settings import ServiceSettings
from service.sync.reading import read_report
from tests.service.conftest import bearer
from tests.service.fake_agent import FakeAgent
from tests.service.reconcilers.conftest import Fleet
from tests.service.test_serve import served

ROUND_S = 3


@contextmanager
def database_away(url) -> Iterator[None]:
    """Every connection to it ends, and no new one is accepted."""
    admin = create_engine(url.set(database="postgres"), isolation_level="AUTOCOMMIT")
    end = text("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = :name")
    with admin.connect() as connection:
        connection.execute(text(f"ALTER DATABASE {url.database} ALLOW_CONNECTIONS false"))
        connection.execute(end, {"name": url.database})
        yield
        connection.execute(text(f"ALTER DATABASE {url.database} ALLOW_CONNECTIONS true"))
    admin.dispose()


def states(fleet: Fleet) -> dict[str, str]:
    return {node["node_id"]: node["state"] for node in fleet.client.get("/api/v1/nodes").json()}


def test_while_the_database_was_away_nobody_was_silent(fleet, database_url):
    """Longer than after which a node is gone. The ranks trained on; one agent is back at once, the others wait."""
    fleet.run()
    with database_away(database_url):
        for _ in range(36):
            fleet.clock.advance(1)
            with pytest.raises(DBAPIError):
                fleet.watch.tick()
    fleet.agents["a"].sync(**fleet.state_of(fleet.agents["a"], trains=True))
    fleet.tick()
    assert set(states(fleet).values()) == {"ready"}
    fleet.clock.advance(4)
    for _ in range(5):
        fleet.round()
    job = fleet.job()
    assert (job["state"], job["active_generation"]) == ("running", 1)


def test_whoever_asks_while_the_database_is_away_is_told_to_come_again(fleet, clock, database_url):
    fleet.run()
    a = fleet.agents["a"]
    with database_away(database_url):
        clock.advance(60)  # So that tokens are looked up.
        answers = [a.post(a.report()), fleet.client.get("/api/v1/jobs")]
    assert [(answer.status_code, answer.headers["Retry-After"]) for answer in answers] == [(503, "2")] * 2
    assert {answer.json()["code"] for answer in answers} == {"unavailable"}
    assert a.post(a.report()).status_code == 200


@pytest.mark.thorough
def test_an_outage_of_a_moment_again_and_again_does_not_count_either(fleet, database_url):
    fleet.run()
    quiet = fleet.agents.pop("d")
    for _ in range(5):
        with database_away(database_url):
            for _ in range(4):
                fleet.clock.advance(1)
                with pytest.raises(DBAPIError):
                    fleet.watch.tick()
        fleet.round(seconds=0)
        assert states(fleet)["d"] == "ready", "it could not be heard meanwhile"
    for _ in range(8):
        fleet.round()
    assert states(fleet)["d"] == "silent", "one that does not come back is noticed"
    fleet.agents["d"] = quiet


@pytest.mark.thorough
def test_a_node_whose_reports_the_service_does_not_take_is_there(fleet, context, monkeypatch):
    fleet.run()
    b = fleet.agents.pop("b")
    monkeypatch.setattr("service.turns.WAIT_S", 0.01)
    context.turns._busy.add("b")  # As if its report before were still being stored.
    for _ in range(36 // ROUND_S):
        assert b.post(b.report()).status_code == 503
        fleet.round(seconds=ROUND_S)
        assert states(fleet)["b"] == "ready"
    for _ in range(36 // ROUND_S):
        fleet.round(seconds=ROUND_S)
    assert states(fleet)["b"] == "gone", "it does not try any more"


@pytest.mark.thorough
def test_while_the_event_loop_stands_still_no_node_is_lost(tmp_path, database, monkeypatch, caplog):
    settings = ServiceSettings(data_dir=tmp_path, silent_after_s=2, gone_after_s=4, reconcile_s=0.1)

    def read(body: bytes):
        if b'"slow"' in body:
            threading.Event().wait(8)
        return read_report(body)

    monkeypatch.setattr("service.sync.endpoints.read_report", read)
    with served(settings, database) as url, httpx.Client(base_url=url, timeout=30) as client:
        a, slow = (FakeAgent(name, client, bearer(settings, "join"), utc_now) for name in ("a", "slow"))
        a.sync()
        assert slow.headers
        stalls = threading.Thread(target=slow.sync)
        stalls.start()
        while stalls.is_alive():
            a.sync()
            stalls.join(0.2)
        a.sync()
        nodes = client.get("/api/v1/nodes", headers=bearer(settings, "operator")).json()
    assert {node["state"] for node in nodes} == {"ready"}
    assert "node a is" not in caplog.text


def eight(fleet: Fleet, **job) -> None:
    """A job, by default on a, b, c and d, and four nodes that are free."""
    fleet.add(*"abcd")
    fleet.submit(**job)
    for _ in range(4):
        fleet.round()
    fleet.add(*"efgh")
    for _ in range(3):
        fleet.round()
    assert fleet.job()["state"] == "running"


def pass_by(fleet: Fleet, seconds: int) -> None:
    for _ in range(seconds // ROUND_S):
        fleet.round(seconds=ROUND_S)


@pytest.mark.thorough
def test_many_nodes_that_fall_silent_together_are_not_lost_before_two_minutes(fleet, caplog):
    eight(fleet)
    for name in "abcd":
        del fleet.agents[name]
    pass_by(fleet, 100)
    nodes = {node["node_id"]: node for node in fleet.client.get("/api/v1/nodes").json()}
    assert {nodes[name]["state"] for name in "abcd"} == {"silent"}
    assert all(nodes[name]["excused_until"] for name in "abcd") and not nodes["e"]["excused_until"]
    assert "4 of 8 nodes fell silent within 10 s: this service may be cut off from them." in caplog.text
    assert fleet.watch.doubt.startswith("4 of 8 nodes")
    assert fleet.job()["active_generation"] == 1
    pass_by(fleet, 30)
    assert fleet.job()["active_generation"] == next_start(1), "it was a loss"
    assert fleet.watch.doubt == ""


@pytest.mark.thorough
def test_many_nodes_that_come_back_are_as_before(fleet):
    eight(fleet)
    away = {name: fleet.agents.pop(name) for name in "abcd"}
    pass_by(fleet, 60)
    fleet.agents |= away
    pass_by(fleet, 9)
    nodes = fleet.client.get("/api/v1/nodes").json()
    assert {(node["state"], node["excused_until"]) for node in nodes} == {("ready", None)}
    assert (fleet.job()["state"], fleet.job()["active_generation"]) == ("running", 1)
    assert fleet.watch.doubt == ""


@pytest.mark.thorough
def test_both_nodes_of_a_small_job_are_missed_as_soon_as_ever(fleet):
    eight(fleet, nodes={"min": 2, "max": 2}, layouts={"pinned": [{"nodes": 2, "layout": "TP2"}]})
    for name in fleet.agents["a"].roster().node_ids():
        del fleet.agents[name]
    pass_by(fleet, 33)
    assert fleet.job()["active_generation"] == next_start(1)


@pytest.mark.thorough
def test_where_another_node_of_the_job_is_heard_many_others_are_lost_as_soon_as_ever(fleet):
    """It says whether their machines answer, and whether its ranks still step."""
    eight(fleet)
    for name in "bcdefgh":
        del fleet.agents[name]
    for _ in range(36 // ROUND_S):
        fleet.round(seconds=ROUND_S, trains=False)
    found = states(fleet)
    assert [found[name] for name in "abcd"] == ["ready", "gone", "gone", "gone"]
    assert [found[name] for name in "efgh"] == ["silent"] * 4, "of free nodes nobody tells"
