"""What the service decides is stored once, with alternatives and who asked; a plan shows it and changes nothing."""

from datetime import timedelta
from uuid import UUID

import pytest
from sqlalchemy import func, select

from agent.protocol.values import HandoffState
from liver_core.handoff import Rung
from liver_core.layout import ParallelLayout
from service.db.roster_rows import stored_roster
from service.decisions import operations
from service.decisions.operations import trim_decisions
from service.decisions.tables import DecisionRow
from service.handoffs.tables import HandoffRow
from service.jobs.tables import JobRow
from service.planner.decision import alternatives, decide
from service.planner.inputs import PlanInputs, PlanNode, World
from tests.service.fake_agent import another_job, roster
from tests.service.planner.test_decision import job as job_file
from tests.service.planner.test_decision import nodes
from tests.service.reconcilers.conftest import Fleet, fleet

__all__ = ["fleet"]


def decisions(fleet: Fleet) -> list[dict]:
    """Oldest first."""
    return fleet.client.get(f"/api/v1/jobs/{fleet.job_id}/decisions").json()[::-1]


def test_a_start_is_stored_with_what_it_was_chosen_from_and_who_asked(fleet: Fleet):
    fleet.submit(layouts={})
    fleet.round()
    fleet.add("a", "b", "c", "d")
    for _ in range(4):
        fleet.round()
    waited, start = decisions(fleet)[:2]
    assert (waited["action"], waited["verdict"], waited["layout"]) == ("nothing", "suspend", None)
    assert "0 nodes are ready" in waited["reason"] and waited["alternatives"] == []
    generation = fleet.job()["generations"][0]
    assert (start["action"], start["verdict"], start["asked_by"]) == ("start", "start", "first-operator")
    assert (start["layout"], start["nodes"], start["reason"]) == (
        generation["layout"],
        generation["nodes"],
        generation["reason"],
    )
    best, *others = start["alternatives"]
    assert best["layout"] == start["layout"] and best["nodes"] == 4 and not best["measured"]
    assert others and all(item["nodes"] < 4 or item["step_s"] >= best["step_s"] for item in others)
    assert len(start["inputs_digest"]) == 32 != start["inputs_digest"]


@pytest.mark.thorough
def test_a_decision_that_is_made_again_and_again_is_stored_once(fleet: Fleet):
    fleet.run()
    before = decisions(fleet)
    for _ in range(10):
        fleet.round()
    assert decisions(fleet) == before and len(before) <= 4


def test_notices_and_people_stand_beside_what_they_caused(fleet: Fleet):
    fleet.run()
    fleet.round(parts={"d": {"notices": (fleet.agents["d"].notice(),)}})
    for _ in range(6):
        fleet.round()
    proposed = next(item for item in decisions(fleet) if item["action"] == "propose")
    assert proposed["asked_by"] == "notice of d" and "d" not in proposed["nodes"]
    assert proposed["verdict_reason"].startswith("without d: ")
    fleet.client.post(f"/api/v1/jobs/{fleet.job_id}/pause")
    fleet.round()
    assert (decisions(fleet)[-1]["action"], decisions(fleet)[-1]["asked_by"]) == ("suspend", "first-operator")
    fleet.client.post(f"/api/v1/jobs/{fleet.job_id}/stop")
    for _ in range(3):
        fleet.round()
    assert decisions(fleet)[-1]["action"] == "settle" and fleet.job()["state"] == "stopped"


def test_a_plan_is_what_is_then_decided_and_changes_nothing(fleet: Fleet, context):
    fleet.add("a", "b", "c", "d")
    fleet.submit()
    for agent in fleet.agents.values():
        agent.sync()
    path = f"/api/v1/jobs/{fleet.job_id}/plan"
    plan = fleet.client.get(path).json()
    with context.sessions() as session:
        assert session.get_one(JobRow, fleet.job_id).state == "pending"
        assert session.scalar(select(func.count()).select_from(DecisionRow)) == 0
    fleet.tick()
    made = decisions(fleet)[0]
    for name in ("verdict", "verdict_reason", "layout", "nodes", "alternatives", "inputs_digest", "action", "reason"):
        assert plan[name] == made[name], name
    for _ in range(3):
        fleet.round()
    less = fleet.client.get(path, params={"without": "d"}).json()
    assert less["verdict"] == "move" and less["layout"] == "TP1xPP3xDP1" and less["nodes"] == ["a", "b", "c"]
    assert (less["action"], less["reason"]) == (None, "")
    none = fleet.client.get(path, params={"without": ["b", "c", "d"]}).json()
    assert (none["verdict"], none["layout"], none["alternatives"]) == ("suspend", None, [])
    assert fleet.client.get(path).json()["verdict"] == "stay" and fleet.job()["state"] == "running"


