"""A handoff goes through, or comes to its boundary, and the node that leads it cannot say so."""

from uuid import UUID

from agent.protocol.process_end import ProcessEnd
from agent.protocol.values import HandoffState
from liver_core.handoff import RankStage
from liver_core.layout import ParallelLayout
from service.jobs.rules import TOLD_WITHIN_S
from tests.service.fake_agent import mirror, roster
from tests.service.reconcilers.conftest import Fleet

WORLD = ("a", "b", "c")


def lead_is_lost(fleet: Fleet, *told: str) -> None:
    """d led the handoff to the three others, told of its boundary, and is not heard any more. It named these nodes."""
    fleet.run()
    target = roster(fleet.job_id, 2, ParallelLayout(pp=3), *(told or WORLD))
    d = fleet.agents.pop("d")
    order = d.job_order()
    d.sync(
        ranks=(d.rank(order, step=fleet.step),),
        handoffs=(mirror(order.roster, target, fleet.clock(), proposer="d", state=HandoffState.CUTTING_OVER),),
    )


def trains(fleet: Fleet, *names: str) -> dict[str, dict]:
    """These have a rank in the next world; any other node's rank has only built it."""
    found = {}
    for name in WORLD:
        agent = fleet.agents[name]
        there = name in names
        rank = agent.rank(agent.job_order(), generation=2 if there else 1, step=fleet.step + 1)
        layout = str(ParallelLayout(pp=len(WORLD))) if there else ""
        rank = rank.model_copy(update={"rank": WORLD.index(name), "layout": layout})
        found[name] = {"ranks": (rank,)}
    return found


def wait(fleet: Fleet, *names: str, seconds: float = TOLD_WITHIN_S + 3) -> dict:
    for _ in range(int(seconds)):
        fleet.round(parts=trains(fleet, *names))
    return fleet.job()


def test_a_world_in_which_all_ranks_train_becomes_the_jobs_though_nobody_tells_of_it(fleet: Fleet):
    lead_is_lost(fleet)
    early = wait(fleet, *WORLD, seconds=TOLD_WITHIN_S - 3)
    assert (early["active_generation"], early["state"]) == (1, "running"), "its lead may only be slow"
    job = wait(fleet, *WORLD, seconds=6)
    assert (job["active_generation"], job["state"], job["layout"]) == (2, "running", "TP1xPP3xDP1")
    (row,) = fleet.handoffs()
    assert row["state"] == "active" and "nobody tells" in row["reason"]


def test_a_world_in_which_one_rank_does_not_train_yet_is_waited_for(fleet: Fleet):
    lead_is_lost(fleet)
    assert wait(fleet, "a", "b")["active_generation"] == 1


def test_the_world_in_which_all_ranks_train_is_believed_though_another_target_was_told_of(fleet: Fleet):
    """d was to be in it too, and that was amended before d was lost."""
    lead_is_lost(fleet, "a", "b", "d")
    job = wait(fleet, *WORLD)
    assert (job["active_generation"], job["state"], job["layout"]) == (2, "running", "TP1xPP3xDP1")
    (row,) = fleet.handoffs()
    assert row["state"] == "active" and set(job["nodes"]) == set(WORLD), (row, job)


def test_a_lead_that_comes_back_after_all_tells_what_the_handoff_cost(fleet: Fleet):
    lead_is_lost(fleet)
    assert wait(fleet, *WORLD)["active_generation"] == 2
    (row,) = fleet.handoffs()
    d = fleet.make_agent("d")
    source = roster(fleet.job_id, 1, ParallelLayout(tp=2, pp=2), *WORLD, "d")
    target = roster(fleet.job_id, 2, ParallelLayout(pp=3), *WORLD)
    told = mirror(source, target, fleet.clock(), handoff_id=UUID(row["handoff_id"]), proposer="d", mirror_seq=9)
    d.sync(handoffs=(told.model_copy(update={"measures": told.measures.model_copy(update={"pause_s": 0.4})}),))
    fleet.round(parts=trains(fleet, *WORLD))
    row = next(each for each in fleet.handoffs() if each["handoff_id"] == row["handoff_id"])
    assert (row["state"], row["pause_s"], fleet.job()["active_generation"]) == ("active", 0.4, 2)


def test_a_handoff_that_begins_in_a_world_of_which_nobody_told_shows_that_it_is_the_jobs(fleet: Fleet):
    lead_is_lost(fleet)
    fleet.round(parts=trains(fleet, *WORLD))
    source = roster(fleet.job_id, 2, ParallelLayout(pp=3), *WORLD)
    target = roster(fleet.job_id, 3, ParallelLayout(tp=2), "a", "b")
    opened = mirror(source, target, fleet.clock(), state=HandoffState.PREPARING)
    fleet.round(parts=trains(fleet, *WORLD) | {"a": {"handoffs": (opened,), **trains(fleet, *WORLD)["a"]}})
    assert fleet.job()["active_generation"] == 2
    assert {row["generation"]: row["state"] for row in fleet.handoffs()} == {2: "active", 3: "preparing"}


def test_a_leaver_may_die_past_a_boundary_of_which_only_a_rank_tells(fleet: Fleet):
    """The agent that leads stands still: it has told that all are ready."""
    fleet.run()
    target = roster(fleet.job_id, 2, ParallelLayout(pp=3), *WORLD)
    a, d = fleet.agents.pop("a"), fleet.agents["d"]
    order = a.job_order()
    ready = mirror(order.roster, target, fleet.clock(), state=HandoffState.READY)
    a.sync(ranks=(a.rank(order, step=fleet.step),), handoffs=(ready,))
    killed = ProcessEnd(1, "SIGKILL")
    says = {name: (fleet.agents[name].rank(order, stage=RankStage.CUTTING_OVER, step=fleet.step),) for name in "bc"}
    parts = {name: {"ranks": ranks} for name, ranks in says.items()}
    parts["d"] = {"ranks": (d.dead(order, killed, step=fleet.step),)}
    for _ in range(15):
        fleet.round(parts=parts)
    assert (fleet.job()["active_generation"], fleet.job()["state"]) == (1, "running"), fleet.job()["reason"]
