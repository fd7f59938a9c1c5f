"""Checkpoints on request, and jobs that go on from one."""

import pytest

from agent.protocol.process_end import ProcessEnd
from agent.protocol.sources import SourceCheckpoint
from agent.protocol.sync import JobFinished
from liver_core.handoff.generations import next_start
from tests.service.fake_agent import JOB
from tests.service.reconcilers.conftest import Fleet

CRASH = ProcessEnd(7, exit_code=1, reported="ValueError: no item 7")


def test_a_checkpoint_on_request_is_asked_of_the_agents_until_one_of_them_answers(fleet: Fleet):
    fleet.run()
    path = f"/api/v1/jobs/{fleet.job_id}"
    for _ in range(2):
        assert fleet.client.post(f"{path}/checkpoint").json()["job_id"] == fleet.job_id
    fleet.round()
    assert {agent.job_order().checkpoint_asked for agent in fleet.agents.values()} == {1}
    fleet.round(parts={"b": {"checkpoints": (fleet.checkpoint(4),)}})
    assert fleet.job()["checkpoint_asked"], "a checkpoint that was due anyway is no answer"
    fleet.round(parts={"b": {"checkpoints": (fleet.checkpoint(6).model_copy(update={"asked": 1}),)}})
    assert not fleet.job()["checkpoint_asked"]
    fleet.round()
    assert fleet.agents["a"].job_order().checkpoint_asked == 0
    fleet.client.post(f"{path}/checkpoint")
    fleet.round()
    assert fleet.agents["a"].job_order().checkpoint_asked == 2


def test_a_job_without_a_place_for_checkpoints_or_without_ranks_cannot_be_asked_for_one(fleet: Fleet):
    spec = {name: value for name, value in JOB.items() if name != "checkpoint"}
    bare = fleet.client.post("/api/v1/jobs", json=spec).json()["job_id"]
    answer = fleet.client.post(f"/api/v1/jobs/{bare}/checkpoint")
    assert (answer.status_code, "its job file has no checkpoint.path" in answer.text) == (409, True)
    answer = fleet.client.post(f"/api/v1/jobs/{fleet.submit()}/checkpoint")
    assert (answer.status_code, "is pending: only a running job" in answer.text) == (409, True)


def test_a_stopped_job_is_resumed_from_its_newest_checkpoint(fleet: Fleet):
    path = fleet.stopped()
    answer = fleet.client.post(f"{path}/resume", json={})
    assert answer.status_code == 200, answer.text
    assert answer.json()["reason"] == "resume requested, from the checkpoint of step 30"
    for _ in range(4):
        fleet.round()
    job = fleet.job()
    assert job["state"] == "running"
    newest = job["generations"][-1]
    assert (newest["generation"], newest["source"], newest["checkpoint_step"]) == (next_start(1), "checkpoint", 30)
    again = fleet.client.post(f"{path}/resume", json={})
    assert (again.status_code, "has not ended: it is running" in again.text) == (409, True)


@pytest.mark.thorough
def test_a_finished_job_needs_more_steps_to_go_on_and_its_ranks_get_them(fleet: Fleet):
    fleet.run()
    path = f"/api/v1/jobs/{fleet.job_id}"
    done = {"finished": (JobFinished(job_id=fleet.job_id, generation=1, step=1000),)}
    fleet.round(parts={"a": {"checkpoints": (fleet.checkpoint(1000),)} | done})
    assert fleet.job()["state"] == "finished"
    for body in ({}, {"steps": 1000}):
        answer = fleet.client.post(f"{path}/resume", json=body)
        assert answer.status_code == 409
        assert "a checkpoint of step 1000 and stops after step 1000: give more steps" in answer.text
    assert fleet.client.post(f"{path}/resume", json={"stps": 1}).status_code == 422
    assert fleet.client.post(f"{path}/resume", json={"steps": 1200}).json()["stop_steps"] == 1200
    # An old ending that comes late is not that of the job which goes on.
    fleet.agents["b"].sync(**done)
    for _ in range(3):
        fleet.round()
    assert fleet.job()["state"] == "running"
    assert fleet.agents["a"].job_order().spec.stop.steps == 1200


def test_a_job_without_a_checkpoint_cannot_be_resumed(fleet: Fleet):
    fleet.run()
    fleet.client.post(f"/api/v1/jobs/{fleet.job_id}/stop")
    for _ in range(3):
        fleet.round()
    answer = fleet.client.post(f"/api/v1/jobs/{fleet.job_id}/resume", json={})
    assert (answer.status_code, "has no checkpoint to continue from" in answer.text) == (409, True)


