"""The job reconciler against a real database and fake agents: start, notice, growth, loss, suspension, stop."""

import threading
from dataclasses import replace
from datetime import timedelta

import pytest

from agent.protocol.notice_life import ends_utc, withdraw
from agent.protocol.process_end import ProcessEnd
from agent.protocol.sources import SourceCheckpoint, SourceHandoff, SourceInit
from agent.protocol.sync import (
    HandoffMeasures,
    JobFinished,
    NoticeKind,
    StepRow,
)
from agent.protocol.values import HandoffState
from liver_core.handoff import RankStage, Reason, Rung
from liver_core.handoff.generations import next_start
from liver_core.layout import ParallelLayout
from service.jobs.tables import JobRow
from service.reconcilers import jobs
from service.reconcilers.calm_jobs import LOOK_AT_CALM_S
from tests.service.fake_agent import MISSES_A_PEER, another_job, mirror, roster
from tests.service.reconcilers.conftest import Fleet


def test_a_job_waits_until_it_has_its_least_number_of_nodes_and_says_so(fleet: Fleet):
    fleet.submit()
    fleet.add("a")
    fleet.round()
    job = fleet.job()
    assert job["state"] == "pending"
    assert job["reason"] == "waiting: 1 nodes are ready, the job needs at least nodes.min 2"


def test_the_first_generation_starts_on_the_nodes_that_are_ready(fleet: Fleet):
    fleet.add("a", "b", "c", "d")
    fleet.submit()
    fleet.round()
    fleet.round()
    order = fleet.agents["c"].job_order()
    assert (order.generation, order.source) == (1, SourceInit())
    assert str(fleet.agents["c"].roster().layout) == "TP2xPP2xDP1"
    assert fleet.agents["c"].roster().node_ids() == ("a", "b", "c", "d")
    assert order.peers.keys() == {"a", "b", "c", "d"}
    assert order.lead_order == ("a", "b", "c", "d")
    assert order.spec.job_args()["data_prefix"] == "/data/corpus"


def test_orders_carry_a_standing_plan_for_the_loss_of_every_single_node(fleet: Fleet):
    fleet.run()
    fleet.round()
    order = fleet.agents["a"].job_order()
    assert [plan.leaving for plan in order.standing_plans] == [("a",), ("b",), ("c",), ("d",)]
    for plan in order.standing_plans:
        assert plan.target is not None and str(plan.target.layout) == "TP1xPP3xDP1"
        assert not set(plan.leaving) & set(plan.target.node_ids())
        assert plan.parent == 1 and plan.plan_digest
    counts = {choice.nodes: str(choice.layout) for choice in order.layouts_by_count.choices}
    assert counts == {2: "TP2xPP1xDP1", 3: "TP1xPP3xDP1", 4: "TP2xPP1xDP2"}


@pytest.mark.thorough
def test_orders_name_free_nodes_as_spares_for_losses_in_a_row_and_these_have_a_part_in_the_job(fleet: Fleet):
    fleet.run()
    fleet.add("e", "f", "g")
    for _ in range(3):
        fleet.round()
    order = fleet.agents["a"].job_order()
    assert [member.node_id for member in order.spares] == ["e", "f", "g"]
    assert {"e", "f", "g"} <= order.peers.keys()
    assert fleet.agents["g"].job_order().peer_key == order.peer_key
    fleet.round(parts={"f": {"notices": (fleet.agents["f"].notice(),)}})
    for _ in range(3):
        fleet.round()
    assert [member.node_id for member in fleet.agents["a"].job_order().spares] == ["e", "g"]


def test_the_agents_have_their_chance_before_the_service_answers_a_notice(fleet: Fleet):
    fleet.run()
    fleet.round(seconds=0.5, parts={"b": {"notices": (fleet.agents["b"].notice(),)}})
    fleet.round(seconds=0.5)
    assert fleet.handoffs() == []
    assert fleet.agents["a"].job_order().notices[0].node_id == "b"
    assert fleet.agents["a"].job_order().lead_order == ("a", "c", "d", "b")


def test_a_notice_that_no_agent_acts_on_becomes_a_proposal_of_the_service(fleet: Fleet):
    fleet.run()
    notice = fleet.agents["b"].notice()
    fleet.round(parts={"b": {"notices": (notice,)}})
    for _ in range(4):
        fleet.round()
    (handoff,) = fleet.handoffs()
    assert (handoff["state"], handoff["cause"], handoff["leaving"]) == ("proposed", "notice", ["b"])
    assert (handoff["from"], handoff["to"]) == ("TP2xPP2xDP1", "TP1xPP3xDP1")
    assert handoff["generation"] is None and handoff["parent"] == 1
    order = fleet.agents["c"].job_order()
    assert order.handoff is not None and order.handoff.target.node_ids() == ("a", "c", "d")
    assert order.handoff.deadline_utc == notice.deadline_utc
    assert order.checkpoint_asked == 1, "if nothing comes of it, little is lost"


