"""Who ended a world of a job at the end of a handoff, by what agents and the lead report of it. Healthy nodes are not
blamed."""

from dataclasses import replace

import pytest

from agent.protocol.process_end import ProcessEnd
from agent.protocol.values import HandoffState
from liver_core.handoff import RankStage, Reason
from liver_core.layout import Roster
from tests.service.fake_agent import MISSES_A_PEER, mirror
from tests.service.reconcilers.conftest import Fleet

KILLED = ProcessEnd(7, signal="SIGKILL", step=5)


@pytest.fixture
def grown(fleet: Fleet) -> tuple[Fleet, Roster]:
    """A job on a, b and c that grows onto d: the handoff is past its boundary."""
    fleet.add("a", "b", "c")
    fleet.submit()
    for _ in range(4):
        fleet.round()
    assert fleet.job()["state"] == "running"
    fleet.add("d")
    while not any(each["state"] == "proposed" for each in fleet.handoffs()):
        fleet.round()
    fleet.round()
    order = fleet.agents["a"].job_order()
    assert order.handoff is not None and set(order.handoff.target.node_ids()) == set("abcd")
    return fleet, replace(
        fleet.agents["a"].roster(),
        generation=2,
        layout=order.handoff.target.layout,
        members=order.handoff.target.members,
    )


def says(fleet: Fleet, target: Roster, state: HandoffState, **more) -> dict:
    """What the lead mirrors."""
    order = fleet.agents["a"].job_order()
    assert order.handoff is not None
    made = mirror(order.roster, target, fleet.clock(), handoff_id=order.handoff.handoff_id, state=state, **more)
    return {"handoffs": (made,)}


def misses(fleet: Fleet, *nodes: str) -> dict[str, dict]:
    """The ranks of these nodes can go on in no world, since they get no answer."""
    lost = {"stage": RankStage.BROKEN, "step": fleet.step, "reason": MISSES_A_PEER}
    return {node: {"ranks": (fleet.agents[node].rank(fleet.agents[node].job_order(), **lost),)} for node in nodes}


def ended_by(fleet: Fleet) -> tuple[str, str | None, int | None, str | None]:
    """Of the first generation."""
    first = next(each for each in fleet.job()["generations"] if each["generation"] == 1)
    found = first["ended_by"]
    return found["what"], found["node"], found["rank"], found["signal"]


def test_a_newcomer_that_was_killed_at_the_switch_is_the_cause_and_not_who_was_the_last_to_report(grown):
    fleet, target = grown
    cuts_over = says(fleet, target, HandoffState.CUTTING_OVER)
    (broke,) = says(fleet, target, HandoffState.BROKEN, reason=MISSES_A_PEER)["handoffs"]
    fleet.round(trains=False, parts={"a": misses(fleet, "a")["a"] | cuts_over, "b": misses(fleet, "b")["b"]})
    order = fleet.agents["a"].job_order()
    end = Reason(str(KILLED), "switch", 3, cause=KILLED.cause(None))
    died = (
        fleet.agents["a"]
        .rank(order)
        .model_copy(update={"generation": 2, "rank": 3, "stage": RankStage.FAILED, "reason": end, "ended": KILLED})
    )
    parts = misses(fleet, "a", "b") | {"d": {"ranks": (died,)}}
    for seconds in (1.0, 1.0, 0.1):
        fleet.round(seconds=seconds, trains=False, parts=parts)
    assert ended_by(fleet) == ("rank", "d", 3, "SIGKILL")
    (attempt,) = fleet.handoffs()
    assert attempt["reason"].startswith("the job starts again: ") and attempt["ended_by"]["signal"] == "SIGKILL"
    fleet.round(trains=False, parts={"a": {"handoffs": (broke,)}})
    (attempt,) = fleet.handoffs()
    assert attempt["ended_by"]["node"] == "d", "what its lead says late changes nothing"


def test_where_only_the_lead_says_that_the_switch_failed_the_node_that_is_not_heard_is_the_cause(grown):
    """A survivor's machine fell: ranks have ended by then, and only missed it."""
    fleet, target = grown
    fallen = fleet.agents.pop("c")
    broke = says(fleet, target, HandoffState.BROKEN, reason=MISSES_A_PEER)
    fleet.round(trains=False, parts={"a": broke})
    for _ in range(30):
        fleet.round(trains=False)
        if fleet.job()["generations"][-1]["ended_by"] is not None:
            break
    assert fallen.node_id == "c"
    assert ended_by(fleet) == ("node", "c", None, None)


def test_a_newcomers_machine_that_fell_at_the_switch_is_the_cause(grown):
    fleet, target = grown
    fleet.agents.pop("d")
    broke = says(fleet, target, HandoffState.BROKEN, reason=MISSES_A_PEER)
    parts = misses(fleet, "a", "b")
    fleet.round(trains=False, parts=parts | {"a": parts["a"] | broke})
    for _ in range(30):
        fleet.round(trains=False, parts=misses(fleet, "a", "b") if fleet.job()["state"] == "running" else None)
    assert ended_by(fleet)[:2] == ("node", "d")


def test_of_an_attempt_that_was_superseded_and_broke_all_the_same_the_cause_is_told(grown):
    """Before it could end otherwise, a rank was killed. The end of the world names it, as its attempt does."""
    fleet, target = grown
    text = "superseded: d will go too, one plan is made for all"
    why = Reason(text, "superseded", 1, node="b", cause=KILLED.cause(None))
    fleet.round(trains=False, parts={"a": says(fleet, target, HandoffState.BROKEN, reason=why, superseded=True)})
    attempt = next(each for each in fleet.handoffs() if each["superseded"])
    assert (attempt["state"], attempt["ended_by"]["node"], attempt["ended_by"]["signal"]) == ("broken", "b", "SIGKILL")
    fleet.round(seconds=1.0, trains=False)
    assert ended_by(fleet) == ("rank", "b", 1, "SIGKILL")
