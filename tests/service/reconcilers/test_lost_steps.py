"""Steps that are lost with the world that made them, whatever the service knew of that world when it ended."""

from dataclasses import replace

from agent.protocol.values import HandoffState
from liver_core.handoff import RankStage, Reason
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
