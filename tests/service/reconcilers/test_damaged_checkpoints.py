"""A checkpoint that cannot be loaded gives way to the one before; and jobs that go back to an earlier one."""

import pytest

from agent.protocol.process_end import ProcessEnd
from agent.protocol.sources import SourceCheckpoint, SourceInit
from agent.protocol.sync import CheckpointFact
from liver_core.handoff import FailedPart, FailureCause, LaterCheckpoints
from liver_core.handoff.generations import next_start
from service.jobs.tables import JobRow
from tests.service.reconcilers.conftest import Fleet
from tests.tiers import sample

CRASH = ProcessEnd(7, exit_code=1, reported="ValueError: no item 7")
START = next_start(1)
PLACE = {"path": "/checkpoints", "every_steps": 10, "keep": 3}


def path_of(step: int) -> str:
    return f"/checkpoints/step-{step:09d}"


def saved(fleet: Fleet, *steps: int, generation: int = 1, **more) -> None:
    """One of the agents tells of these checkpoints."""
    facts = tuple(
        CheckpointFact(
            job_id=fleet.job_id,
            generation=generation,
            step=step,
            path=path_of(step),
            finished_utc=fleet.clock(),
            **more,
        )
        for step in steps
    )
    fleet.round(parts={"a": {"checkpoints": facts}})


def crashed(fleet: Fleet, *steps: int, **changes) -> None:
    """A job has written these checkpoints, was lost at step 40, and starts again."""
    fleet.add("a", "b", "c", "d")
    fleet.submit(**({"checkpoint": PLACE} | changes))
    for _ in range(4):
        fleet.round()
    fleet.jump(35)
    saved(fleet, *steps)
    fleet.crash(CRASH, step=40)
    fleet.round(trains=False)
    assert fleet.job()["state"] == "starting", fleet.job()


def unloadable(fleet: Fleet, path: str) -> None:
    """The ranks of the present start end, since they cannot load this. All agents hear what follows."""
    agent = fleet.agents["b"]
    end = ProcessEnd(8, exit_code=3, reported=f"DamagedCheckpoint: checkpoint {path} cannot be loaded: cut off")
    cause = FailureCause(FailedPart.CHECKPOINT, checkpoint=path)
    dead = agent.dead(agent.job_order(), end, step=0, cause=cause)
    fleet.round(trains=False, parts={"b": {"ranks": (dead,)}})
    fleet.round(trains=False)


def waited(fleet: Fleet) -> None:
    """After several starts without a step the next one begins later."""
    fleet.round(trains=False, seconds=45.0)
    fleet.round(trains=False)
    fleet.round(trains=False)


def damage(fleet: Fleet) -> dict[int, str | None]:
    return {item["step"]: item["damage"] for item in fleet.job()["checkpoints"]}


def resumed(fleet: Fleet, **body) -> tuple[int, str]:
    answer = fleet.client.post(f"/api/v1/jobs/{fleet.job_id}/resume", json=body)
    return answer.status_code, answer.text


def stops_after(fleet: Fleet, step: int) -> None:
    """As where it was told so while it had gone back to an earlier checkpoint."""
    with fleet.context.sessions.begin() as session:
        job = session.get_one(JobRow, fleet.job_id)
        job.spec = {**job.spec, "stop": {"steps": step}}


def test_a_damaged_checkpoint_gives_way_to_the_one_before_and_the_job_says_so(fleet: Fleet):
    crashed(fleet, 10, 20, 30)
    unloadable(fleet, path_of(30))
    job = fleet.job()
    newest = job["generations"][-1]
    assert (job["state"], newest["checkpoint_step"], newest["lost_steps"]) == ("starting", 20, 10)
    assert job["lost_steps"] == 20
    assert "step-000000030 cannot be loaded: cut off; restart from checkpoint of step 20, 10" in newest["reason"]
    assert job["reason"] == newest["reason"]
    assert job["generations"][-2]["ended_by"]["what"] == "checkpoint"
    assert damage(fleet) == {
        10: None,
        20: None,
        30: f"DamagedCheckpoint: checkpoint {path_of(30)} cannot be loaded: cut off",
    }
    for _ in range(3):
        fleet.round()
    assert fleet.job()["state"] == "running"


@pytest.mark.thorough
def test_it_does_so_for_several_in_a_row_and_fails_where_none_is_left(fleet: Fleet):
    """More than starts may fail in a row: a damaged checkpoint is no fault of the job."""
    crashed(fleet, 5, 10, 20, 30, checkpoint=PLACE | {"keep": 4})
    for step, before in ((30, 20), (20, 10), (10, 5)):
        unloadable(fleet, path_of(step))
        waited(fleet)
        assert fleet.job()["generations"][-1]["checkpoint_step"] == before, fleet.job()["reason"]
    unloadable(fleet, path_of(5))
    job = fleet.job()
    assert (job["state"], len(job["generations"])) == ("failed", 5)
    assert "none of its checkpoints can be loaded, of steps 5, 10, 20, 30" in job["reason"]
    assert resumed(fleet)[0] == 409