def test_a_proposal_that_the_agents_carry_through_becomes_the_jobs_generation(fleet: Fleet):
    fleet.run()
    fleet.round(parts={"b": {"notices": (fleet.agents["b"].notice(),)}})
    for _ in range(4):
        fleet.round()
    fleet.hand_over(fleet.handoffs()[0])
    job = fleet.job()
    assert (job["active_generation"], job["layout"], job["nodes"]) == (2, "TP1xPP3xDP1", ["a", "c", "d"])
    assert fleet.handoffs()[0]["state"] == "active"
    assert isinstance(fleet.agents["a"].job_order().source, SourceHandoff)


@pytest.mark.thorough
def test_a_late_report_of_an_earlier_handoff_does_not_drop_a_proposal(fleet: Fleet):
    fleet.run()
    source = fleet.agents["a"].roster()
    done = mirror(source, roster(fleet.job_id, 2, ParallelLayout(pp=3), "a", "c", "d"), fleet.clock())
    fleet.round(parts={"a": {"handoffs": (done,)}})
    fleet.round(parts={"d": {"notices": (fleet.agents["d"].notice(),)}})
    for _ in range(5):
        fleet.round()
    proposed = fleet.handoffs()[0]
    assert (proposed["state"], proposed["parent"]) == ("proposed", 2)
    late = done.model_copy(update={"mirror_seq": 9, "measures": HandoffMeasures(lost_s=0.5)})
    unknown = roster(fleet.job_id, 9, ParallelLayout(pp=3), "a", "c", "d")
    before = mirror(source, unknown, fleet.clock(), state=HandoffState.BROKEN)
    fleet.round(parts={"a": {"handoffs": (late, before)}})
    states = {item["handoff_id"]: item["state"] for item in fleet.handoffs()}
    assert states[proposed["handoff_id"]] == "proposed"


@pytest.mark.thorough
def test_the_agents_own_handoff_keeps_the_service_from_proposing_one(fleet: Fleet):
    fleet.run()
    order = fleet.agents["a"].job_order()
    target = roster(fleet.job_id, 2, ParallelLayout(pp=3), "a", "c", "d")
    opened = mirror(order.roster, target, fleet.clock(), state=HandoffState.PREPARING)
    fleet.round(parts={"b": {"notices": (fleet.agents["b"].notice(),)}, "a": {"handoffs": (opened,)}})
    for _ in range(5):
        fleet.round()
    (handoff,) = fleet.handoffs()
    assert (handoff["state"], handoff["proposer"], handoff["generation"]) == ("preparing", "a", 2)


@pytest.mark.thorough
def test_after_an_abort_as_superseded_the_next_plan_covers_all_noticed_nodes(fleet: Fleet):
    fleet.run()
    order = fleet.agents["a"].job_order()
    target = roster(fleet.job_id, 2, ParallelLayout(pp=3), "a", "c", "d")
    opened = mirror(order.roster, target, fleet.clock(), state=HandoffState.PREPARING)
    fleet.round(parts={"b": {"notices": (fleet.agents["b"].notice(),)}, "a": {"handoffs": (opened,)}})
    aborted = opened.model_copy(
        update={"state": HandoffState.ABORTED, "superseded": True, "reason": Reason("d got a notice too", "superseded")}
    )
    fleet.round(parts={"d": {"notices": (fleet.agents["d"].notice(),)}, "a": {"handoffs": (aborted,)}})
    for _ in range(4):
        fleet.round()
    newest, first = fleet.handoffs()
    assert (first["state"], first["superseded"], first["reason"]) == ("aborted", True, "d got a notice too")
    assert newest["leaving"] == ["b", "d"]
    assert (newest["to"], newest["target_nodes"]) == ("TP2xPP1xDP1", ["a", "c"])
    assert fleet.agents["a"].job_order().next_generation == 3


def test_a_new_node_makes_the_job_grow_into_the_layout_whose_turn_it_is(fleet: Fleet):
    fleet.run()
    order = fleet.agents["a"].job_order()
    target = roster(fleet.job_id, 2, ParallelLayout(pp=3), "a", "c", "d")
    fleet.round(parts={"b": {"notices": (fleet.agents["b"].notice(),)}})
    del fleet.agents["b"]
    fleet.round(parts={"a": {"handoffs": (mirror(order.roster, target, fleet.clock()),)}})
    fleet.round()
    fleet.add("e")
    for _ in range(6):
        fleet.round()
    newest = fleet.handoffs()[0]
    assert (newest["state"], newest["cause"], newest["to"]) == ("proposed", "grow", "TP2xPP1xDP2")
    assert newest["target_nodes"] == ["a", "c", "d", "e"]
    assert fleet.agents["e"].job_order().handoff is not None
    fleet.hand_over(newest)
    for _ in range(3):
        fleet.round(seconds=3)
    assert fleet.job()["layout"] == "TP2xPP1xDP2"
    assert len(fleet.handoffs()) == 2, "a job that reached its layout moves no further"


