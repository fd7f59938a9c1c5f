"""Incidents on the command line: which are asked for, and how early a node was safe."""

import json
from typing import Any

import pytest

pytest.importorskip("typer")

import httpx
from typer.testing import CliRunner

from service.cli.handoffs import slack
from service.cli.main import app

MOVED: dict[str, Any] = {
    "incident_id": 7, "node_id": "n1", "pool": "spot", "kind": "interruption", "outcome": "moved", "lost_steps": 0,
    "outcome_reason": "handed over", "deadline_at": "2026-01-01T12:02:00Z", "first_seen_at": "2026-01-01T12:00:00Z",
    "notice_to_safe_s": 41.5, "pause_s": 0.09, "dollars": 0.0002, "bytes_moved": 10, "jobs": ["gpt"], "channels": [],
    "handoff_ids": [], "decisions": [{"verdict": "move", "reason": "n1 will go"}],
    "costs": {"pause": 0.0002, "lost": 0},
}  # fmt: skip


def test_how_early_a_node_was_safe_is_said_only_once_nothing_needs_it():
    assert slack(MOVED) == "78.5 s before the deadline"
    assert slack(MOVED | {"notice_to_safe_s": 125.0}) == "5 s late"
    for other in ({"outcome": "moving"}, {"deadline_at": None}, {"notice_to_safe_s": None}):
        assert slack(MOVED | other) == "-"


@pytest.mark.parametrize(
    ("options", "query"),
    [(["--failed", "--open"], {"open": "true", "failed": "true"}), (["--node", "n1"], {"node_id": "n1"})],
)
def test_only_what_is_wanted_is_asked_for(monkeypatch, options, query):
    asked: list[httpx.Request] = []

    def answer(request: httpx.Request) -> httpx.Response:
        asked.append(request)
        return httpx.Response(200, json=[MOVED])

    real = httpx.Client

    def client(**given: Any) -> httpx.Client:
        given["transport"] = httpx.MockTransport(answer)
        return real(**given)

    monkeypatch.setattr(httpx, "Client", client)
    done = CliRunner().invoke(app, ["incidents", "list", *options, "--json"], env={"LIVER_TOKEN": "liver_a_b"})
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)[0]["incident_id"] == 7
    sent = dict(asked[0].url.params)
    assert {name: value for name, value in sent.items() if name != "limit"} == query
