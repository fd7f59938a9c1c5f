"""The command as a process, on a terminal of 80 columns and in a pipe, against a service that agents report to."""

import asyncio
import json
import os
import pty
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID

import httpx
import pytest

from agent.protocol.sync import HandoffMeasures, JobFinished, MetricsRow, SourceState
from agent.protocol.values import HandoffState
from liver_core.handoff import CostParts, Reason, Rung, RungCost
from liver_core.layout import ParallelLayout
from tests.agent.waiting import eventually
from tests.service.cli.conftest import Service
from tests.service.fake_agent import JOB, FakeAgent, mirror, roster, step_row
from tests.tiers import sample

NODES = ("ip-10-0-1-17.us-west-2.compute.internal", "node-b", "node-c", "node-d")
HANDOFF = UUID("2f1c9a52-8f5e-4d6b-9d53-0b6f5c6d7e8f")
REASON = "node-d goes soon; every other member stays, three pipeline stages of four layers each fit what is left"
PARTS = CostParts(0.25, 0.5, 0.1, 0.15)
COST: dict[str, Any] = {
    "lost_s": 1.0,
    "lost_parts": PARTS,
    "rung_costs": (RungCost(Rung.LIVE, PARTS, 1.0, 3, ()), RungCost(Rung.STOP_AND_COPY, PARTS, 1.0, 0, ("pause",))),
}
ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


def now() -> datetime:
    return datetime.now(UTC)


@dataclass
class Fleet:
    """A service with one running job of four nodes, one of which goes; a handoff without it is under way."""

    service: Service
    job_id: str
    agents: dict[str, FakeAgent]

    def command(self, *arguments: str) -> tuple[list[str], dict[str, str]]:
        token = self.service.data_dir / "tokens" / "operator.token"
        environment = {"LIVER_SERVICE_URL": self.service.url, "LIVER_TOKEN_FILE": str(token), "TERM": "xterm"}
        environment |= {"COLUMNS": "80", "LINES": "24"}
        return [sys.executable, "-m", "service.cli.main", *arguments], os.environ | environment

    def piped(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        command, environment = self.command(*arguments)
        return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=50, check=False)

    def on_terminal(self, *arguments: str) -> list[str]:
        """The lines that a terminal would show, without colours."""
        command, environment = self.command(*arguments)
        ours, theirs = pty.openpty()
        process = subprocess.Popen(command, env=environment, stdout=theirs, stderr=theirs)
        os.close(theirs)
        text = _read_to_end(ours)
        assert process.wait(20) == 0, text
        assert "\t" not in text, "what a pipe gets is for no terminal"
        return ESCAPES.sub("", text).replace("\r\n", "\n").splitlines()


def _read_to_end(descriptor: int) -> str:
    parts = []
    with os.fdopen(descriptor, "rb", buffering=0) as source:
        try:
            while part := source.read(4_096):
                parts.append(part)
        except OSError:  # What Linux says when the other end of a terminal is closed.
            pass
    return b"".join(parts).decode()


@pytest.fixture(scope="module")
def fleet(service: Service) -> Iterator[Fleet]:
    def bearer(role: str) -> dict[str, str]:
        return {"Authorization": f"Bearer {(service.data_dir / 'tokens' / f'{role}.token').read_text().strip()}"}

    with httpx.Client(base_url=service.url, timeout=20) as client:
        agents = {name: FakeAgent(name, client, bearer("join"), now, pool="aws-us-west-2a") for name in NODES}
        for agent in agents.values():
            agent.sync()
        answer = client.post("/api/v1/jobs", json=JOB | {"name": "gpt-small"}, headers=bearer("operator"))
        fleet = Fleet(service, answer.json()["job_id"], agents)
        asyncio.run(eventually(lambda: _all_ordered(fleet), "orders for every node", 40.0))
        _train(fleet, 3)
        _hand_over(fleet, HandoffState.STREAMING, {"hello": 0.12, "build": 1.3})
        yield fleet


def _all_ordered(fleet: Fleet) -> bool:
    for agent in fleet.agents.values():
        agent.sync()
    return all(agent.orders and agent.orders.jobs and agent.orders.jobs[0].roster for agent in fleet.agents.values())


def _train(fleet: Fleet, step: int) -> None:
    for agent in fleet.agents.values():
        order = agent.job_order()
        rows = tuple(step_row(fleet.job_id, 1, number, now(), loss=5.0) for number in range(1, step + 1))
        agent.sync(ranks=(agent.rank(order, step=step),), steps=rows)