@pytest.mark.thorough
def test_a_node_gets_no_rank_while_its_source_announces_its_end_also_when_the_notice_is_over(fleet: Fleet):
    fleet.add("a", "b", "c")
    fleet.submit()
    for _ in range(5):
        fleet.round()
    fleet.add("e")
    fleet.agents["e"].watch(NoticeKind.INTERRUPTION)
    notice = fleet.agents["e"].notice(deadline_s=5)
    fleet.round(parts={"e": {"notices": (notice,)}})
    # That a notice is over changes no row: the job is looked at when its time has come.
    while fleet.clock() < ends_utc(notice) + timedelta(seconds=LOOK_AT_CALM_S + 15):
        fleet.round(seconds=5)
    assert fleet.handoffs() == []
    fleet.agents["e"].watch()
    for _ in range(6):
        fleet.round()
    assert fleet.handoffs()[0]["target_nodes"] == ["a", "b", "c", "e"]


@pytest.mark.parametrize(("nodes", "chosen"), [("a", "a"), ("ab", "b")])
def test_a_machine_that_outlived_its_announced_end_is_used_after_all_others(fleet: Fleet, nodes: str, chosen: str):
    fleet.add(*nodes)
    fleet.agents["a"].watch(overdue=(NoticeKind.INTERRUPTION,))
    notice = fleet.agents["a"].notice(deadline_s=-7_200)
    fleet.round(parts={"a": {"notices": (notice,)}})
    shown = fleet.client.get("/api/v1/nodes/a").json()
    assert (shown["overdue"], shown["leaving"]) == (True, False)
    fleet.submit(nodes={"min": 1, "max": 1}, layouts={"allowed": ["DP1"]})
    for _ in range(4):
        fleet.round()
    assert fleet.agents[chosen].roster().node_ids() == (chosen,)


@pytest.mark.thorough
def test_a_member_that_survived_its_deadline_keeps_its_ranks_and_moves_nothing(fleet: Fleet):
    fleet.run()
    fleet.agents["b"].watch(NoticeKind.INTERRUPTION)
    notice = fleet.agents["b"].notice(deadline_s=0)
    fleet.clock.advance(11)
    fleet.round(parts={"b": {"notices": (notice,)}})
    for _ in range(6):
        fleet.round()
    assert fleet.handoffs() == []
    assert fleet.job()["state"] == "running"
    again = fleet.agents["b"].notice(deadline_s=120)
    fleet.round(parts={"b": {"notices": (again,)}})
    for _ in range(4):
        fleet.round()
    assert fleet.handoffs()[0]["leaving"] == ["b"]


@pytest.mark.thorough
def test_a_node_shows_the_user_that_runs_the_code_of_jobs_and_that_there_is_none(fleet: Fleet):
    fleet.run()
    fleet.agents["a"].job_user = "trainer"
    fleet.round()
    users = {node["node_id"]: node["job_user"] for node in fleet.client.get("/api/v1/nodes").json()}
    assert users["a"] == "trainer" and users["b"] is None
    fleet.agents["a"].job_user = None
    fleet.round()
    assert fleet.client.get("/api/v1/nodes/a").json()["job_user"] is None


@pytest.mark.thorough
def test_a_drained_node_is_left_stays_empty_and_is_used_again_once_that_is_undone(fleet: Fleet):
    fleet.run()
    answer = fleet.client.post("/api/v1/nodes/b/drain", json={"in_s": 60})
    assert answer.status_code == 200 and answer.json()["drained"]
    fleet.round()
    order = fleet.agents["a"].job_order()
    assert [(fact.node_id, fact.source) for fact in order.notices] == [("b", "drain")]
    assert order.lead_order[-1] == "b"
    target = roster(fleet.job_id, 2, ParallelLayout(pp=3), "a", "c", "d")
    fleet.round(parts={"a": {"handoffs": (mirror(order.roster, target, fleet.clock(), leaving=("b",)),)}})
    for _ in range(60):
        fleet.round(seconds=5)
    assert len(fleet.handoffs()) == 1, "the deadline is four minutes past and b is empty"
    assert fleet.client.get("/api/v1/nodes/b").json()["drained"]
    job = fleet.client.get(f"/api/v1/jobs/{fleet.job_id}").json()
    assert job["reason"] == job["generations"][-1]["reason"] == fleet.handoffs()[0]["why"] == "b will go"
    assert fleet.client.post("/api/v1/nodes/b/undrain").json()["leaving"] is False
    for _ in range(6):
        fleet.round()
    assert "b" in fleet.handoffs()[0]["target_nodes"]


