"""Steps that are lost with the world that made them, whatever the service knew of that world when it ended."""

from dataclasses import replace

from agent.protocol.process_end import ProcessEnd
from agent.protocol.values import HandoffState
from liver_core.handoff import RankStage, Reason
from liver_core.handoff.generations import next_start
from tests.service.fake_agent import mirror, step_row
from tests.service.reconcilers.conftest import Fleet


def test_a_step_of_a_world_that_broke_before_it_was_known_as_active_is_lost_with_the_others(fleet: Fleet) -> None:
    fleet.run()
    fleet.jump(30)
    fleet.round(parts={"a": {"checkpoints": (fleet.checkpoint(20),)}})
    agent = fleet.agents["a"]
    source = agent.job_order().roster
    assert source is not None
    opened = mirror(source, replace(source, generation=2), fleet.clock(), state=HandoffState.CUTTING_OVER)
    made = agent.rank(agent.job_order(), generation=2, step=32)
    row = step_row(fleet.job_id, 2, 32, fleet.clock())
    fleet.round(trains=False, parts={"a": {"handoffs": (opened,), "ranks": (made,), "steps": (row,)}})
    assert fleet.job()["last_step"] == 32, "it is the job's, whichever world made it"
    why = Reason("peer was reset", "training", 0)
    broken = opened.model_copy(
        update={"state": HandoffState.BROKEN, "mirror_seq": opened.mirror_seq + 1, "reason": why}
    )
    dead = made.model_copy(update={"stage": RankStage.FAILED, "reason": why})
    fleet.round(trains=False, parts={"a": {"handoffs": (broken,), "ranks": (dead,)}})
    job = fleet.job()
    assert (job["state"], job["lost_steps"], job["last_step"]) == ("starting", 12, 20)


def test_an_incident_says_as_many_lost_steps_as_its_job_whatever_is_found_later(fleet: Fleet) -> None:
    fleet.run()
    fleet.round(parts={"a": {"checkpoints": (fleet.checkpoint(10),)}})
    fleet.crash(ProcessEnd(7, exit_code=1, reported="ValueError: no item 7"), step=16)
    late = step_row(fleet.job_id, 1, 18, fleet.clock())
    found = fleet.checkpoint(15).model_copy(update={"generation": next_start(1), "loaded": True})
    for part, lost in ({}, 7), ({"steps": (late,)}, 8), ({"checkpoints": (found,)}, 3):
        fleet.round(parts={"a": part})
        (incident,) = fleet.client.get(f"/api/v1/jobs/{fleet.job_id}/incidents").json()
        assert (fleet.job()["lost_steps"], incident["lost_steps"]) == (lost, lost)