def _hand_over(fleet: Fleet, state: HandoffState, phases_s: dict[str, float]) -> None:
    leaver, lead = fleet.agents["node-d"], fleet.agents["node-b"]
    leaver.sync(ranks=(leaver.rank(leaver.job_order(), step=3),), notices=(leaver.notice(deadline_s=3_600),))
    source = lead.roster()
    target = roster(fleet.job_id, 2, ParallelLayout(pp=3), *(node for node in source.node_ids() if node != "node-d"))
    attempt = mirror(
        source, target, now(), handoff_id=HANDOFF, state=state, rung=Rung.LIVE, reason=Reason(REASON, "ready"),
        deadline_utc=now() + timedelta(hours=1), measures=HandoffMeasures(phases_s=phases_s, **COST),
    )  # fmt: skip
    lead.sync(ranks=(lead.rank(lead.job_order(), step=3),), handoffs=(attempt,))


LISTS = ("jobs", "nodes", "handoffs", "notices", "prices")


@pytest.mark.parametrize("noun", sample(LISTS, "handoffs"))
def test_every_list_fits_80_columns_and_breaks_no_word(fleet: Fleet, noun: str):
    fleet.piped("prices", "set", "aws-us-west-2a", "12.24")
    lines = fleet.on_terminal(noun, "list")
    assert len(lines) > 1 and max(map(len, lines)) <= 80, lines
    piped = fleet.piped(noun, "list").stdout
    known = {word.strip(",") for word in piped.split()}
    for word in lines[0].split():
        assert word in known, "titles are the same in a pipe"
    text = "\n".join(lines)
    for name in NODES if noun == "nodes" else ():
        assert f"\n{name} " in text, "a node's name is whole"
    if noun == "handoffs":
        assert text.splitlines()[1].startswith("2f1c9a52  ")
        assert "TP2xPP2 -> PP3" in text and "every other member stays" in text
    if noun == "jobs":
        assert f"\n{fleet.job_id[-8:]}  gpt-small" in text


@pytest.mark.parametrize("noun", sample(LISTS, "nodes"))
def test_in_a_pipe_every_list_is_a_table_of_tabs_with_whole_values(fleet: Fleet, noun: str):
    output = fleet.piped(noun, "list").stdout
    rows = [line.split("\t") for line in output.splitlines()]
    assert len({len(row) for row in rows}) == 1
    assert "\x1b" not in output and "  " not in output and not re.search("[─│╭…]", output)
    if noun == "handoffs":
        named = dict(zip(*rows, strict=True))
        assert named["HANDOFF"] == str(HANDOFF) and named["JOB"] == fleet.job_id and named["REASON"] == REASON
        assert named["LAYOUTS"] == "TP2xPP2xDP1 -> TP1xPP3xDP1"
        assert datetime.fromisoformat(named["OPENED"]).tzinfo is not None


def test_a_handoff_is_shown_whole_by_the_beginning_of_its_id(fleet: Fleet):
    lines = fleet.on_terminal("handoffs", "show", "2f1c")
    assert max(map(len, lines)) <= 80
    assert " ".join(" ".join(lines).split()).count(REASON) == 1
    assert any(re.fullmatch(r"build +1\.3 s", line) for line in lines)
    text = " ".join(" ".join(lines).split())
    assert "1 s: building 0.25 s, streaming 0.5 s, pause 0.1 s, after 0.15 s" in text
    assert "live 1 s (measured 3 times), stop_and_copy 1 s (pause guessed)" in text
    assert str(HANDOFF) in fleet.piped("handoffs", "show", str(HANDOFF)[:8].upper()).stdout
    assert fleet.piped("handoffs", "list", "--job", "gpt-small").stdout.count("\n") == 2


def test_a_node_that_will_go_says_when(fleet: Fleet):
    assert any("goes in 60 min" in line or "goes in 59 min" in line for line in fleet.on_terminal("nodes", "list"))


def test_a_node_whose_notices_cannot_be_heard_says_since_when_and_why(fleet: Fleet):
    agent = fleet.agents["node-b"]
    rank = agent.rank(agent.job_order(), step=3)
    agent.watch()
    agent.sync(ranks=(rank,))
    assert any("watching" in line for line in fleet.on_terminal("nodes", "list"))
    agent.watch(state=SourceState.UNKNOWN, reason="/latest/api/token answered 500")
    agent.sync(ranks=(rank,))
    listed = fleet.piped("nodes", "list").stdout
    assert re.search(r"unknown since \d\d:\d\d:\d\d UTC, because /latest/api/token answered 500\t", listed)