@pytest.mark.thorough
def test_a_restart_places_no_rank_on_a_drained_member(fleet: Fleet):
    fleet.run()
    fleet.client.post("/api/v1/nodes/b/drain", json={"in_s": 0})
    fleet.clock.advance(11)
    agent = fleet.agents["a"]
    for _ in range(2):
        fleet.round()
    broken = agent.rank(agent.job_order(), stage=RankStage.FAILED, step=9, reason=Reason("peer was reset", "training"))
    fleet.round(parts={"a": {"ranks": (broken,), "steps": ()}})
    fleet.round(trains=False)
    assert agent.job_order().generation == next_start(1)
    assert agent.roster().node_ids() == ("a", "c", "d")


def test_a_drain_that_cannot_be_says_why(fleet: Fleet):
    fleet.add("a")
    fleet.round()
    assert fleet.client.post("/api/v1/nodes/x/drain", json={"in_s": 60}).status_code == 404
    bad = fleet.client.post("/api/v1/nodes/a/drain", json={"in_s": -1})
    assert bad.status_code == 422 and bad.json()["errors"][0]["field"] == "in_s"
    assert "is not drained" in fleet.client.post("/api/v1/nodes/a/undrain").json()["detail"]
    assert fleet.client.post("/api/v1/nodes/a/drain", json={"in_s": 60}).status_code == 200
    later = fleet.client.post("/api/v1/nodes/a/drain", json={"in_s": 90})
    assert later.status_code == 409 and "is drained already" in later.json()["detail"]
    assert fleet.client.post("/api/v1/nodes/a/drain", json={"in_s": 20}).status_code == 200
    assert fleet.client.post("/api/v1/nodes/a/undrain").status_code == 200
    assert fleet.client.post("/api/v1/nodes/a/drain", json={"in_s": 90}).status_code == 200


def test_a_withdrawn_notice_proposes_nothing(fleet: Fleet):
    fleet.run()
    notice = fleet.agents["b"].notice()
    fleet.round(parts={"b": {"notices": (notice,)}})
    fleet.round(parts={"b": {"notices": (withdraw(notice, fleet.clock()),)}})
    for _ in range(6):
        fleet.round()
    assert fleet.handoffs() == []


@pytest.mark.thorough
def test_a_proposal_onto_a_node_that_falls_silent_is_dropped(fleet: Fleet):
    fleet.add("a", "b", "c")
    fleet.submit()
    for _ in range(5):
        fleet.round()
    fleet.add("e")
    for _ in range(4):
        fleet.round()
    assert fleet.handoffs()[0]["target_nodes"] == ["a", "b", "c", "e"]
    del fleet.agents["e"]
    for _ in range(4):
        fleet.round(seconds=2)
    (handoff,) = fleet.handoffs()
    assert (handoff["state"], handoff["reason"]) == ("aborted", "not opened yet, and no reports come from e")


@pytest.mark.thorough
def test_a_proposal_that_nobody_opens_is_dropped_with_a_reason_and_made_again(fleet: Fleet):
    fleet.run()
    fleet.round(parts={"b": {"notices": (fleet.agents["b"].notice(),)}})
    for _ in range(13):
        fleet.round(seconds=2)
    newest, oldest = fleet.handoffs()
    assert (oldest["state"], oldest["reason"]) == ("aborted", "no agent opened it within 15 s")
    assert newest["state"] == "proposed"


def test_a_rank_that_breaks_brings_the_job_back_from_its_checkpoint_with_lost_steps_said(fleet: Fleet):
    fleet.run()
    fleet.jump(30)
    fleet.round(parts={"a": {"checkpoints": (fleet.checkpoint(20),)}})
    agent = fleet.agents["b"]
    broken = agent.rank(agent.job_order(), stage=RankStage.FAILED, step=31, reason=Reason("peer was reset", "training"))
    fleet.round(parts={"b": {"ranks": (broken,), "steps": ()}})
    fleet.round(trains=False)
    order = agent.job_order()
    assert order.generation == next_start(1) and order.source == SourceCheckpoint(path="/checkpoints/20", step=20)
    job = fleet.job()
    assert (job["state"], job["lost_steps"], job["last_step"]) == ("starting", 12, 20)
    assert job["reason"].startswith(
        "rank 1 on node b is failed: peer was reset; restart from checkpoint of step 20, 12 steps lost; start "
    )


@pytest.mark.thorough
def test_a_job_that_finishes_leaves_no_proposal_open(fleet: Fleet):
    fleet.run()
    fleet.round(parts={"b": {"notices": (fleet.agents["b"].notice(),)}})
    for _ in range(4):
        fleet.round()
    assert fleet.handoffs()[0]["state"] == "proposed"
    done = JobFinished(job_id=fleet.job_id, generation=1, step=1000)
    fleet.round(parts={"a": {"finished": (done,)}})
    assert fleet.job()["state"] == "finished"
    newest = fleet.handoffs()[0]
    assert (newest["state"], newest["reason"]) == ("aborted", "the job has ended: it is finished")


