"""Worlds that the service starts, stops and suspends, across real agent processes with fake ranks."""

import os
import signal
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from agent.protocol.jobfile import JobFile
from agent.protocol.sources import SourceCheckpoint
from agent.protocol.sync import DesiredState
from agent.protocol.values import HandoffState
from liver_core.handoff.generations import next_start
from tests.agent.cluster import Cluster, Start, cluster
from tests.agent.fake_rank import write_checkpoint
from tests.agent.waiting import fake_job

pytestmark = [pytest.mark.timeout(180), pytest.mark.real]


def wait_ended(nodes: Cluster, *names: str) -> None:
    nodes.wait(lambda: all(nodes.rank(name) is None for name in names), f"the end of the ranks of {names}")


def checkpoint_in(nodes: Cluster, step: int) -> SourceCheckpoint:
    path = nodes.directory / "checkpoint"
    write_checkpoint(path, step)
    return SourceCheckpoint(path=str(path), step=step)


def test_a_suspended_job_writes_a_checkpoint_and_comes_back_from_it_on_other_nodes() -> None:
    with cluster("a", "b", spares=("c",)) as nodes:
        nodes.wait_training(1, ("a", "b"))
        nodes.service.told.add("c")
        nodes.service.desired = DesiredState.SUSPENDED
        path = nodes.wait(lambda: nodes.service.checkpoints, "the checkpoint")[0].path
        assert "/checkpoints/step-" in path
        wait_ended(nodes, "a", "b")
        write_checkpoint(Path(path), 1_000)
        nodes.service.restart(("c", "b"), SourceCheckpoint(path=path, step=1_000))
        started = next_start(1)
        nodes.wait_training(started, ("b", "c"))
        assert min(step for generation, step in nodes.service.steps if generation == started) == 1_001
        assert nodes.service.failed == []


@pytest.mark.thorough
def test_ranks_end_with_a_checkpoint_at_the_time_that_the_service_named_before_it_went_away() -> None:
    with cluster("a", "b") as nodes:
        nodes.wait_training(1, ("a", "b"))
        nodes.service.suspends_utc = datetime.now(UTC) + timedelta(seconds=6)
        journals = [nodes.directory / name / "journal.jsonl" for name in "ab"]
        nodes.wait(lambda: all('"suspends_utc":"2' in path.read_text() for path in journals), "the orders")
        ranks = [rank.pid for name in "ab" if (rank := nodes.rank(name)) is not None]
        nodes.service.stop()
        nodes.wait(lambda: not any(Path(f"/proc/{pid}").exists() for pid in ranks), "the end of the ranks")
        assert datetime.now(UTC) >= nodes.service.suspends_utc
        nodes.service.start()
        assert "/checkpoints/step-" in nodes.wait(lambda: nodes.service.checkpoints, "the checkpoint")[0].path
        assert nodes.service.failed == [], "nobody misses them"


@pytest.mark.thorough
def test_where_nothing_fits_and_the_service_is_away_the_agents_end_all_ranks_with_a_checkpoint_and_tell_it_later() -> (
    None
):
    with cluster("a", "b") as nodes:
        nodes.service.fits_least = 2
        nodes.wait_training(1, ("a", "b"))
        journals = [nodes.directory / name / "journal.jsonl" for name in "ab"]
        nodes.wait(lambda: all('"target":null' in path.read_text() for path in journals), "the plans")
        ranks = [rank.pid for name in "ab" if (rank := nodes.rank(name)) is not None]
        nodes.service.stop()
        nodes.announce("b", ends_in_s=90.0)
        nodes.wait(lambda: not any(Path(f"/proc/{pid}").exists() for pid in ranks), "the end of the ranks")
        assert "b will go, and standing plan" in nodes.log_of("a") and "begins at" in nodes.log_of("b")
        nodes.service.start()
        failed = nodes.wait(lambda: {rank.rank: rank for rank in nodes.service.failed}.keys() == {0, 1}, "both ranks")
        assert failed and "/checkpoints/step-" in nodes.service.checkpoints[0].path
        reason = nodes.service.failed[0].reason
        assert reason is not None and reason.text.endswith("one node less; the service is not heard")
        nodes.service.fits_least, nodes.service.suspends_utc = 1, None
        nodes.service.restart(("a",), checkpoint_in(nodes, 10))
        nodes.wait_training(next_start(1), ("a",))


