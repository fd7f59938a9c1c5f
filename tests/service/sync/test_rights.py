"""The rules alone: which part of a report of which node counts."""

from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import pytest

from agent.protocol.sync import CheckpointFact, StoreHosted
from agent.protocol.values import HandoffState
from liver_core.layout import ParallelLayout
from service.sync.rights import TAKE, JobFacts, KnownWorld, Treatment, mirror_ruling, ruling
from tests.service.fake_agent import mirror, roster, step_row

NOW = datetime(2026, 1, 1, tzinfo=UTC)
WORLDS = {
    1: KnownWorld({"a": frozenset({(0, 0)}), "b": frozenset({(1, 0)})}, is_settled=True),
    2: KnownWorld({"b": frozenset({(0, 0)}), "c": frozenset({(1, 0)})}, is_settled=True, store_node="a"),
}
JOB = JobFacts(active=2, world=WORLDS.get, checkpoints="/c/d", is_member={"b", "c", "comes"}.__contains__)


def checkpoint(path: str, *, generation: int = 2) -> CheckpointFact:
    return CheckpointFact(job_id="j", generation=generation, step=5, path=path, finished_utc=NOW)


@pytest.mark.parametrize(
    ("path", "is_taken"),
    [
        ("/c/d/step-5", True),
        ("/c/d/x/step-5", True),
        ("/c/d//step-5", True),
        ("/c/d", False),
        ("/c/dd/step-5", False),
        ("/c/d/../e", False),
        ("step-5", False),
    ],
)
def test_a_checkpoint_lies_where_the_job_file_says(path, is_taken):
    assert (ruling("checkpoints", checkpoint(path), "b", JOB) == TAKE) is is_taken


def test_the_last_checkpoint_of_a_rank_that_has_gone_on_counts_and_that_of_one_that_left_does_not_name_the_next_world():
    assert ruling("checkpoints", checkpoint("/c/d/5", generation=1), "c", JOB) == TAKE
    assert ruling("checkpoints", checkpoint("/c/d/5", generation=1), "a", JOB) == TAKE
    assert ruling("checkpoints", checkpoint("/c/d/5", generation=2), "a", JOB).verdict is Treatment.REFUSE


@pytest.mark.parametrize(
    ("node", "generation", "is_taken"), [("a", 2, True), ("b", 2, True), ("b", 1, True), ("c", 1, False)]
)
def test_a_store_is_on_a_node_of_its_world_or_where_the_handoff_put_it(node, generation, is_taken):
    fact = StoreHosted(job_id="j", generation=generation, host="h", port=1)
    assert (ruling("stores", fact, node, JOB) == TAKE) is is_taken


def test_steps_of_a_world_that_nobody_knows_wait():
    assert ruling("steps", step_row("j", 3, 5, NOW), "z", JOB).verdict is Treatment.HOLD


def rule(**changes: Any):
    told = mirror(roster("j", 1, ParallelLayout(pp=2), "a", "b"), roster("j", 2, ParallelLayout(), "b"), NOW)
    told = told.model_copy(update=changes.pop("told", {}))
    given: dict[str, Any] = {"node_id": "a", "granted": {"a", "b"}, "parent": WORLDS[1], "held_by": frozenset()}
    given.update(changes)
    return mirror_ruling(told, **given)


@pytest.mark.parametrize("part", ["steps", "metrics"])
def test_a_node_of_the_present_world_reports_what_nodes_of_an_earlier_one_passed_on(part):
    fact = step_row("j", 1, 5, NOW)
    assert ruling(part, fact, "c", JOB) == TAKE
    assert ruling(part, fact, "z", JOB).verdict is Treatment.REFUSE
    opened = WORLDS | {3: KnownWorld({"z": frozenset({(0, 0)})}, is_settled=False)}
    ahead = replace(JOB, world=opened.get)
    assert ruling(part, step_row("j", 3, 5, NOW), "c", ahead).verdict is Treatment.REFUSE
    assert ruling("logs", fact.model_copy(update={"rank": 0}), "c", JOB).verdict is Treatment.REFUSE


@pytest.mark.parametrize("part", ["steps", "metrics", "checkpoints"])
def test_what_was_passed_on_to_a_node_that_may_come_waits_until_its_world_is_known(part):
    fact = checkpoint("/c/d/5", generation=1) if part == "checkpoints" else step_row("j", 1, 5, NOW)
    held = ruling(part, fact, "comes", JOB)
    assert (held.verdict, held.reason) == (Treatment.HOLD, "no world of node comes is known here yet")
    known = WORLDS | {3: KnownWorld({"comes": frozenset({(0, 0)})}, is_settled=True)}
    assert ruling(part, fact, "comes", replace(JOB, active=3, world=known.get)) == TAKE
    unsettled = {1: replace(WORLDS[1], is_settled=False), 2: WORLDS[2]}
    assert (ruling(part, fact, "comes", replace(JOB, world=unsettled.get)).verdict is Treatment.HOLD) is (
        part == "checkpoints"
    )
    assert ruling("logs", step_row("j", 1, 5, NOW), "comes", JOB).verdict is Treatment.REFUSE


def test_a_handoff_is_reported_by_its_nodes():
    assert rule() == rule(node_id="b") == rule(parent=None) == TAKE
    assert rule(node_id="c").reason == "node c is neither in its source nor in its target"
    assert rule(granted={"b"}).reason == "node a has no part in this job"
    assert rule(told={"proposer": "x"}).reason == "its proposer x is neither in its source nor in its target"
    assert rule(told={"proposer": "service"}) == TAKE
    assert rule(parent=WORLDS[2]).reason == "its source is not the world of generation 1"
    assert rule(parent=KnownWorld(WORLDS[2].seats, is_settled=False)) == TAKE
    assert rule(held_by={"a", "z"}).verdict is Treatment.HOLD
    assert rule(told={"source": None, "proposer": "b", "state": HandoffState.ABORTED}, node_id="b") == TAKE