@pytest.mark.thorough
def test_a_step_whose_report_comes_after_the_restart_is_counted_as_lost_once(fleet: Fleet):
    fleet.run()
    fleet.jump(30)
    fleet.round(parts={"a": {"checkpoints": (fleet.checkpoint(20),)}})
    agent, late = fleet.agents["b"], fleet.agents["c"]
    old = late.job_order()
    broken = agent.rank(agent.job_order(), stage=RankStage.FAILED, step=31, reason=Reason("peer was reset", "training"))
    fleet.round(parts={"b": {"ranks": (broken,), "steps": ()}})
    assert fleet.job()["lost_steps"] == 12
    row = StepRow(job_id=fleet.job_id, generation=1, step=33, seconds=0.5, finished_utc=fleet.clock())
    ended = late.rank(old, stage=RankStage.FAILED, step=33, reason=Reason("peer was reset", "training"))
    for parts in (
        {"steps": (row,)},
        {"steps": (row,), "ranks": (ended,)},
        {"steps": (row.model_copy(update={"step": 31}),)},
    ):
        late.sync(**parts)
        job = fleet.job()
        newest = job["generations"][-1]
        assert (job["lost_steps"], newest["lost_steps"], job["last_step"]) == (13, 13, 20)
    for _ in range(3):
        fleet.round()
    late.sync(steps=(row.model_copy(update={"step": 34}),))
    assert (fleet.job()["state"], fleet.job()["lost_steps"]) == ("running", 14), "also when the new world trains"
    assert old.roster is not None
    never = mirror(old.roster, replace(old.roster, generation=2), fleet.clock(), state=HandoffState.ABORTED)
    late.sync(steps=(row.model_copy(update={"generation": 2, "step": 35}),))
    assert fleet.job()["lost_steps"] == 14, "nobody has reported such a world"
    late.sync(handoffs=(never,))
    assert fleet.job()["lost_steps"] == 15, "also one of a handoff's world that never became active"


def test_a_node_that_vanishes_is_replaced_from_the_checkpoint_on_the_remaining_nodes(fleet: Fleet):
    fleet.run()
    fleet.jump(30)
    fleet.round(parts={"a": {"checkpoints": (fleet.checkpoint(20),)}})
    del fleet.agents["d"]
    for _ in range(6):
        fleet.round(seconds=4)
    assert fleet.job()["active_generation"] == 1, "a silent agent alone does not restart a job that still trains"
    for _ in range(3):
        fleet.round(trains=False, seconds=4)
    job = fleet.job()
    assert (job["active_generation"], job["layout"], job["nodes"]) == (next_start(1), "TP1xPP3xDP1", ["a", "b", "c"])
    assert job["generations"][-1]["reason"].startswith(
        "d disappeared without a handoff; restart from checkpoint of step 20"
    )
    states = {node["node_id"]: node["state"] for node in fleet.client.get("/api/v1/nodes").json()}
    assert states == {"a": "ready", "b": "ready", "c": "ready", "d": "gone"}


@pytest.mark.thorough
def test_a_leaver_that_vanishes_while_a_rescue_builds_the_next_world_does_not_restart_the_job(fleet: Fleet):
    fleet.run()
    order = fleet.agents["a"].job_order()
    target = roster(fleet.job_id, 2, ParallelLayout(pp=3), "a", "b", "c")
    told = {"state": HandoffState.CUTTING_OVER, "rung": Rung.RESCUE}
    rescue = mirror(order.roster, target, fleet.clock(), **told)
    fleet.round(trains=False, parts={"a": {"handoffs": (rescue,)}})
    del fleet.agents["d"]
    for _ in range(12):
        fleet.round(trains=False, seconds=4)
    (handoff,) = fleet.handoffs()
    assert (handoff["state"], handoff["rung"]) == ("cutting_over", "rescue")
    assert fleet.job()["active_generation"] == 1
    states = {node["node_id"]: node["state"] for node in fleet.client.get("/api/v1/nodes").json()}
    assert states["d"] == "gone"
    done = rescue.model_copy(update={"state": HandoffState.ACTIVE, "mirror_seq": rescue.mirror_seq + 1})
    fleet.round(trains=False, parts={"a": {"handoffs": (done,)}})
    job = fleet.job()
    assert (job["active_generation"], job["nodes"]) == (2, ["a", "b", "c"])


