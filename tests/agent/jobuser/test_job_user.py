"""A job's code under --job-user: real agents that are root, real ranks that are not, and everything they try is refused
while the job trains, writes checkpoints and is handed over live."""

from __future__ import annotations

import json
import os
import pwd
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from secrets import token_hex
from typing import Any

import pytest

from agent.protocol.jobfile import JobFile
from agent.protocol.values import HandoffState
from liver_core.handoff import Decision, Rung
from service.db.embedded import EmbeddedServer
from tests.agent.cluster import REAL_RANKS, ROOT, Cluster, Start, cluster
from tests.agent.jobuser.probes import CANARY
from tests.agent.waiting import quick_directory, real_job
from tests.cluster.real_ranks_model import build_corpus

pytestmark = [pytest.mark.thorough, pytest.mark.real, pytest.mark.timeout(300)]


@pytest.fixture
def place(job_user: pwd.struct_passwd) -> Iterator[Path]:
    """A folder that the user may read, with one for what the job writes."""
    path = quick_directory()
    path.chmod(0o755)
    (path / "written").mkdir()
    os.chown(path / "written", job_user.pw_uid, job_user.pw_gid)
    yield path
    shutil.rmtree(path)


@pytest.fixture
def database(tmp_path: Path) -> Iterator[Path]:
    server = EmbeddedServer(tmp_path)
    yield server.pgdata
    server.close()


def test_what_a_job_tries_on_its_agent_is_refused_while_it_trains_and_is_handed_over(
    job_user: pwd.struct_passwd, through: tuple[str, ...], place: Path, database: Path
) -> None:
    a, b, c = (f"{name}-{token_hex(3)}" for name in "abc")
    job = probing_job(place, database, (a, b))
    secret = (("LIVER_TOKEN", CANARY), ("SOME_PASSWORD", CANARY), ("NCCL_DEBUG", "WARN"))
    start = Start(through, ("--job-user", job_user.pw_name), secret)
    with cluster(a, b, spares=(c,), job=job, ranks=REAL_RANKS, start=start) as nodes:
        nodes.service.spares = (c,)
        found = nodes.wait(lambda: findings(place, 2), "what two ranks found", 120)
        as_root = probe_as_root(a, database)
        nodes.wait(lambda: (1, 3) in nodes.service.steps, "three steps", 60)
        nodes.announce(b)
        done = nodes.wait_handoff(HandoffState.ACTIVE)
        nodes.wait_training(2, (a, c))
        checkpoint = nodes.wait(lambda: nodes.service.checkpoints, "a checkpoint")[-1]

        assert (done.rung, done.decision) == (Rung.LIVE, Decision.GO), done.model_dump_json()
        assert done.target.node_ids() == (a, c) and done.measures.certificate, "the state was certified"
        assert Path(checkpoint.path).stat().st_uid == job_user.pw_uid
        assert not nodes.service.failed
        for rank in found:
            for node, tried in rank["tried"].items():
                others = {name: how for name, how in tried.items() if not how.startswith("refused: ")}
                assert not others, f"on {node}"
            check_rank(rank["me"], job_user, nodes)
        assert {name: how for name, how in as_root.items() if not how.startswith("done: ")} == {}, (
            "a try that never works"
        )
        assert as_root.keys() >= {"read the token", "read the journal", "trace the agent", "connect to z.sock"}
        assert all(node.job_user == job_user.pw_name for node in nodes.service.nodes.values())
        rank = nodes.rank(a)
        assert rank is not None and owner_of(rank.pid) == job_user.pw_uid
        nodes.agents[a].terminate()
        assert nodes.agents.pop(a).wait(30) == 0
    assert owner_of(rank.pid) is None, "an agent that is root ends the ranks of the user"


def check_rank(me: dict[str, Any], job_user: pwd.struct_passwd, nodes: Cluster) -> None:
    assert set(me["ids"][:3]) == {job_user.pw_uid} and set(me["ids"][3:]) == {job_user.pw_gid}
    assert me["capabilities"] == [0, 0, 0, 0]
    assert me["no_new_privileges"] == "1"
    assert CANARY not in me["first_environment"] and CANARY not in me["environment"].values()
    assert not [name for name in me["environment"] if name.startswith("LIVER_")]
    assert me["environment"]["NCCL_DEBUG"] == "WARN"
    assert Path(me["environment"]["HOME"]).stat().st_uid == job_user.pw_uid
    inside = {path for path in me["files"] if path.startswith(str(nodes.directory))}
    assert all(path.endswith(".log") and "/logs/" in path for path in inside), inside
    assert me["says"].startswith("done: ")


def probing_job(place: Path, database: Path, nodes: tuple[str, ...]) -> JobFile:
    args = {"data_prefix": build_corpus(place / "written"), "micro_batch_s": 0.05, "nodes": list(nodes)}
    args |= {"findings": str(place / "written"), "database": str(database)}
    checkpoint = {"path": str(place / "written" / "checkpoints"), "every_steps": 5}
    job = real_job("probing", "SlowJob", args, global_batch=8, micro_batch=2, checkpoint=checkpoint)
    return job.model_copy(update={"entrypoint": "tests.agent.jobuser.probing_job:ProbingJob"})


def findings(place: Path, ranks: int) -> list[dict[str, Any]]:
    found = [json.loads(path.read_text()) for path in (place / "written").glob("*.json")]
    return found if len(found) == ranks else []


def probe_as_root(node_id: str, database: Path) -> dict[str, str]:
    command = [sys.executable, "-m", "tests.agent.jobuser.probes", node_id, str(database)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=90)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def owner_of(pid: int) -> int | None:
    try:
        return os.stat(f"/proc/{pid}").st_uid
    except FileNotFoundError:
        return None
