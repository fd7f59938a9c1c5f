"""What a decision depends on, as it is counted into its digest, and what reasons say of nodes that others have."""

import json
from dataclasses import replace
from hashlib import sha256
from math import inf

from liver_core.layout import Member, ParallelLayout
from service.planner.change_cost import OwnChanges
from service.planner.goals import Remaining
from service.planner.inputs import LayoutUse, OtherNodes, PlanInputs, PlanNode, PoolMarket, World
from tests.service.planner.test_decision import job, nodes


def test_nodes_that_the_job_cannot_use_are_named_with_why():
    assert str(OtherNodes()) == ""
    assert str(OtherNodes(taken=1, leaving=2, silent=3, other_pool=4)) == (
        "1 taken by other jobs, 2 announced to go, 3 silent, 4 in other pools"
    )
    assert str(OtherNodes(silent=3)) == "3 silent"


def test_the_nodes_of_a_world_are_each_named_once_in_rank_order():
    world = World(1, ParallelLayout(dp=4), tuple(Member(name, at) for at, name in enumerate("baba")))
    assert world.node_ids() == ("b", "a")


def test_whatever_a_decision_depends_on_changes_the_digest_and_nothing_else_does():
    world = World(1, ParallelLayout(dp=2), (Member("a", 0), Member("b", 0)))
    whole = PlanInputs(
        job(),
        nodes("a", "b"),
        world,
        (("DP2", 0.5),),
        (("DP2", 0.05),),
        (LayoutUse(2, "DP2"),),
        OtherNodes(),
        Remaining(100, 5.0, 1.0),
        (PoolMarket("a", 1.0),),
        OwnChanges(1.0, 0.5, 3),
        20.0,
        60.0,
    )
    changed = [
        replace(whole, job=job(seed=7)),
        replace(whole, nodes=(PlanNode("a", 1), PlanNode("b", 1, is_at_risk=True))),
        replace(whole, nodes=(PlanNode("a", 1), PlanNode("b", 1, is_overdue=True))),
        replace(whole, world=replace(world, generation=2)),
        replace(whole, world=replace(world, layout=ParallelLayout(pp=2))),
        replace(whole, world=replace(world, members=world.members[::-1])),
        replace(whole, world=None),
        replace(whole, step_seconds=(("DP2", 0.51),)),
        replace(whole, step_errors=(("DP2", 0.06),)),
        replace(whole, history=(LayoutUse(3, "DP2"),)),
        replace(whole, remaining=Remaining(99, 5.0, 1.0)),
        replace(whole, remaining=None),
        replace(whole, markets=(PoolMarket("a", 2.0),)),
        replace(whole, markets=()),
        replace(whole, changes=OwnChanges(1.5, 0.5, 3)),
        replace(whole, changes=None),
        replace(whole, copy_s=30.0),
        replace(whole, copy_s=None),
        replace(whole, served_s=61.0),
        replace(whole, served_s=inf),
    ]
    digests = [each.digest() for each in (whole, *changed)]
    assert len(set(digests)) == len(changed) + 1
    assert all(len(digest) == 32 for digest in digests)
    # Less than a hundredth of a step is chance; nodes of others are for the reason only.
    for same in (
        replace(whole, step_seconds=(("DP2", 0.504),), step_errors=(("DP2", 0.054),)),
        replace(whole, others=OtherNodes(silent=3)),
    ):
        assert same.digest() == whole.digest()


def test_a_digest_is_the_first_half_of_a_hash_of_what_the_inputs_say():
    bare = PlanInputs(job(), (PlanNode("a", 2, zone="x"),), history=(LayoutUse(1, "TP2"),))
    node = {
        "node_id": "a", "slots": 2, "is_at_risk": False, "is_overdue": False, "zone": "x", "device": "", "pool": "",
        "usd_per_hour": None,
    }  # fmt: skip
    said = {
        "world": None,
        "step_seconds": [],
        "step_errors": [],
        "nodes": [node],
        "job": job().model_dump(mode="json"),
        "history": [{"nodes": 1, "layout": "TP2"}],
    }
    assert bare.digest() == sha256(json.dumps(said, sort_keys=True).encode()).hexdigest()[:32]