def test_too_few_nodes_suspend_the_job_and_their_return_resumes_it_from_the_checkpoint(fleet: Fleet):
    fleet.run()
    fleet.jump(30)
    fleet.round(parts={"a": {"checkpoints": (fleet.checkpoint(25),)}})
    leaving = {name: {"notices": (fleet.agents[name].notice(deadline_s=20),)} for name in ("b", "c", "d")}
    fleet.round(parts=leaving)
    for _ in range(7):
        fleet.round()
    job = fleet.job()
    assert (job["state"], job["reason"].startswith("suspended because b, c, d will go; waiting: ")) == (
        "suspended",
        True,
    )
    orders = fleet.agents["a"].orders
    assert orders is not None and orders.jobs == (), "a suspended job holds no nodes"
    fleet.add("x", "y")
    for _ in range(4):
        fleet.round()
    job = fleet.job()
    assert (job["state"], job["nodes"], job["layout"]) == ("running", ["a", "x", "y"], "TP1xPP3xDP1")
    assert job["generations"][-1]["source"] == "checkpoint" and job["generations"][-1]["checkpoint_step"] == 25
    why = job["generations"][-1]["reason"]
    assert why.startswith("suspended because b, c, d will go; from checkpoint of step 25, ") and why in job["reason"]


@pytest.mark.thorough
def test_a_start_that_never_makes_a_step_is_tried_again_and_then_fails(fleet: Fleet):
    fleet.add("a", "b")
    fleet.submit()
    for _ in range(3):
        for _ in range(5):
            fleet.round(trains=False, seconds=1)
        fleet.clock.advance(270)
        for agent in fleet.agents.values():
            agent.sync(**fleet.state_of(agent, False))
        fleet.round(trains=False)
    job = fleet.job()
    assert job["state"] == "failed"
    assert job["reason"] == "3 starts in a row failed; the last one: the start made no step within 270 s"


def test_stopping_waits_for_the_ranks_and_then_frees_the_nodes(fleet: Fleet):
    fleet.run()
    agent = fleet.agents["a"]
    still_there = {"ranks": (agent.rank(agent.job_order(), step=5),)}
    assert fleet.client.post(f"/api/v1/jobs/{fleet.job_id}/stop").json()["job_id"] == fleet.job_id
    fleet.round(parts={"a": still_there})
    fleet.round(parts={"a": still_there})
    assert fleet.job()["state"] == "stopping"
    assert agent.job_order().desired == "stop"
    fleet.round()
    fleet.round()
    assert fleet.job()["state"] == "stopped"
    assert agent.sync().jobs == ()


@pytest.mark.thorough
def test_two_jobs_never_share_a_node(fleet: Fleet):
    fleet.run()
    second = fleet.client.post("/api/v1/jobs", json=another_job("second")).json()["job_id"]
    for _ in range(3):
        fleet.round()
    waiting = fleet.client.get(f"/api/v1/jobs/{second}").json()
    assert (waiting["state"], waiting["reason"]) == (
        "pending",
        "waiting: 4 nodes are ready (4 taken by other jobs), the job needs at least nodes.min 2",
    )
    fleet.add("x", "y")
    fleet.agents["x"].sync()
    fleet.agents["y"].sync()
    fleet.tick()
    assert fleet.client.get(f"/api/v1/jobs/{second}").json()["nodes"] == ["x", "y"]


@pytest.mark.thorough
def test_a_reason_for_too_few_nodes_says_where_the_others_are(fleet: Fleet):
    fleet.run()
    fleet.add("w", "x", "y", "z")
    fleet.agents["z"] = fleet.make_agent("z", pool="spot-b")
    fleet.round(parts={"x": {"notices": (fleet.agents["x"].notice(),)}})
    fleet.agents.pop("y")
    for _ in range(8):
        fleet.round()
    second = fleet.client.post("/api/v1/jobs", json=another_job("second", pools=["spot-a"])).json()["job_id"]
    for _ in range(2):
        fleet.round()
    reason = fleet.client.get(f"/api/v1/jobs/{second}").json()["reason"]
    assert reason == (
        "waiting: 5 nodes are ready (4 taken by other jobs, 1 announced to go, 1 silent, 1 in other pools), "
        "the job needs at least nodes.min 2"
    )