def test_a_plan_without_a_node_that_is_none_of_the_jobs_or_of_an_ended_job_is_refused(fleet: Fleet):
    path = fleet.stopped()
    ended = fleet.client.get(f"{path}/plan")
    assert ended.status_code == 409 and "has ended" in ended.json()["detail"]
    fleet.submit()
    wrong = fleet.client.get(f"/api/v1/jobs/{fleet.job_id}/plan", params={"without": ["a", "nobody"]})
    assert wrong.status_code == 422 and wrong.json()["errors"][0]["field"] == "without"
    for name in ("plan", "decisions"):
        assert fleet.client.get(f"/api/v1/jobs/none/{name}").status_code == 404


def test_only_the_newest_decisions_of_a_job_are_kept(fleet: Fleet, context, monkeypatch):
    monkeypatch.setattr(operations, "KEPT_MAX", 3)
    ids = [fleet.submit(), fleet.submit(**another_job("other"))]
    with context.sessions.begin() as session:
        for number, job_id in enumerate([ids[0]] * 8 + [ids[1]] * 2):
            session.add(
                DecisionRow(
                    job_id=job_id, decided_at=fleet.clock(), action="nothing", reason=str(number), asked_by="",
                    verdict="stay", verdict_reason="", layout=None, nodes=[], alternatives=[], inputs_digest="",
                    what_sha256="",
                )
            )  # fmt: skip
    with context.sessions.begin() as session:
        assert trim_decisions(session) == 5
        left = session.scalars(select(DecisionRow.reason).order_by(DecisionRow.decision_id)).all()
    assert left == ["5", "6", "7", "8", "9"]


def test_alternatives_are_ordered_as_the_planner_chooses_and_bounded():
    inputs = PlanInputs(job_file(nodes={"min": 1, "max": 8}), nodes("a", "b", "c", "d"))
    found, target = list(alternatives(inputs)), decide(inputs).target
    assert target is not None and found[0].layout == str(target.layout)
    assert found == sorted(found, key=lambda item: item.step_s) and len(found) <= 16
    assert {item.nodes for item in found} >= {4, 3}
    big = PlanInputs(job_file(nodes={"min": 1, "max": 8}), tuple(PlanNode(f"n{at}", 8) for at in range(8)))
    assert len(alternatives(big)) == 16
    measured = PlanInputs(
        inputs.job, inputs.nodes, World(1, ParallelLayout(), ()), step_seconds=((found[-1].layout, 0.25),)
    )
    assert {item.step_s for item in alternatives(measured) if item.measured} == {0.25}


@pytest.mark.thorough
def test_a_job_whose_budget_is_spent_stands_until_the_budget_is_raised(fleet: Fleet):
    fleet.add("a", "b", "c", "d")
    fleet.client.put("/api/v1/pools/spot-a/price", json={"price_usd_per_hour": 36.0})
    fleet.submit(budget_usd=1.0)
    for _ in range(4):
        fleet.round()
    assert fleet.job()["state"] == "running"
    # Four nodes cost 4 cents a second.
    for _ in range(8):
        fleet.round(seconds=5.0)
    for _ in range(4):
        fleet.round()
    job = fleet.job()
    assert job["state"] == "suspended" and "of its budget_usd 1" in job["reason"], job
    spent = decisions(fleet)[-1]
    assert "it goes on when budget_usd is raised" in spent["reason"] and "budget" in spent["alerts"][0]
    left = spent["made_from"]["remaining"]
    assert left["usd"] == 0 and left["steps"] > 0 and left["deadline_in_s"] is None
    assert spent["made_from"]["nodes"][0]["usd_per_hour"] == 36.0 and spent["made_from"]["nodes"][0]["nodes"] == 4
    changed = fleet.client.patch(f"/api/v1/jobs/{fleet.job_id}", json={"budget_usd": 100.0})
    assert changed.status_code == 200, changed.text
    for _ in range(5):
        fleet.round()
    assert fleet.job()["state"] == "running"
    plan = fleet.client.get(f"/api/v1/jobs/{fleet.job_id}/plan").json()
    assert plan["alerts"] == [] and {option["nodes"] for option in plan["options"]} == {2, 3, 4}
    assert all(option["usd_per_hour"] == 36.0 * option["nodes"] for option in plan["options"])


