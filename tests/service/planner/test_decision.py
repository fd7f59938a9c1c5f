"""The planner: what it chooses, what it refuses and the reasons it gives."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agent.protocol.jobfile import JobFile
from liver_core.layout.parallel import ParallelLayout
from service.planner import losses
from service.planner.decision import decide
from service.planner.feasibility import candidates, violations
from service.planner.inputs import LayoutUse, PlanInputs, PlannerVerdict, PlanNode, World
from service.planner.losses import SPARES_MAX, layouts_by_count, spares, standing_plans
from tests.service.fake_agent import JOB


def job(**changes) -> JobFile:
    return JobFile.model_validate(JOB | {"layouts": {}} | changes)


def nodes(*names: str, slots: int = 1) -> tuple[PlanNode, ...]:
    return tuple(PlanNode(name, slots) for name in names)


def started(inputs: PlanInputs) -> PlanInputs:
    """The inputs once their own decision has been carried out."""
    target = decide(inputs).target
    assert target is not None
    generation = inputs.world.generation + 1 if inputs.world else 1
    use = LayoutUse(len(target.node_ids()), str(target.layout))
    return replace(inputs, world=World(generation, target.layout, target.members), history=(*inputs.history, use))


def test_with_enough_nodes_a_job_starts_on_all_of_them():
    decision = decide(PlanInputs(job(), nodes("a", "b", "c", "d")))
    assert decision.verdict is PlannerVerdict.START and decision.target is not None
    assert decision.target.node_ids() == ("a", "b", "c", "d")


def test_a_node_that_the_cloud_may_take_is_chosen_last_of_its_size_and_no_member_leaves_for_it():
    two = job(nodes={"min": 2, "max": 2}, layouts={"allowed": ["PP2"]})
    warned = (PlanNode("a", 1, is_at_risk=True), *nodes("b", "c", "d"))
    first = started(PlanInputs(two, warned))
    assert first.world is not None and first.world.node_ids() == ("b", "c")
    assert spares(first) == ("d", "a")
    member = replace(first, nodes=(*nodes("a", "d"), PlanNode("b", 1, is_at_risk=True), PlanNode("c", 1)))
    assert decide(member).verdict is PlannerVerdict.STAY
    without_c = decide(replace(member, nodes=tuple(node for node in member.nodes if node.node_id != "c")))
    assert without_c.target is not None and without_c.target.node_ids() == ("b", "a")
    assert "(the cloud may soon take b)" in without_c.reason


def test_too_few_nodes_suspend_with_the_numbers():
    decision = decide(PlanInputs(job(), nodes("a")))
    assert (decision.verdict, decision.reason) == (
        PlannerVerdict.SUSPEND,
        "1 nodes are ready, the job needs at least nodes.min 2",
    )


def test_a_layout_that_fits_nowhere_suspends_with_the_rule():
    decision = decide(PlanInputs(job(layouts={"allowed": ["TP2xPP4"]}), nodes("a", "b", "c", "d")))
    assert decision.reason == "no allowed layout fits 4 nodes with 4 slots"


def test_a_job_with_tied_embeddings_is_never_given_a_pipeline():
    model = JOB["model"] | {"share_embeddings_and_output_weights": True}
    tied = candidates(job(model=model), nodes=4, slots=4, history=())
    assert tied and {layout.pp for layout in tied} == {1}
    assert max(layout.pp for layout in candidates(job(), nodes=4, slots=4, history=())) > 1


def test_pinned_layouts_by_count_go_there_and_back_into_another_layout_in_turn():
    job_file = JobFile.model_validate(JOB)
    four = started(PlanInputs(job_file, nodes("a", "b", "c", "d")))
    assert four.world is not None and str(four.world.layout) == "TP2xPP2xDP1"
    three = started(replace(four, nodes=nodes("a", "c", "d")))
    assert three.world is not None and str(three.world.layout) == "TP1xPP3xDP1"
    again = started(replace(three, nodes=nodes("a", "c", "d", "e")))
    assert again.world is not None and str(again.world.layout) == "TP2xPP1xDP2"
    assert again.world.node_ids() == ("a", "c", "d", "e")
    stays = decide(again)
    assert (stays.verdict, stays.reason) == (
        PlannerVerdict.STAY,
        "TP2xPP1xDP2 on its nodes is still the best choice",
    )
    two = decide(replace(again, nodes=nodes("a", "e")))
    assert two.target is not None and str(two.target.layout) == "TP2xPP1xDP1"


def test_without_prefer_change_a_pinned_count_always_has_its_first_layout():
    rules = JOB["layouts"] | {"prefer_change": False}
    job_file = JobFile.model_validate(JOB | {"layouts": rules})
    history = (LayoutUse(4, "TP2xPP2xDP1"),)
    decision = decide(PlanInputs(job_file, nodes("a", "b", "c", "d"), history=history))
    assert decision.target is not None and str(decision.target.layout) == "TP2xPP2xDP1"


def test_a_node_count_without_a_pinned_layout_uses_fewer_nodes():
    decision = decide(PlanInputs(JobFile.model_validate(JOB | {"nodes": {"min": 2, "max": 8}}), nodes(*"abcdefg")))
    assert decision.target is not None and len(decision.target.node_ids()) == 4


def test_survivors_keep_their_order_and_newcomers_come_after_them():
    first = started(PlanInputs(job(layouts={"allowed": ["TP2xPP2", "PP3"]}), nodes("a", "b", "c", "d")))
    decision = decide(replace(first, nodes=nodes("d", "c", "a", "z")))
    assert decision.target is not None
    assert [member.node_id for member in decision.target.members] == ["a", "c", "d", "z"][
        : len(decision.target.members)
    ]


def test_a_measured_step_time_overrides_the_prediction():
    rules = {"allowed": ["PP4", "DP4"]}
    fast = PlanInputs(
        job(layouts=rules), nodes("a", "b", "c", "d"), step_seconds=(("TP1xPP4xDP1", 0.1), ("TP1xPP1xDP4", 0.9))
    )
    slow = replace(fast, step_seconds=(("TP1xPP4xDP1", 0.9), ("TP1xPP1xDP4", 0.1)))
    targets = [decide(inputs).target for inputs in (fast, slow)]
    chosen = [str(target.layout) for target in targets if target is not None]
    assert chosen == ["TP1xPP4xDP1", "TP1xPP1xDP4"]


def test_a_job_does_not_move_for_a_gain_smaller_than_predictions_are_good():
    first = started(PlanInputs(job(layouts={"allowed": ["PP4", "DP4"]}), nodes("a", "b", "c", "d")))
    assert first.world is not None
    here, there = str(first.world.layout), str(ParallelLayout.parse("DP4" if first.world.layout.pp == 4 else "PP4"))
    inputs = replace(first, step_seconds=((here, 1.0), (there, 0.99)))
    assert decide(inputs).verdict is PlannerVerdict.STAY


@pytest.mark.parametrize(("there_s", "moves"), [(0.98, False), (0.96, True)])
@pytest.mark.parametrize(
    ("here", "there", "reason"),
    [
        ("PP4", "DP4", "TP1xPP1xDP4 on as many nodes gains too little over TP1xPP4xDP1"),
        (
            "PP2",
            "DP4",
            "TP1xPP1xDP4 on 4 of 4 nodes, 0.98 s measured per step is no gain over 1 s measured in TP1xPP2xDP1",
        ),
    ],
)
def test_a_job_moves_for_three_percent_on_as_many_nodes_and_on_more(here, there, reason, there_s, moves):
    layouts = {"allowed": [here, there]}
    alone = started(PlanInputs(job(layouts={"allowed": [here]}), nodes(*"abcd"[: int(here[-1])])))
    times = ((str(ParallelLayout.parse(here)), 1.0), (str(ParallelLayout.parse(there)), there_s))
    decision = decide(replace(alone, job=job(layouts=layouts), nodes=nodes(*"abcd"), step_seconds=times))
    if moves:
        assert decision.verdict is PlannerVerdict.MOVE and decision.target is not None
        assert str(decision.target.layout) == "TP1xPP1xDP4"
    else:
        assert (decision.verdict, decision.reason, decision.target) == (PlannerVerdict.STAY, reason, None)


def test_a_pinned_layout_for_more_nodes_is_moved_to_whatever_it_costs():
    pins = {"pinned": [{"nodes": 2, "layout": "PP2"}, {"nodes": 4, "layout": "PP4"}]}
    two = started(PlanInputs(job(layouts=pins), nodes("a", "b")))
    times = (("TP1xPP2xDP1", 0.1), ("TP1xPP4xDP1", 9.0))
    assert decide(replace(two, nodes=nodes("a", "b", "c", "d"), step_seconds=times)).verdict is PlannerVerdict.MOVE


def test_a_layout_is_spread_over_as_many_nodes_as_the_job_must_use():
    """The job wants two nodes at least; the first alone would hold all ranks."""
    for first, layout in ((4, "PP4"), (3, "PP4"), (2, "PP2")):
        fleet = (PlanNode("a", first), PlanNode("b", 1), PlanNode("c", 1))
        decision = decide(PlanInputs(job(layouts={"allowed": [layout]}), fleet))
        assert decision.target is not None and decision.target.node_ids()[:2] == ("a", "b")


def test_why_nothing_is_taken_where_every_layout_that_fits_has_too_few_ranks():
    inputs = PlanInputs(job(layouts={"allowed": ["PP2", "DP1"]}, nodes={"min": 3, "max": 4}), nodes(*"abc"))
    why = "TP1xPP2xDP1 has 2 ranks, too few to use nodes.min 3 nodes"
    assert decide(inputs).reason == why
    (three,) = layouts_by_count(inputs)
    assert (three.nodes, three.layout, three.reason) == (3, None, why)


def test_a_slot_that_a_node_no_longer_has_is_given_to_another():
    first = started(PlanInputs(job(layouts={"allowed": ["PP4"]}), nodes("a", "b", slots=2)))
    lost = decide(replace(first, nodes=(PlanNode("a", 1), PlanNode("c", 4))))
    assert lost.target is not None
    assert [(member.node_id, member.slot) for member in lost.target.members] == [
        ("a", 0), ("c", 0), ("c", 1), ("c", 2),
    ]  # fmt: skip


def test_a_job_takes_its_own_nodes_first_then_the_larger_and_then_by_name():
    first = started(PlanInputs(job(layouts={"allowed": ["PP2"]}), nodes("z", "y")))
    more = (PlanNode("b", 1), PlanNode("a", 1), PlanNode("c", 2), *nodes("y", "z"))
    decision = decide(replace(first, job=job(layouts={"allowed": ["PP6"]}, nodes={"min": 2, "max": 5}), nodes=more))
    assert decision.target is not None
    assert decision.target.node_ids() == (*(first.world.node_ids() if first.world else ()), "c", "a", "b")


def test_a_node_with_several_slots_holds_several_ranks():
    decision = decide(PlanInputs(job(layouts={"allowed": ["TP2xPP2"]}), nodes("a", "b", slots=2)))
    assert decision.target is not None
    assert [(member.node_id, member.slot) for member in decision.target.members] == [
        ("a", 0), ("a", 1), ("b", 0), ("b", 1),
    ]  # fmt: skip


@settings(deadline=None, max_examples=60)
@given(
    count=st.integers(2, 8),
    slots=st.integers(1, 4),
    layers=st.sampled_from([4, 6, 12, 24]),
    heads=st.sampled_from([2, 4, 6, 8]),
    batch=st.sampled_from([8, 12, 24, 60]),
)
def test_every_single_loss_has_a_plan_that_runs_without_the_node_or_says_why_not(count, slots, layers, heads, batch):
    model = JOB["model"] | {
        "num_layers": layers,
        "num_attention_heads": heads,
        "hidden_size": 48,
        "padded_vocab_size": 240,
    }
    job_file = job(global_batch=batch, nodes={"min": 2, "max": 8}, model=model)
    names = [f"n{index}" for index in range(count)]
    inputs = started(PlanInputs(job_file, nodes(*names, slots=slots)))
    assert inputs.world is not None
    plans = standing_plans(inputs)
    assert [plan.leaving for plan in plans] == [(node_id,) for node_id in inputs.world.node_ids()]
    for plan in plans:
        assert plan.reason and plan.plan_digest == inputs.digest() and plan.parent == inputs.world.generation
        if plan.target is None:
            assert count - 1 < job_file.nodes.min
            continue
        assert plan.leaving[0] not in plan.target.node_ids()
        assert not violations(job_file, plan.target.layout)
        assert len(plan.target.members) == plan.target.layout.world_size == len(set(plan.target.members))


@settings(deadline=None, max_examples=60)
@given(slots=st.integers(1, 64))
def test_every_enumerated_layout_fits_and_breaks_no_rule(slots):
    job_file = job()
    found = candidates(job_file, nodes=slots, slots=slots, history=())
    assert found and len(set(found)) == len(found)
    assert all(layout.world_size <= slots and not violations(job_file, layout) for layout in found)


def test_layouts_by_count_say_for_every_allowed_count_what_runs_or_why_nothing_does():
    inputs = PlanInputs(JobFile.model_validate(JOB | {"nodes": {"min": 1, "max": 4}}), nodes("a", "b", "c", "d"))
    choices = layouts_by_count(inputs)
    assert [(choice.nodes, choice.layout and str(choice.layout)) for choice in choices] == [
        (1, None), (2, "TP2xPP1xDP1"), (3, "TP1xPP3xDP1"), (4, "TP2xPP2xDP1"),
    ]  # fmt: skip
    assert choices[0].reason == "no layout is pinned for 1 node"
    assert choices[1].reason.startswith("TP2xPP1xDP1, ") and choices[1].reason.endswith(
        " s (+-200%) predicted per step"
    )


def test_only_counts_that_a_layout_is_pinned_for_are_looked_at(monkeypatch):
    """A job of a thousand nodes may pin two: what holds its row meanwhile keeps its agents waiting."""
    looked, look = [], losses._layout_for_count
    monkeypatch.setattr(losses, "_layout_for_count", lambda *given: looked.append(given[-1]) or look(*given))
    pinned = [{"nodes": count, "layout": f"DP{count}"} for count in (500, 1_000)]
    wanted = {"nodes": {"min": 1, "max": 1_000}, "layouts": {"pinned": pinned}, "global_batch": 4_000}
    inputs = PlanInputs(JobFile.model_validate(JOB | wanted), nodes(*map(str, range(1_000))))
    found = {choice.nodes: choice.layout for choice in layouts_by_count(inputs)}
    assert (len(found), looked) == (1_000, [500, 1_000])
    assert [count for count, layout in found.items() if layout is not None] == [500, 1_000]


@pytest.mark.parametrize(("ready", "counts"), [(0, [2]), (1, [2]), (3, [2, 3]), (9, [2, 3, 4])])
def test_layouts_by_count_go_from_the_least_to_the_nodes_that_are_there_or_the_most(ready, counts):
    choices = layouts_by_count(PlanInputs(job(), nodes(*"abcdefghi"[:ready])))
    assert [choice.nodes for choice in choices] == counts


def test_a_job_that_runs_nowhere_has_no_standing_plans_and_no_spares():
    assert standing_plans(PlanInputs(job(), nodes("a", "b"))) == ()
    assert spares(PlanInputs(job(), nodes("a", "b"))) == ()


def test_spares_are_free_nodes_for_losses_in_a_row_and_no_more_than_the_world_has_nodes():
    few = started(PlanInputs(job(nodes={"min": 2, "max": 2}), nodes(*"abcde")))
    assert few.world is not None and set(few.world.node_ids()) == {"a", "b"}
    assert spares(few) == ("c", "d")
    many = started(PlanInputs(job(nodes={"min": 2, "max": 8}), nodes(*"abcdefghijklmnopq")))
    assert many.world is not None
    found = spares(many)
    assert len(found) == SPARES_MAX and not set(found) & set(many.world.node_ids())


def test_layouts_by_count_know_the_slots_of_nodes_of_different_sizes():
    fleet = (PlanNode("m", 4), PlanNode("x", 1), PlanNode("y", 2))
    inputs = PlanInputs(job(layouts={"allowed": ["TP2xPP3", "TP2xPP2"]}, nodes={"min": 1, "max": 3}), fleet)
    three, two, one = reversed(layouts_by_count(inputs))
    assert (str(three.layout), str(two.layout), str(one.layout)) == ("TP2xPP3xDP1", "TP2xPP3xDP1", "TP2xPP2xDP1")
    assert " on nodes with 6 slots, " in two.reason and " on nodes with 4 slots, " in one.reason
    enough = layouts_by_count(replace(inputs, job=job(layouts={"allowed": ["PP3", "PP2"]}, nodes={"min": 1, "max": 3})))
    # Whichever two nodes are left, they have three slots.
    assert [str(choice.layout) for choice in enough] == ["TP1xPP3xDP1", "TP1xPP3xDP1", "TP1xPP3xDP1"]
    assert "on nodes" not in enough[1].reason


def test_the_digest_of_the_inputs_is_stable_and_changes_with_every_one_of_them():
    inputs = started(PlanInputs(job(), nodes("a", "b", "c")))
    changed = [
        replace(inputs, job=job(seed=7)),
        replace(inputs, nodes=nodes("a", "b")),
        replace(inputs, world=None),
        replace(inputs, step_seconds=(("TP1xPP3xDP1", 0.5),)),
        replace(inputs, history=()),
    ]
    digests = {item.digest() for item in (inputs, replace(inputs), *changed)}
    assert len(digests) == 6


def test_a_move_to_a_slower_pinned_layout_says_that_it_is_slower():
    pins = {"pinned": [{"nodes": 2, "layout": "PP2"}, {"nodes": 4, "layout": "PP4"}]}
    two = started(PlanInputs(job(layouts=pins), nodes("a", "b")))
    times = (("TP1xPP2xDP1", 0.1), ("TP1xPP4xDP1", 9.0))
    decision = decide(replace(two, nodes=nodes("a", "b", "c", "d"), step_seconds=times))
    assert decision.reason.endswith("; no faster, but pinned for so many nodes")


def test_a_layout_whose_tensor_parallel_groups_lie_on_one_node_each_is_taken_before_one_that_spreads_them():
    choice = decide(PlanInputs(job(layouts={"allowed": ["TP2xDP2", "PP4"]}), nodes(*"abcd")))
    assert choice.target is not None and str(choice.target.layout) == "TP1xPP4xDP1"
    spread = decide(PlanInputs(job(layouts={"allowed": ["TP2xDP2"]}), nodes(*"abcd")))
    assert spread.reason.endswith("; no nodes can hold each TP group whole")
