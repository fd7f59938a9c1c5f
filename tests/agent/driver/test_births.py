"""Worlds that the service starts, stops and suspends, across real agent processes with fake ranks."""

from pathlib import Path

import pytest

from agent.protocol.sync import DesiredState, SourceCheckpoint
from agent.protocol.values import HandoffState
from tests.agent.cluster import Cluster, cluster, identity_of
from tests.agent.fake_rank import write_checkpoint

pytestmark = [pytest.mark.timeout(180), pytest.mark.slow]


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
        nodes.wait_training(2, ("b", "c"))
        assert min(step for generation, step in nodes.service.steps if generation == 2) == 1_001
        assert nodes.service.failed == []


def test_a_world_of_another_origin_is_ended_before_its_number_is_used_again() -> None:
    with cluster("a", "b") as nodes:
        nodes.wait_training(1, ("a", "b"))
        nodes.announce("b")
        nodes.wait_handoff(HandoffState.ACTIVE)
        nodes.wait_training(2, ("a",))
        old = identity_of(nodes.rank("a"))  # type: ignore[arg-type]
        nodes.service.restart(("a",), checkpoint_in(nodes, 500), generation=2)
        nodes.wait(lambda: (2, 501) in nodes.service.steps, "a step after the checkpoint")
        assert identity_of(nodes.rank("a")) != old  # type: ignore[arg-type]


def test_a_checkpoint_restart_replaces_a_world_that_lost_a_rank() -> None:
    with cluster("a", "b", faults={"b": "dies_training"}) as nodes:
        failed = nodes.wait(lambda: nodes.service.failed, "the lost rank")[0]
        assert failed.reason is not None and "planted: device lost" in failed.reason.text
        nodes.service.restart(("a",), checkpoint_in(nodes, 10))
        nodes.wait_training(2, ("a",))
        nodes.wait(lambda: nodes.rank("b") is None, "the lost rank to be forgotten")


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