def test_a_job_that_weighs_prices_stores_what_its_decision_took_of_its_pools_and_says_it(fleet: Fleet):
    fleet.add("a", "b", "c", "d")
    price = {"price_usd_per_hour": 2.0, "on_demand_usd_per_hour": 6.0}
    fleet.client.put("/api/v1/pools/spot-a/price", json=price)
    fleet.submit(policy={"usd_per_mtok": 1e6})
    for _ in range(8):
        fleet.round(seconds=5.0)
    plan = fleet.client.get(f"/api/v1/jobs/{fleet.job_id}/plan").json()
    market = plan["made_from"]["pools"][0]
    assert (market["pool"], market["usd_per_hour"], market["on_demand_usd_per_hour"]) == ("spot-a", 2.0, 6.0)
    assert market["losses"] == 0 and 3_600 / 1.5 <= market["life_s"] <= 86_400
    assert plan["wanted"]["pools"][0] | {"hold": 0} == {
        "pool": "spot-a", "place": "", "market": "spot", "usd_per_hour": 2.0, "held": 4, "hold": 0
    }  # fmt: skip
    del fleet.agents["d"]
    for _ in range(16):
        fleet.round(seconds=4.0)
    assert fleet.client.get("/api/v1/nodes/d").json()["state"] == "gone"
    after = fleet.client.get(f"/api/v1/jobs/{fleet.job_id}/plan").json()["made_from"]["pools"][0]
    assert after["losses"] == 1 and after["life_s"] <= market["life_s"]
    stored = decisions(fleet)
    assert all(each["made_from"]["pools"][0]["usd_per_hour"] == 2.0 for each in stored)
    assert any("losses in" in each["verdict_reason"] for each in stored), [each["verdict_reason"] for each in stored]


def test_a_decision_says_whether_a_change_costs_what_the_jobs_own_handoffs_lost_or_what_others_did(fleet, context):
    fleet.add("a", "b", "c", "d")
    fleet.client.put("/api/v1/pools/spot-a/price", json={"price_usd_per_hour": 2.0, "on_demand_usd_per_hour": 6.0})
    fleet.submit(policy={"usd_per_mtok": 1e6})
    for _ in range(4):
        fleet.round()

    def taken() -> dict:
        return fleet.client.get(f"/api/v1/jobs/{fleet.job_id}/plan").json()["made_from"]["change"]

    assert taken()["handoffs"] == 0 and "benchmarks" in taken()["source"]
    lost = [(HandoffState.ACTIVE, Rung.LIVE, lost_s) for lost_s in (90.0, 2.5, 3.5, 3.0)]
    others = [
        (HandoffState.ACTIVE, Rung.STOP_AND_COPY, 70.0),
        (HandoffState.BROKEN, Rung.LIVE, 80.0),
        (HandoffState.ACTIVE, Rung.LIVE, None),
    ]
    target = stored_roster(roster(fleet.job_id, 90, ParallelLayout(pp=2), "a", "b"))
    with context.sessions.begin() as session:
        for at, (state, rung, lost_s) in enumerate((*lost, *others)):
            opened = fleet.clock() + timedelta(seconds=at)
            session.add(
                HandoffRow(
                    handoff_id=UUID(int=at + 1), job_id=fleet.job_id, parent=1, generation=90 + at, proposer="service",
                    cause="notice", state=state, rung=rung, source={}, target=target, target_layout="PP2",
                    opened_at=opened, changed_at=opened, recorded_at=opened, measures={"lost_s": lost_s},
                )
            )  # fmt: skip
    assert taken() == {"lost_s": 3.25, "source": "its own handoffs", "handoffs": 4, "is_extrapolated": False}


def test_what_a_job_should_have_is_stored_once_and_again_only_when_it_changes(fleet: Fleet):
    fleet.add("a", "b", "c", "d")
    price = {"price_usd_per_hour": 2.0, "on_demand_usd_per_hour": 6.0}
    fleet.client.put("/api/v1/pools/spot-a/price", json=price)
    fleet.submit(policy={"usd_per_mtok": 1e4, "on_demand": False, "spares_max": 0}, layouts={"allowed": ["TP2xPP2"]})
    for _ in range(10):
        fleet.round(seconds=5.0)
    before = decisions(fleet)
    assert before[-1]["wanted"]["gives_back"] == [] and before[-1]["wanted"]["spares"] == 0
    for _ in range(7):
        fleet.round(seconds=6.0)
    assert decisions(fleet) == before
    fleet.add("e")
    for _ in range(6):
        fleet.round(seconds=6.0)
    after = decisions(fleet)
    assert len(after) == len(before) + 1
    assert after[-1]["wanted"]["gives_back"] == ["e"] and after[-1]["verdict"] == "stay"
    assert "no use for e, which may be given back" in after[-1]["reason"]
    plan = fleet.client.get(f"/api/v1/jobs/{fleet.job_id}/plan").json()
    assert plan["wanted"] == after[-1]["wanted"]
    best = plan["wanted"]["weighed"][0]
    assert (best["nodes"], best["spares"], best["hold"]) == (4, 0, [["spot-a", 4]])
    assert fleet.job()["state"] == "running"
