"""Strikes on one process do not come into each other's way."""

import json
import subprocess
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from agent.supervisor.process import ProcessIdentity, read_start_time
from deploy.local.api import until
from tests.chaos import strikes
from tests.chaos.plan import Action, Strike, Victim
from tests.chaos.strikes import Strikes
from tests.chaos.trail_reader import HELD, hold_file
from tests.chaos.victims import Found, Roles


@dataclass
class OneAgent:
    """A machine whose agent is started again as by a process manager, which takes a moment."""

    process: subprocess.Popen
    starts: int = 0
    full: list[str] = field(default_factory=list)

    def agent_pid(self, node_id: str) -> int | None:
        return self.process.pid if self.process.poll() is None else None

    def restart_agent(self, node_id: str) -> None:
        self.starts += 1
        threading.Event().wait(0.2)
        self.process = sleeper()

    def fill_disk(self, node_id: str) -> None:
        self.full.append(node_id)

    def clear_disk(self, node_id: str) -> None:
        self.full.remove(node_id)


def sleeper() -> subprocess.Popen:
    return subprocess.Popen(["sleep", "30"])


@pytest.mark.parametrize("others", [Action.KILL, Action.FULL])
def test_an_agent_that_two_strikes_have_ended_is_started_again_once(monkeypatch: pytest.MonkeyPatch, others: Action):
    machines: Any = OneAgent(sleeper())
    first = machines.process
    started_at = read_start_time(first.pid)
    assert started_at is not None
    found = Found("node-1", (ProcessIdentity(first.pid, started_at),))
    monkeypatch.setattr(strikes, "find", lambda *_: found)
    planned = tuple(
        Strike(victim, action, after_s=0.0, lasts_s=0.1, back_s=0.05, pick=0.0)
        for victim, action in ((Victim.AGENT, Action.KILL), (Victim.LEAD, others))
    )
    struck = Strikes(machines, Roles("job"), planned)
    struck.begin()
    until("the strikes to be over", 10.0, lambda: struck.over, lambda: None)
    machines.process.kill()
    first.wait(5.0)
    machines.process.wait(5.0)
    assert struck.over and machines.starts == 1 and machines.process is not first


@pytest.mark.parametrize("comes", [True, False])
def test_a_rank_is_struck_while_it_is_held_at_its_probe_or_not_at_all(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, comes: bool
):
    monkeypatch.setattr(strikes, "HELD_S", 30.0 if comes else 2.0)
    (tmp_path / "trail").mkdir()
    rank = sleeper()
    started_at = read_start_time(rank.pid)
    assert started_at is not None
    found = Found("node-1", (ProcessIdentity(rank.pid, started_at),), rank=2)
    monkeypatch.setattr(strikes, "find", lambda *_: found)
    machines: Any = SimpleNamespace(folder=tmp_path)
    strike = Strike(Victim.LEAVER, Action.KILL, after_s=0.0, lasts_s=1.0, back_s=0.0, pick=0.0, point="norm")
    struck = Strikes(machines, Roles("job"), (strike,))
    struck.begin()
    file = hold_file(tmp_path / "trail", rank.pid)
    until("the hold", 5.0, file.exists, lambda: None)
    assert file.read_text() == "norm" and rank.poll() is None
    if comes:
        line = {"at": time.monotonic(), "pid": rank.pid, "event": HELD, "point": "norm"}
        (tmp_path / "trail" / "1.jsonl").write_text(json.dumps(line) + "\n")
    until("the strike to be over", 10.0, lambda: struck.over, lambda: None)
    assert (struck.struck[0].at is not None) is comes is (rank.poll() is not None)
    assert not file.exists()
    rank.kill()
    rank.wait(5.0)
