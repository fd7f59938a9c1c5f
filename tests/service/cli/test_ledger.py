"""`liver ledger` against the service's own API: what it shows, and that it finds where log and ledger differ."""

import json
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("typer")

from typer.testing import CliRunner

from service.cli.main import app
from tests.service.fake_agent import step_row


class Api:
    """What `connect` gives, over the client of the tests."""

    def __init__(self, client: Any) -> None:
        self._client = client

    def get(self, path: str, **params: Any) -> Any:
        answer = self._client.get(path, params={name: value for name, value in params.items() if value is not None})
        assert answer.status_code == 200, answer.text
        return answer.json()

    def listed(self, path: str, *, limit: int, every: bool = False, **params: Any) -> Any:
        return self.get(path, **params)


@pytest.fixture
def liver(client, monkeypatch):
    """Runs one `liver ledger` command."""
    monkeypatch.setattr("service.cli.ledger.connect", lambda *_: Api(client))
    monkeypatch.setattr("service.cli.ledger.find_job", lambda _, job_id: job_id)
    return lambda *arguments: CliRunner().invoke(app, ["ledger", *arguments], env={"COLUMNS": "160"})


@pytest.fixture
def trained(running, clock, tmp_path) -> tuple[str, Path]:
    """A job that has made twenty steps, and what one of its ranks wrote of them."""
    job_id, *agents = running
    clock.advance(3)
    lines = []
    for step in range(1, 21):
        clock.advance(0.75)
        row = step_row(job_id, 1, step, clock()).model_copy(update={"seconds": 0.7})
        lines.append(f"step {step} generation 1 loss 0.691234 0.700 s at {clock().isoformat()}\n")
        for agent in agents:
            agent.sync(ranks=(agent.rank(agent.job_order(), step=step),), steps=(row,))
    log = tmp_path / "rank-0.log"
    log.write_text("".join(lines))
    return job_id, log


def test_log_and_ledger_of_the_same_steps_agree(trained, liver):
    job_id, log = trained
    done = liver("check", job_id, "--log", str(log))
    assert done.exit_code == 0, done.output
    assert "differs by 0.000 %, at most 0.5 % is allowed: they agree" in done.stdout
    found = json.loads(liver("check", job_id, "--log", str(log), "--json").stdout)
    assert found["generations"][0]["log_s"] == pytest.approx(2 * (0.7 + 19 * 0.75))
    assert found["goodput_by_log"] == pytest.approx(found["goodput_by_ledger"])


@pytest.mark.thorough
def test_a_log_that_says_otherwise_is_status_1_and_the_generation_is_named(trained, liver):
    job_id, log = trained
    log.write_text("".join(log.read_text().splitlines(keepends=True)[:-1]))
    done = liver("check", job_id, "--log", str(log))
    assert done.exit_code == 1
    assert "1\t2\t19\t28.400 s\t29.900 s\t+1.500 s" in done.stdout
    assert "differs by 5.282 %" in done.stdout and "they do not agree" in done.stdout


def test_a_log_without_steps_is_refused_by_name(trained, liver, tmp_path):
    job_id, _ = trained
    empty = tmp_path / "empty.log"
    empty.write_text("hello\n")
    assert "names no step" in liver("check", job_id, "--log", str(empty)).stderr
    assert "cannot read" in liver("check", job_id, "--log", str(tmp_path / "none")).stderr


def test_the_ledger_is_shown_with_its_price_and_what_restarts_would_have_cost(trained, client, clock, liver):
    job_id, _ = trained
    plain = liver("show").stdout
    assert "productive\t29.9 s" in plain and "without a price" in plain and "restarts" not in plain
    since = (clock() - timedelta(days=1)).isoformat()
    price = {"price_usd_per_hour": 3600, "effective_from": since, "egress_usd_per_gb": 0.02}
    assert client.put("/api/v1/pools/spot-a/price", json=price).status_code == 200
    shown = liver("show", "--job", job_id).stdout
    assert "productive\t29.9 s" in shown and "29.90" in shown and "without a price" not in shown
    assert "no estimate yet: this job has not been seen to complete a checkpoint" in shown
    assert "0 B, 0.00 USD" in shown