def test_start_from_that_cannot_be_loaded_fails_the_job_at_once(fleet: Fleet):
    fleet.add("a", "b", "c", "d")
    fleet.submit(start_from="/other/step-000000500")
    fleet.round(trains=False)
    fleet.round(trains=False)
    unloadable(fleet, "/other/step-000000500")
    job = fleet.job()
    assert (job["state"], len(job["generations"])) == ("failed", 1)
    assert job["reason"].endswith("cut off; start_from names it, and there is nothing else to begin from")


@pytest.mark.thorough
def test_start_from_is_what_comes_before_the_first_checkpoint_of_the_job_itself(fleet: Fleet):
    crashed(fleet, 30, start_from="/other/step-000000007")
    unloadable(fleet, path_of(30))
    assert fleet.agents["a"].job_order().source == SourceCheckpoint(path="/other/step-000000007", step=7)


@pytest.mark.parametrize(
    "path",
    sample(
        ["/checkpoints/step-000000020", "/elsewhere/step-000000099", "/checkpoints/99"], "/elsewhere/step-000000099"
    ),
)
def test_ranks_can_call_damaged_only_what_their_start_may_have_begun_from(fleet: Fleet, path: str):
    crashed(fleet, 10, 20, 30)
    for _ in range(3):
        assert fleet.job()["state"] == "starting"
        unloadable(fleet, path)
        waited(fleet)
    assert set(damage(fleet).values()) == {None}
    assert fleet.job()["state"] == "failed", "these starts have failed like any other"


@pytest.mark.thorough
def test_to_call_a_damaged_one_damaged_again_excuses_no_start(fleet: Fleet):
    crashed(fleet, 10, 20, 30)
    for _ in range(4):
        unloadable(fleet, path_of(30))
        waited(fleet)
    job = fleet.job()
    assert (job["state"], len(job["generations"])) == ("failed", 5), "the first of the starts is excused"


@pytest.mark.thorough
def test_one_start_can_call_one_checkpoint_damaged(fleet: Fleet):
    crashed(fleet, 10, 20, 30)
    order = fleet.agents["b"].job_order()
    for path in (path_of(30), path_of(50), path_of(60)):
        cause = FailureCause(FailedPart.CHECKPOINT, checkpoint=path)
        dead = fleet.agents["b"].dead(order, ProcessEnd(8, exit_code=3, reported=path), step=0, cause=cause)
        fleet.agents["b"].sync(ranks=(dead,))
    assert damage(fleet) == {10: None, 20: None, 30: path_of(30)}


@pytest.mark.thorough
def test_a_checkpoint_that_is_written_anew_is_used_again_and_who_tells_late_of_the_old_one_changes_nothing(
    fleet: Fleet,
):
    crashed(fleet, 10, 20, 30)
    unloadable(fleet, path_of(30))
    saved(fleet, 30)
    assert damage(fleet)[30] is not None
    generation = fleet.job()["generations"][-1]["generation"]
    fleet.jump(29)
    for _ in range(3):
        fleet.round()
    saved(fleet, 30, generation=generation)
    assert damage(fleet)[30] is None
    fleet.crash(CRASH, step=35)
    assert fleet.job()["generations"][-1]["checkpoint_step"] == 30


def test_starts_may_take_later_checkpoints_of_the_job_but_none_up_to_a_damaged_one(fleet: Fleet):
    crashed(fleet, 10, 20, 30)
    assert fleet.agents["a"].job_order().later == LaterCheckpoints(folder="/checkpoints", above=30)
    unloadable(fleet, path_of(50))
    job = fleet.job()
    assert damage(fleet)[50] and job["generations"][-1]["checkpoint_step"] == 30, "it was found by the ranks alone"
    assert fleet.agents["a"].job_order().later == LaterCheckpoints(folder="/checkpoints", above=50)


def test_a_first_start_may_take_one_too(fleet: Fleet):
    fleet.add("a", "b", "c", "d")
    fleet.submit()
    fleet.round(trains=False)
    fleet.round(trains=False)
    order = fleet.agents["a"].job_order()
    assert (order.source, order.later) == (SourceInit(), LaterCheckpoints(folder="/checkpoints", above=0))


@pytest.mark.thorough
def test_a_later_checkpoint_that_ranks_began_from_is_what_everybody_sees(fleet: Fleet):
    crashed(fleet, 10)
    assert (fleet.job()["lost_steps"], fleet.job()["last_step"]) == (30, 10)
    saved(fleet, 38, generation=START, loaded=True)
    job = fleet.job()
    newest = job["generations"][-1]
    assert (newest["source"], newest["checkpoint_step"], newest["lost_steps"]) == ("checkpoint", 38, 2)
    assert (job["lost_steps"], job["last_step"]) == (2, 38)
    assert newest["reason"].endswith("; its ranks found a later checkpoint, of step 38: 2 steps lost")
    assert "a later checkpoint, of step 38: 2 steps lost" in job["reason"]
    assert 38 in damage(fleet)
    saved(fleet, 38, generation=START, loaded=True)
    assert fleet.job()["lost_steps"] == 2, "of one several nodes tell"


