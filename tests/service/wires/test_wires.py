"""Wires as agents measured them: stored once for each pair, told with what a move would take, and only by who may."""

from datetime import timedelta
from typing import Any

import pytest
from sqlalchemy import select

from agent.protocol.wires import WireFact, WireKind, WireSpeed
from service.cli import wires as cli
from service.jobs.tables import JobRow, JobState
from service.wires.estimate import move_estimate
from service.wires.operations import KEPT
from service.wires.tables import WireRow

RELAY = WireSpeed(wire=WireKind.RELAY, bytes_per_s=100e6, latency_s=2e-4, refused=("b is on another machine",))
GLOO = WireSpeed(wire=WireKind.GLOO, bytes_per_s=50e6, latency_s=1e-3)


@pytest.fixture
def fact(running, clock):
    job_id, _, _ = running

    def make(source: str, target: str, speed: WireSpeed | None = RELAY, **more: Any) -> WireFact:
        return WireFact(job_id=job_id, source=source, target=target, speed=speed, measured_utc=clock(), **more)

    return make


def test_a_job_shows_its_wires_and_what_a_move_takes(running, client, fact, clock):
    job_id, a, b = running
    path = f"/api/v1/jobs/{job_id}/wires"
    before = client.get(path).json()
    assert (before["wires"], before["move_s"], before["live"]) == ([], None, None) and before["nodes"] == ["a", "b"]
    assert a.sync(wires=(fact("b", "a"),)).refusals == ()
    assert b.sync(wires=(fact("a", "b", GLOO),)).refusals == ()
    found = client.get(path).json()
    assert [(each["source"], each["target"], each["wire"], each["live"]) for each in found["wires"]] == [
        ("b", "a", "relay", True),
        ("a", "b", "gloo", False),
    ]
    assert found["wires"][0]["refused"] == ["b is on another machine"]
    assert found["live"] is False and found["move_s"] == pytest.approx(found["state_bytes"] / (2 * 75e6))
    clock.advance(60)
    b.sync(wires=(fact("a", "b"),))
    a.sync(wires=(fact("b", "a", None, failed="b did not answer"),))
    found = client.get(path).json()
    assert [(each["wire"], each["bytes_per_s"], each["failed"]) for each in found["wires"]] == [
        ("relay", 100e6, "b did not answer"),
        ("relay", 100e6, ""),
    ], "a failure leaves the last figures"
    assert found["live"] is True and found["move_s"] == pytest.approx(found["state_bytes"] / (2 * 100e6))


def test_a_node_tells_only_what_it_reads_itself_of_nodes_of_the_job(running, fact, client):
    job_id, a, _ = running
    refusals = a.sync(wires=(fact("a", "b"), fact("a", "a"), fact("stranger", "a"))).refusals
    assert {(each.part, each.key, each.reason) for each in refusals} == {
        ("wires", f"{job_id}/a/b", "agent of a reports what it reads of others"),
        ("wires", f"{job_id}/a/a", "agent of a reports what it reads of others"),
        ("wires", f"{job_id}/stranger/a", "node stranger has no part in this job"),
    }
    assert client.get(f"/api/v1/jobs/{job_id}/wires").json()["wires"] == []
    assert client.get("/api/v1/jobs/no-such-job/wires").status_code == 404


def test_a_job_that_does_not_run_has_no_wires(running, fact, client, context, monkeypatch, capsys):
    job_id, a, _ = running
    a.sync(wires=(fact("b", "a"),))
    with context.sessions.begin() as session:
        job = session.get(JobRow, job_id)
        assert job is not None
        job.state = JobState.STOPPED
    found = client.get(f"/api/v1/jobs/{job_id}/wires").json()
    assert (found["nodes"], found["wires"], found["move_s"], found["live"]) == ([], [], None, None)
    _command(client, monkeypatch, job_id)
    assert "the job does not run" in capsys.readouterr().out


def test_of_each_node_the_newest_wire_counts(running, fact, client, make_agent, clock):
    job_id, a, b = running
    b.sync(wires=(fact("a", "b", GLOO),))
    clock.advance(3_600)
    a.sync(wires=(fact("b", "a"),))
    rows = client.get(f"/api/v1/jobs/{job_id}/wires").json()["wires"]
    assert {(each["source"], each["target"]) for each in rows} == {("a", "b"), ("b", "a")}
    b.sync(wires=(fact("a", "b", None, failed="gone"),))
    assert client.get(f"/api/v1/jobs/{job_id}/wires").json()["live"] is False, "the last that is known of it"


def test_what_is_old_goes_and_a_time_ahead_is_now(running, fact, context, clock):
    _, a, b = running
    a.sync(wires=(fact("b", "a"),))
    clock.advance(KEPT / timedelta(seconds=1) + 10)
    b.sync(wires=(fact("a", "b").model_copy(update={"measured_utc": clock() + timedelta(days=2)}),))
    with context.sessions() as session:
        rows = session.scalars(select(WireRow)).all()
    assert [(row.source, row.measured_at <= clock()) for row in rows] == [("a", True)]


@pytest.mark.parametrize(
    ("measured", "seconds", "is_live"),
    [
        ([], None, None),
        ([(WireKind.RELAY, 100.0)], 5.0, True),
        ([(WireKind.RELAY, 100.0), (WireKind.NIXL, 300.0), (WireKind.RELAY, 50.0)], 5.0, True),
        ([(WireKind.RELAY, 100.0), (WireKind.GLOO, 100.0)], 5.0, False),
        ([(WireKind.RELAY, 0.0)], None, True),
        ([(WireKind.RELAY, 100.0), (None, 0.0)], 5.0, False),
    ],
)
def test_a_move_takes_what_its_bytes_take_over_the_usual_wire_of_each_node(measured, seconds, is_live):
    assert move_estimate(1_000.0, 2, measured)[1:] == (seconds, is_live)


def _command(client, monkeypatch, job_id: str) -> None:
    """`liver jobs wires`, asking this client."""

    class Answers:
        def get(self, path: str) -> Any:
            return client.get(path).json()

    monkeypatch.setattr(cli, "connect", lambda *_: Answers())
    monkeypatch.setattr(cli, "find_job", lambda _, name: name)
    cli.wires(job_id)


def test_the_command_says_it_in_a_table(running, fact, client, monkeypatch, capsys):
    job_id, a, _ = running
    _command(client, monkeypatch, job_id)
    assert "nothing measured: agents measure" in capsys.readouterr().out
    a.sync(wires=(fact("b", "a"),))
    cli.wires(job_id)
    said = " ".join(capsys.readouterr().out.split())
    for part in (
        "b a relay 100 MB 0.2 ms",
        "b is on another machine",
        "while the job trains, from every node to one other",
    ):
        assert part in said, said
