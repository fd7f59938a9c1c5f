"""An agent that is stopped while its machine answers others: the job is not started elsewhere before a minute."""

import pytest

from agent.protocol.sync import NodeAnswers
from liver_core.handoff.generations import next_start
from tests.service.reconcilers.conftest import Fleet

ROUND_S = 3


def lone(fleet: Fleet) -> None:
    """A job on node a alone, which b and c could take over."""
    fleet.add("a")
    fleet.submit(nodes={"min": 1, "max": 1}, layouts={"pinned": [{"nodes": 1, "layout": "TP1"}]})
    for _ in range(3):
        fleet.round()
    fleet.add("b", "c")
    for _ in range(5):
        fleet.round()
    assert fleet.job()["state"] == "running" and fleet.agents["b"].job_order().peers.keys() >= {"a"}
    del fleet.agents["a"]


def pass_by(fleet: Fleet, seconds: int, *, answers: bool) -> None:
    for _ in range(seconds // ROUND_S):
        parts = {}
        for name, agent in fleet.agents.items():
            orders = agent.orders.jobs if agent.orders else ()
            found = [NodeAnswers(job_id=order.job_id, node_id=node) for order in orders for node in order.probe]
            parts[name] = {"answering": tuple(found) if answers else ()}
        fleet.round(parts=parts, seconds=ROUND_S)


def test_a_node_whose_machine_answers_keeps_its_job_for_a_minute(fleet: Fleet):
    lone(fleet)
    pass_by(fleet, 54, answers=True)
    assert fleet.job()["active_generation"] == 1
    assert fleet.client.get("/api/v1/nodes").json()[0]["state"] == "silent"
    pass_by(fleet, 12, answers=True)
    assert fleet.job()["active_generation"] == next_start(1), "one that stays stuck loses it"


def test_a_node_whose_machine_does_not_answer_loses_its_job_as_before(fleet: Fleet):
    lone(fleet)
    pass_by(fleet, 24, answers=False)
    assert fleet.job()["active_generation"] == next_start(1)


@pytest.mark.thorough
def test_what_a_node_outside_the_job_says_does_not_count(fleet: Fleet):
    lone(fleet)
    fleet.add("stranger")
    for _ in range(24 // ROUND_S):
        said = (NodeAnswers(job_id=fleet.job_id, node_id="a"),)
        fleet.round(parts={"stranger": {"answering": said}}, seconds=ROUND_S)
    assert fleet.job()["active_generation"] == next_start(1)