def test_two_replicas_never_handle_one_job_at_a_time(fleet: Fleet):
    fleet.add("a", "b")
    fleet.agents["a"].sync()
    fleet.agents["b"].sync()
    ids = [fleet.client.post("/api/v1/jobs", json=another_job(f"job-{i}")).json()["job_id"] for i in range(20)]
    handled: list[int] = []
    threads = [threading.Thread(target=lambda: handled.append(jobs.tick(fleet.context))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert sum(handled) == len(ids), "each job was claimed by exactly one of them"
    states = [item["state"] for item in fleet.client.get("/api/v1/jobs").json()]
    assert states.count("starting") == 1, "two nodes are enough for one of these jobs only"


def test_a_claim_that_has_expired_is_taken_over_and_its_late_owner_changes_nothing(fleet: Fleet):
    fleet.submit()
    now = fleet.clock()
    with fleet.context.sessions.begin() as session:
        job = session.get_one(JobRow, fleet.job_id)
        job.claim_token, job.claim_expires_at = None, None
    token = jobs.uuid4()
    with fleet.context.sessions.begin() as session:
        job = session.get_one(JobRow, fleet.job_id)
        job.claim_token, job.claim_expires_at = token, now + timedelta(seconds=10)
    assert jobs.tick(fleet.context) == 0
    fleet.clock.advance(11)
    assert jobs.tick(fleet.context) == 1
    with fleet.context.sessions.begin() as session:
        assert jobs.take_back(session, JobRow, key=JobRow.job_id == fleet.job_id, token=token) is None


def test_a_handoff_that_the_agents_open_themselves_makes_the_services_proposal_moot(fleet: Fleet):
    fleet.run()
    fleet.round(parts={"b": {"notices": (fleet.agents["b"].notice(),)}})
    for _ in range(4):
        fleet.round()
    order = fleet.agents["a"].job_order()
    assert order.handoff is not None
    target = roster(fleet.job_id, 2, ParallelLayout(pp=3), "c", "a", "d")
    own = mirror(order.roster, target, fleet.clock(), state=HandoffState.PREPARING)
    assert fleet.agents["a"].sync(handoffs=(own,)).jobs[0].handoff is None
    reasons = {item["proposer"]: item["reason"] for item in fleet.handoffs()}
    assert reasons["service"] == f"the agents opened handoff {own.handoff_id} instead"
    assert [item["superseded"] for item in fleet.handoffs() if item["proposer"] == "service"] == [True]


@pytest.mark.thorough
def test_a_job_whose_agents_are_ahead_is_left_alone_until_they_tell_of_their_handoff(fleet: Fleet):
    fleet.run()
    order = fleet.agents["a"].job_order()
    ahead = fleet.agents["a"].rank(order, step=40, generation=2)
    del fleet.agents["d"]
    for _ in range(9):
        fleet.round(seconds=4, parts={"a": {"ranks": (ahead,), "steps": ()}})
    job = fleet.job()
    assert (job["state"], job["active_generation"]) == ("running", 1)
    target = roster(fleet.job_id, 2, ParallelLayout(pp=3), "a", "b", "c")
    fleet.round(parts={"a": {"ranks": (ahead,), "handoffs": (mirror(order.roster, target, fleet.clock()),)}})
    assert fleet.job()["active_generation"] == 2


@pytest.mark.thorough
def test_a_service_that_was_away_does_not_declare_its_nodes_gone(fleet: Fleet):
    fleet.run()
    fleet.clock.advance(3_600)
    fleet.tick()
    states = {node["state"] for node in fleet.client.get("/api/v1/nodes").json()}
    assert states == {"ready"}
    fleet.round()
    assert fleet.job()["active_generation"] == 1


@pytest.mark.thorough
def test_a_service_that_is_cut_off_from_all_nodes_for_a_while_neither_restarts_nor_suspends_their_job(fleet: Fleet):
    fleet.run()
    for _ in range(40):
        fleet.clock.advance(1)
        fleet.tick()
    assert {node["state"] for node in fleet.client.get("/api/v1/nodes").json()} == {"ready"}
    assert (fleet.job()["state"], fleet.job()["active_generation"]) == ("running", 1)
    fleet.round()
    assert (fleet.job()["state"], fleet.job()["active_generation"]) == ("running", 1)
    for _ in range(80):
        fleet.clock.advance(2)
        fleet.tick()
    assert {node["state"] for node in fleet.client.get("/api/v1/nodes").json()} == {"gone"}, "nobody came back"
    assert fleet.job()["state"] in ("suspending", "suspended")


@pytest.mark.thorough
@pytest.mark.parametrize("cut_s", [27, 100])
def test_a_job_without_nodes_to_go_to_survives_a_cut_of_most_of_its_nodes_for_two_minutes(fleet: Fleet, cut_s: int):
    """After 27 s they are silent, after 100 s they are gone."""
    fleet.run()
    away = {name: fleet.agents.pop(name) for name in ("b", "c", "d")}
    standing = {"ranks": (fleet.agents["a"].rank(fleet.agents["a"].job_order(), step=fleet.step),)}
    for _ in range(cut_s):
        fleet.round(parts={"a": standing | {"steps": ()}})
    assert (fleet.job()["state"], fleet.agents["a"].job_order().desired) == ("running", "run")
    fleet.agents |= away
    for _ in range(3):
        fleet.round()
    assert (fleet.job()["state"], fleet.job()["active_generation"]) == ("running", 1)
    for name in away:
        del fleet.agents[name]
    for _ in range(125):
        fleet.round(parts={"a": standing | {"steps": ()}})
    assert fleet.job()["state"] in ("suspending", "suspended")


def test_a_job_that_fails_by_its_own_fault_is_failed_and_not_started_again(fleet: Fleet):
    fleet.run()
    why = Reason("the loss of step 12 is nan, first on rank 1", "boundary", 1)
    failed = JobFinished(job_id=fleet.job_id, generation=1, step=11, failed=why)
    over = {"ranks": (fleet.agents["b"].rank(fleet.agents["b"].job_order(), stage=RankStage.FINISHED),)}
    fleet.round(parts={"b": over | {"steps": (), "finished": (failed,)}})
    fleet.round()
    job = fleet.job()
    assert (job["state"], job["reason"]) == ("failed", why.text)
    assert [item["generation"] for item in job["generations"]] == [1]
    assert fleet.agents["a"].job_order().desired == "stop"


@pytest.mark.thorough
def test_a_job_that_dies_of_the_same_error_after_the_same_step_three_times_is_failed_with_the_cause(fleet: Fleet):
    fleet.run()
    fleet.round(parts={"a": {"checkpoints": (fleet.checkpoint(10),)}})
    for pid in (17, 18, 19):
        assert fleet.job()["state"] != "failed"
        fleet.crash(ProcessEnd(pid, exit_code=1, reported="ValueError: no item 7"), step=20)
    job = fleet.job()
    assert job["state"] == "failed"
    assert job["reason"].startswith("the same error ended the job 3 times after step 20: rank ")
    assert job["reason"].endswith("ValueError: no item 7")
    assert len(job["generations"]) == 3


def test_a_lost_world_names_the_rank_that_was_killed_although_others_report_first_and_keeps_that_cause(fleet: Fleet):
    fleet.run()
    felt = {"stage": RankStage.FAILED, "step": 4, "reason": MISSES_A_PEER}
    ranks = {
        "a": fleet.agents["a"].rank(fleet.agents["a"].job_order(), **felt),
        "d": fleet.agents["d"].dead(fleet.agents["d"].job_order(), ProcessEnd(9, signal="SIGKILL", step=4), step=4),
    }
    fleet.round(seconds=0.2, trains=False, parts={"a": {"ranks": (ranks["a"],)}})
    assert fleet.job()["state"] == "running"
    fleet.round(trains=False, parts={name: {"ranks": (rank,)} for name, rank in ranks.items()})
    job = fleet.job()
    assert job["state"] == "starting" and job["reason"].startswith("rank 3 on node d is failed: rank process (pid 9)")
    killed = {"what": "rank", "node": "d", "rank": 3, "signal": "SIGKILL", "exit_code": None, "step": 4}
    assert [item["ended_by"] for item in job["generations"]] == [killed, None]
    late = fleet.agents["a"].dead(fleet.agents["a"].job_order(), ProcessEnd(8, signal="SIGSEGV"), step=4)
    fleet.round(trains=False, parts={"a": {"ranks": (late,)}})
    assert fleet.job()["generations"][0]["ended_by"] == killed


@pytest.mark.thorough
def test_ranks_that_miss_a_peer_of_which_nobody_reports_start_again_after_a_moment(fleet: Fleet):
    fleet.run()
    agent = fleet.agents["a"]
    lost = agent.rank(agent.job_order(), stage=RankStage.FAILED, step=4, reason=MISSES_A_PEER)
    for seconds, state in ((1.0, "running"), (0.6, "running"), (0.1, "starting")):
        fleet.round(seconds=seconds, trains=False, parts={"a": {"ranks": (lost,)}})
        assert fleet.job()["state"] == state
    assert fleet.job()["generations"][0]["ended_by"]["what"] == "peer"


@pytest.mark.thorough
def test_a_job_that_gets_further_each_time_goes_on(fleet: Fleet):
    fleet.run()
    fleet.round(parts={"a": {"checkpoints": (fleet.checkpoint(10),)}})
    for step in (20, 21, 22, 23):
        fleet.crash(ProcessEnd(7, exit_code=1, reported="ValueError: no item 7"), step=step)
    assert fleet.job()["state"] == "starting"
    assert len(fleet.job()["generations"]) == 5


@pytest.mark.thorough
def test_a_job_that_ends_with_the_step_of_a_handoff_is_finished_before_the_handoff_is_reported_active(fleet: Fleet):
    fleet.run()
    order = fleet.agents["a"].job_order()
    target = roster(fleet.job_id, 2, ParallelLayout(pp=3), "a", "c", "d")
    opened = mirror(order.roster, target, fleet.clock(), state=HandoffState.CUTTING_OVER)
    done = JobFinished(job_id=fleet.job_id, generation=2, step=1000)
    fleet.round(parts={"a": {"handoffs": (opened,)}, "c": {"finished": (done,)}})
    job = fleet.job()
    assert (job["state"], job["last_step"]) == ("finished", 1000)
    active = opened.model_copy(update={"state": HandoffState.ACTIVE, "mirror_seq": opened.mirror_seq + 1})
    fleet.agents["a"].sync(handoffs=(active,))
    assert (fleet.job()["state"], fleet.handoffs()[0]["state"]) == ("finished", "active")