@pytest.mark.thorough
def test_a_rank_that_dies_in_a_world_unknown_to_the_service_is_not_started_in_the_world_before_it() -> None:
    """The number of that world is used, and the job has stepped beyond it."""
    with cluster("a", "b", "c") as nodes:
        nodes.wait_training(1, ("a", "b", "c"))
        victim = nodes.rank("b")
        assert victim is not None
        nodes.service.stop()
        nodes.announce("c")
        nodes.wait(lambda: "ended active" in nodes.log_of("a"), "the handoff without the service")
        os.kill(victim.pid, signal.SIGKILL)
        nodes.wait(lambda: "was killed by SIGKILL" in nodes.log_of("b"), "the death of the rank")
        nodes.service.start()
        nodes.wait_handoff(HandoffState.ACTIVE)
        failed = nodes.wait(lambda: nodes.service.failed, "the lost rank")[0]
        assert (failed.rank, failed.generation) == (1, 2)
        assert nodes.log_of("b").count("starting rank") == nodes.log_of("a").count("starting rank") == 1


@pytest.mark.thorough
def test_a_checkpoint_restart_replaces_a_world_that_lost_a_rank() -> None:
    with cluster("a", "b", faults={"b": "dies_training"}) as nodes:
        failed = nodes.wait(lambda: nodes.service.failed, "the lost rank")[0]
        assert failed.reason is not None and "planted: device lost" in failed.reason.text
        nodes.service.restart(("a",), checkpoint_in(nodes, 10))
        nodes.wait_training(next_start(1), ("a",))
        nodes.wait(lambda: nodes.rank("b") is None, "the lost rank to be forgotten")


@pytest.mark.thorough
def test_a_job_that_fails_by_its_own_fault_is_reported_as_failed_and_its_ranks_are_not_missed() -> None:
    with cluster("a", "b", faults={"b": "fails"}) as nodes:
        cause = nodes.wait(lambda: nodes.service.causes, "the failure")[0]
        assert (cause.text, cause.rank) == ("planted: the loss is nan", 1)
        nodes.service.desired = DesiredState.STOP
        wait_ended(nodes, "a", "b")
        assert nodes.service.failed == []


def test_a_request_for_a_checkpoint_reaches_every_rank_and_its_answer_names_it() -> None:
    with cluster("a", "b") as nodes:
        nodes.wait_training(1, ("a", "b"))
        nodes.service.checkpoint_asked = 1
        first = nodes.wait(lambda: nodes.service.checkpoints, "the checkpoint")[0]
        assert (first.asked, first.path) == (1, str(nodes.directory / "checkpoints" / f"step-{first.step:09d}"))
        nodes.service.checkpoint_asked = 2
        nodes.wait(lambda: {fact.asked for fact in nodes.service.checkpoints} == {1, 2}, "the second one")
        steps = {fact.asked: fact.step for fact in nodes.service.checkpoints}
        assert steps[1] == first.step < steps[2]


def test_a_rank_whose_secret_is_not_allowed_is_not_started_and_the_reason_names_the_variable_and_the_rule() -> None:
    start = Start(options=("--job-secrets-env", "HF_*"), environment=(("DB_PASSWORD", "hunter2"), ("HF_TOKEN", "t")))
    environment = {"MY_SECRET": {"from_env": "DB_PASSWORD"}, "HF_TOKEN": {"from_env": "HF_TOKEN"}}
    job = JobFile.model_validate(fake_job(Path("/nowhere")).model_dump() | {"environment": environment})
    with cluster("a", job=job, start=start) as nodes:
        failed = nodes.wait(lambda: nodes.service.failed, "the rank that is not started")[0]
        assert failed.reason is not None
        rule = "environment.MY_SECRET: from_env DB_PASSWORD: --job-secrets-env of the agent does not allow it"
        assert failed.reason.text == f"the rank could not be started: {rule}"
        assert "hunter2" not in nodes.log_of("a")