@pytest.mark.thorough
def test_a_job_may_begin_from_a_checkpoint_of_another_one_and_later_uses_its_own(fleet: Fleet):
    fleet.add("a", "b", "c", "d")
    fleet.submit(start_from="/other/step-000000500")
    for _ in range(4):
        fleet.round()
    job = fleet.job()
    assert (job["state"], job["last_step"] > 500, job["lost_steps"]) == ("running", True, 0)
    order = fleet.agents["a"].job_order()
    assert order.source == SourceCheckpoint(path="/other/step-000000500", step=500)
    fleet.crash(CRASH, step=520)
    newest = fleet.job()["generations"][-1]
    assert (newest["checkpoint_step"], newest["lost_steps"]) == (500, 20)
    for _ in range(3):
        fleet.round()
    fleet.round(parts={"a": {"checkpoints": (fleet.checkpoint(510),)}})
    fleet.crash(CRASH, step=530)
    assert fleet.job()["generations"][-1]["checkpoint_step"] == 510


def test_checkpoints_that_fail_are_told_until_one_is_written(fleet: Fleet):
    fleet.run()
    path = f"/api/v1/jobs/{fleet.job_id}"
    fleet.client.post(f"{path}/checkpoint")
    fleet.round()
    full = {"failure": "rank 0: No space left on device"}
    first, second = (fleet.checkpoint(step).model_copy(update=full) for step in (20, 30))
    for node, fact in (("a", first), ("b", first), ("a", second)):
        fleet.round(parts={node: {"checkpoints": (fact,)}})
    fleet.round(parts={"b": {"checkpoints": (second.model_copy(update={"asked": 1}),)}})
    job = fleet.job()
    said = "2 checkpoints in a row failed, the last at step 30: rank 0: No space left on device"
    assert (job["warning"], job["checkpoints"], job["checkpoint_asked"]) == (said, [], False)
    assert [row["warning"] for row in fleet.client.get("/api/v1/jobs").json()] == [said]
    fleet.round(parts={"a": {"checkpoints": (fleet.checkpoint(40),)}})
    fleet.round(parts={"b": {"checkpoints": (second,)}})  # A node that was cut off tells it late.
    assert fleet.job()["warning"] == ""
    (kept,) = fleet.client.get(f"{path}/incidents").json()
    assert (kept["kind"], kept["times"], kept["step"]) == ("checkpoint", 2, 30) and kept["over_at"] is not None


def test_a_failure_of_an_older_world_that_is_told_late_warns_of_nothing(fleet: Fleet):
    fleet.run()
    late = fleet.checkpoint(10).model_copy(update={"failure": "rank 0: No space left on device"})
    fleet.crash(CRASH, step=25)
    for _ in range(2):
        fleet.round()
    written = fleet.checkpoint(30).model_copy(update={"generation": next_start(1)})
    fleet.round(parts={"a": {"checkpoints": (written,)}})
    fleet.round(parts={"b": {"checkpoints": (late,)}})
    assert fleet.job()["warning"] == ""


def test_checkpoints_that_failed_are_over_when_the_job_has_ended(fleet: Fleet):
    fleet.run()
    first, late = (fleet.checkpoint(step).model_copy(update={"failure": "full"}) for step in (20, 30))
    fleet.round(parts={"a": {"checkpoints": (first,)}})
    assert fleet.job()["warning"]
    end = JobFinished(job_id=fleet.job_id, generation=1, step=40)
    fleet.round(parts={"a": {"finished": (end,)}, "b": {"checkpoints": (late,)}})
    job, incidents = fleet.job(), fleet.client.get(f"/api/v1/jobs/{fleet.job_id}/incidents").json()
    assert (job["state"], job["warning"]) == ("finished", "")
    assert [row["over_at"] is None for row in incidents] == [False]


@pytest.mark.parametrize("announced", [False, True])
def test_a_loss_that_nobody_announced_is_kept_as_an_incident(fleet: Fleet, announced: bool):
    fleet.run()
    fleet.round(parts={"a": {"checkpoints": (fleet.checkpoint(10),)}})
    if announced:
        fleet.round(parts={"b": {"notices": (fleet.agents["b"].notice(),)}})
    fleet.crash(CRASH, step=16)
    kept = fleet.client.get(f"/api/v1/jobs/{fleet.job_id}/incidents").json()
    if announced:
        assert kept == [], "the notice is an incident already"
    else:
        assert [(row["kind"], row["generation"], row["lost_steps"], row["node_id"]) for row in kept] == [
            ("loss", 1, 6, "b")
        ]
        assert "ValueError: no item 7" in kept[0]["reason"] and kept[0]["over_at"] is not None