def test_a_node_is_drained_until_that_is_undone(fleet: Fleet):
    drained = " ".join(fleet.on_terminal("nodes", "drain", "node-c", "--in", "5min"))
    assert "drained" in drained and ("goes in 5 min" in drained or "goes in 4 min" in drained)
    later = fleet.piped("nodes", "drain", "node-c", "--in", "2h")
    assert later.returncode == 1 and "is drained already" in later.stderr
    assert "drained" not in " ".join(fleet.on_terminal("nodes", "drain", "node-c", "--undo"))
    wrong = fleet.piped("nodes", "drain", "node-c", "--in", "soon")
    assert wrong.returncode == 2 and "--in: must be a number with s, min, h or d behind it" in wrong.stderr
    assert "there is no node 'node-x'" in fleet.piped("nodes", "drain", "node-x").stderr


def test_a_notice_is_ended_by_its_number(fleet: Fleet):
    agent = fleet.agents["node-b"]
    agent.sync(ranks=(agent.rank(agent.job_order(), step=3),), notices=(agent.notice(deadline_s=7_200),))
    listed = fleet.piped("notices", "list", "--node", "node-b").stdout.splitlines()
    number = listed[1].split("\t")[0]
    assert "withdrawn" in fleet.piped("notices", "end", number).stdout
    again = fleet.piped("notices", "end", number)
    assert again.returncode == 1 and "does not count any more" in again.stderr


@pytest.mark.thorough
def test_the_numbers_of_a_job_are_a_table_csv_and_json(fleet: Fleet):
    lead = fleet.agents["node-b"]
    said = [{"loss": 5.0, "learning_rate": 1e-4}, {"loss": None, "learning_rate": 2e-4, "own/score": 0.25}]
    rows = tuple(
        MetricsRow(job_id=fleet.job_id, generation=1, step=step, at_utc=now(), values=values)
        for step, values in enumerate(said, start=1)
    )
    lead.sync(ranks=(lead.rank(lead.job_order(), step=3),), metrics=rows)
    table = [line.split("\t") for line in fleet.piped("jobs", "metrics", "gpt-small").stdout.splitlines()]
    assert table == [
        ["STEP", "loss", "learning_rate", "own/score"],
        ["1", "5", "0.0001", "-"],
        ["2", "nan", "0.0002", "0.25"],
    ]
    written = fleet.piped("jobs", "metrics", "gpt-small", "--csv").stdout.splitlines()
    head, first, second = (line.split(",") for line in written)
    assert head == ["step", "generation", "at", "loss", "learning_rate", "own/score"]
    assert (first[:2], first[3:]) == (["1", "1"], ["5.0", "0.0001", ""])
    assert second[3:] == ["", "0.0002", "0.25"]
    named = fleet.piped("jobs", "metrics", "gpt-small", "--name", "own/score", "--json")
    assert [item["values"] for item in json.loads(named.stdout)] == [{"own/score": 0.25}]
    both = fleet.piped("jobs", "metrics", "gpt-small", "--csv", "--json")
    assert (both.returncode, both.stderr) == (2, "error: --csv, --json: give one of them\n")
    assert "name.0" in fleet.piped("jobs", "metrics", "gpt-small", "--name", "a b").stderr


@pytest.mark.thorough
def test_a_job_that_fails_ends_its_watch_with_a_status_of_1_on_terminal_and_in_a_pipe(fleet: Fleet):
    lead = fleet.agents["node-b"]
    failed = JobFinished(
        job_id=fleet.job_id, generation=1, step=3, failed=Reason("the loss is not a number", "training")
    )
    lead.sync(ranks=(lead.rank(lead.job_order(), step=3),), finished=(failed,))
    ended = fleet.piped("jobs", "watch", "gpt-small")
    assert ended.returncode == 1
    lines = ended.stdout.splitlines()
    assert lines[0] == "job      failed: the loss is not a number"
    assert lines[1].startswith("handoff  2f1c9a52 TP2xPP2 -> PP3 streaming (notice, live)")
    assert lines[2].startswith("step     3 of 1000 (0 %), loss 5.0000, 0.5 s a step")
    command, environment = fleet.command("jobs", "watch", "gpt-small")
    ours, theirs = pty.openpty()
    with subprocess.Popen(command, env=environment, stdout=theirs, stderr=theirs) as process:
        os.close(theirs)
        text = ESCAPES.sub("", _read_to_end(ours))
    assert process.returncode == 1
    assert "job      failed: the loss is not a number" in text
    assert max(len(line) for line in text.replace("\r", "\n").splitlines()) <= 80