@pytest.mark.thorough
def test_a_start_from_nothing_that_found_one_is_a_start_from_that(fleet: Fleet):
    fleet.add("a", "b", "c", "d")
    fleet.submit(checkpoint=PLACE)
    for _ in range(4):
        fleet.round()
    fleet.crash(CRASH, step=40)
    assert fleet.job()["generations"][-1]["source"] == "init"
    saved(fleet, 60, generation=START, loaded=True)
    job = fleet.job()
    newest = job["generations"][-1]
    assert (newest["source"], newest["checkpoint_step"], newest["lost_steps"]) == ("checkpoint", 60, 0)
    assert (job["lost_steps"], job["last_step"]) == (0, 60)


def stopped(fleet: Fleet, *steps: int) -> None:
    fleet.run()
    fleet.jump(max(steps))
    saved(fleet, *steps)
    fleet.client.post(f"/api/v1/jobs/{fleet.job_id}/stop")
    for _ in range(3):
        fleet.round()
    assert fleet.job()["state"] == "stopped"


def test_a_job_goes_back_to_the_step_that_somebody_names_and_later_ones_are_left_behind(fleet: Fleet):
    stopped(fleet, 20, 30)
    assert resumed(fleet, from_step=20)[0] == 200
    assert fleet.job()["reason"] == "resume requested, from the checkpoint of step 20"
    fleet.round(trains=False)
    fleet.round(trains=False)
    order = fleet.agents["a"].job_order()
    assert order.source == SourceCheckpoint(path=path_of(20), step=20)
    assert order.later == LaterCheckpoints(folder="/checkpoints", above=20, since=START), "none on disk overrides it"
    assert {item["step"]: item["left_behind"] for item in fleet.job()["checkpoints"]} == {20: False, 30: True}
    saved(fleet, 24, generation=START)
    fleet.crash(CRASH, step=27)
    assert fleet.job()["generations"][-1]["checkpoint_step"] == 24, "it stays left behind"
    for _ in range(3):
        fleet.round()
    saved(fleet, 30, generation=fleet.job()["generations"][-1]["generation"])
    assert not any(item["left_behind"] for item in fleet.job()["checkpoints"]), "it is written anew"


def test_of_a_step_that_is_none_of_them_the_answer_names_those_that_are(fleet: Fleet):
    stopped(fleet, 20, 30)
    status, text = resumed(fleet, from_step=25)
    assert status == 422 and "from_step: " in text and "can be loaded of these steps: 20, 30" in text
    assert resumed(fleet, from_step=-1)[0] == 422
    assert resumed(fleet, from_step=20, steps=20)[0] == 409
    assert fleet.job()["state"] == "stopped"


def test_nobody_goes_back_to_a_damaged_one(fleet: Fleet):
    crashed(fleet, 10, 20, 30)
    unloadable(fleet, path_of(30))
    fleet.client.post(f"/api/v1/jobs/{fleet.job_id}/stop")
    for _ in range(3):
        fleet.round()
    status, text = resumed(fleet, from_step=30)
    assert status == 409 and "of step 30 is damaged" in text and "these steps: 10, 20" in text
    assert resumed(fleet, from_step=10)[0] == 200


@pytest.mark.thorough
def test_a_paused_job_goes_back_once_its_ranks_have_ended(fleet: Fleet):
    fleet.run()
    fleet.jump(30)
    saved(fleet, 20, 30)
    fleet.client.post(f"/api/v1/jobs/{fleet.job_id}/pause")
    status, text = resumed(fleet, from_step=20)
    assert status == 409 and "its ranks have not ended yet" in text
    for _ in range(4):
        fleet.round()
    assert fleet.job()["state"] == "suspended"
    stops_after(fleet, 20)
    status, text = resumed(fleet, from_step=20)
    assert status == 409 and "has a checkpoint of step 20 and stops after step 20: change its stop.steps first" in text
    stops_after(fleet, 21)
    assert resumed(fleet, from_step=20)[0] == 200
    fleet.round(trains=False)
    fleet.round(trains=False)
    assert fleet.agents["a"].job_order().source == SourceCheckpoint(path=path_of(20), step=20)


@pytest.mark.thorough
def test_a_job_may_go_back_to_what_it_started_from(fleet: Fleet):
    fleet.add("a", "b", "c", "d")
    fleet.submit(start_from="/other/step-000000007")
    for _ in range(4):
        fleet.round()
    fleet.jump(30)
    saved(fleet, 30)
    fleet.client.post(f"/api/v1/jobs/{fleet.job_id}/stop")
    for _ in range(3):
        fleet.round()
    assert resumed(fleet, from_step=7)[0] == 200
    fleet.round(trains=False)
    fleet.round(trains=False)
    assert fleet.agents["a"].job_order().source == SourceCheckpoint(path="/other/step-000000007", step=7)
