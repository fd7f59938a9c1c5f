"""Each rule of Megatron that a layout may break, by field, and which layouts are left to choose from."""

from typing import Any

import pytest

from agent.protocol.jobfile import JobFile
from liver_core.layout import ParallelLayout
from liver_core.memory.device_memory import rank_memory
from liver_core.memory.overheads import DeviceOverheads
from service.planner.feasibility import candidates, fits, rule_violations, violations
from service.planner.inputs import LayoutUse, Violation
from service.planner.memory_fit import training_shape
from tests.service.fake_agent import JOB


def job(model: dict[str, Any] | None = None, **changes: Any) -> JobFile:
    """12 layers, 4 heads, a vocabulary of 264, 24 samples a step."""
    return JobFile.model_validate(JOB | {"layouts": {}, "model": JOB["model"] | (model or {})} | changes)


@pytest.mark.parametrize(
    ("layout", "model", "changes", "broken"),
    [
        (ParallelLayout(tp=2, pp=3, dp=4), {}, {}, []),
        (ParallelLayout(pp=5), {}, {}, [("model.num_layers", "12 % PP 5")]),
        (ParallelLayout(tp=8), {}, {}, [("model.num_attention_heads", "4 % TP 8")]),
        (ParallelLayout(tp=4), {"num_query_groups": 2}, {}, [("model.num_query_groups", "2 % TP 4")]),
        (ParallelLayout(tp=2), {"num_query_groups": 2}, {}, []),
        (ParallelLayout(tp=4), {"ffn_hidden_size": 90}, {}, [("model.ffn_hidden_size", "90 % TP 4")]),
        (ParallelLayout(tp=4), {"padded_vocab_size": 266}, {}, [("model.padded_vocab_size", "266 % TP 4")]),
        (ParallelLayout(dp=5), {}, {}, [("global_batch", "24 % micro_batch x DP 5")]),
        (ParallelLayout(dp=24), {}, {"micro_batch": 2}, [("global_batch", "12 % micro_batch x DP 24")]),
        (ParallelLayout(dp=5, pp=5), {}, {}, [("model.num_layers", "12 % PP 5"),
                                              ("global_batch", "24 % micro_batch x DP 5")]),
        (ParallelLayout(cp=2), {}, {}, [("layout with CP2", "this version runs TP, PP, DP, EP and ETP only")]),
        (ParallelLayout(pp=2, vpp=2), {}, {}, [("layout with VPP2", "this version runs TP, PP, DP, EP and ETP only")]),
    ],
    ids=str,
)  # fmt: skip
def test_a_layout_breaks_exactly_the_rules_that_do_not_divide(
    layout: ParallelLayout, model: dict[str, Any], changes: dict[str, Any], broken: list[tuple[str, str]]
):
    found = violations(job(model, **changes), layout)
    assert [item.field for item in found] == [field for field, _ in broken]
    rules = [rule.replace("%", "must be divisible by") for _, rule in broken]
    assert [item.rule.removesuffix(f" of layout {layout}") for item in found] == rules
    assert fits(job(model, **changes), layout, slots=layout.world_size) == (not broken)


def test_a_layout_needs_a_slot_for_every_rank():
    assert fits(job(), ParallelLayout(pp=4), slots=4)
    assert not fits(job(), ParallelLayout(pp=4), slots=3)


def test_tied_embeddings_run_without_a_pipeline_only():
    name = "share_embeddings_and_output_weights"
    tied = job({name: True})
    assert violations(tied, ParallelLayout(tp=2)) == ()
    rule = "tied embeddings run with PP1 only, layout TP1xPP2xDP1 has PP2"
    assert violations(tied, ParallelLayout(pp=2)) == (Violation(f"model.{name}", rule),)


def test_what_a_job_file_names_is_checked_by_its_field():
    pins = [{"nodes": 2, "layout": "PP2"}, {"nodes": 4, "layout": "PP5"}, {"nodes": 5, "layout": "PP6"}]
    found = rule_violations(
        job(layouts={"pinned": [*pins, {"nodes": 1, "layout": "PP2"}, {"nodes": 4, "layout": "PP3"}]})
    )
    assert [(item.field, item.rule) for item in found] == [
        ("layouts.pinned.1.layout", "model.num_layers: 12 must be divisible by PP 5 of layout TP1xPP5xDP1"),
        ("layouts.pinned.2.layout", "nodes 5 must be within nodes 2..4"),
        ("layouts.pinned.3.layout", "nodes 1 must be within nodes 2..4"),
        ("layouts.pinned.4.layout", "TP1xPP3xDP1 has 3 ranks, too few to use 4 nodes"),
    ]
    found = rule_violations(job(layouts={"allowed": ["PP2", "PP5"]}))
    assert [item.field for item in found] == ["layouts.allowed.1"]


@pytest.mark.parametrize(
    ("args", "fields"),
    [
        ({"context_parallel_size": 2}, ["args.context_parallel_size"]),
        ({"context_parallel_size": 1}, []),
        ({"context_parallel_size": "two"}, []),
        ({"virtual_pipeline_model_parallel_size": 2}, ["args.virtual_pipeline_model_parallel_size"]),
        ({"expert_model_parallel_size": 2, "expert_tensor_parallel_size": 2},
         ["args.expert_model_parallel_size", "args.expert_tensor_parallel_size"]),
    ],
)  # fmt: skip
def test_what_no_layout_of_this_version_supports_is_refused_by_field(args: dict[str, Any], fields: list[str]):
    assert [item.field for item in rule_violations(job(args=args))] == fields


EXPERTS = {"num_experts": 8, "moe_ffn_hidden_size": 96, "moe_shared_expert_intermediate_size": 66}


@pytest.mark.parametrize(
    ("layout", "changes", "broken"),
    [
        ("TP2xDP2xEP4xETP1", {}, ""),
        ("TP2xDP2xEP2", {}, ""),
        ("DP3xEP3", {}, "model.num_experts: EP3 does not divide the 8 experts of a layer"),
        ("TP2xDP4xEP2xETP4", {}, "model.num_experts: ETP4 is more than TP2, which was never tried"),
        ("TP2xEP2xETP1", {"moe_ffn_hidden_size": 97}, ""),
        ("TP2xDP2xEP2", {"moe_ffn_hidden_size": 97}, "model.moe_ffn_hidden_size: 97 must be divisible by ETP 2"),
        ("TP4", {}, "model.moe_shared_expert_intermediate_size: 66 must be divisible by TP 4"),
        ("TP2", {"seq_length": 127}, "model.seq_length: 127 must be divisible by TP 2"),
        ("DP2xEP2", {"seq_length": 127}, ""),
    ],
)
def test_experts_are_cut_by_megatrons_rules(layout: str, changes: dict[str, Any], broken: str):
    found = violations(job(EXPERTS | changes), ParallelLayout.parse(layout))
    assert [f"{item.field}: {item.rule}".partition(" of layout")[0] for item in found] == ([broken] if broken else [])


def test_a_dense_model_has_no_experts_to_cut():
    rule = "TP1xPP1xDP2xEP2 splits experts, and the model has none"
    assert violations(job(), ParallelLayout(dp=2, ep=2)) == (Violation("model.num_experts", rule),)


def test_experts_with_tp_need_sequence_parallelism_where_the_job_says_it_has_none():
    without = job(EXPERTS, args={"sequence_parallel": False})
    assert [item.field for item in violations(without, ParallelLayout(tp=2))] == ["args.sequence_parallel"]
    assert violations(without, ParallelLayout(dp=2, ep=2)) == ()
    assert violations(job(args={"sequence_parallel": False}), ParallelLayout(tp=2)) == ()


def test_limits_of_experts_must_divide_them_and_need_a_model_that_has_them():
    limits = {"limits": {"expert_model_parallel": [2, 3], "expert_tensor_parallel": [1, 5]}}
    assert rule_violations(job(EXPERTS, layouts=limits)) == (
        Violation("layouts.limits.expert_model_parallel.1", "3 must divide model.num_experts, 8"),
        Violation("layouts.limits.expert_tensor_parallel.1", "5 must divide model.moe_ffn_hidden_size, 96"),
    )
    wide = {"tensor_parallel_max": 1, "limits": {"expert_tensor_parallel": [1, 2]}}
    assert rule_violations(job(EXPERTS, layouts=wide)) == (
        Violation("layouts.limits.expert_tensor_parallel.1", "2 must be at most layouts.tensor_parallel_max, 1"),
    )
    assert rule_violations(job(layouts=limits)) == (
        Violation("layouts.limits.expert_model_parallel", "needs model.num_experts"),
        Violation("layouts.limits.expert_tensor_parallel", "needs model.num_experts"),
    )


def test_each_cut_of_experts_within_the_limits_is_enumerated_and_no_layout_twice():
    small = {**EXPERTS, "num_layers": 1, "moe_shared_expert_intermediate_size": 64}
    limits = {"expert_model_parallel": [1, 4], "expert_tensor_parallel": [1, 2]}
    found = candidates(job(small, global_batch=2, layouts={"limits": limits}), nodes=1, slots=4, history=())
    assert sorted(names(found)) == [
        "TP1xPP1xDP1", "TP1xPP1xDP2", "TP2xPP1xDP1", "TP2xPP1xDP2", "TP2xPP1xDP2xEP4xETP1", "TP4xPP1xDP1xEP4xETP1",
    ]  # fmt: skip


def names(found: tuple[ParallelLayout, ...]) -> list[str]:
    return [str(layout) for layout in found]


def test_of_the_allowed_layouts_those_that_fit_are_chosen_from_in_their_order():
    allowed = job(layouts={"allowed": ["PP4", "TP2xDP2", "PP2", "DP8"]})
    assert names(candidates(allowed, nodes=4, slots=4, history=())) == ["TP1xPP4xDP1", "TP2xPP1xDP2", "TP1xPP2xDP1"]


def test_without_rules_every_layout_that_divides_is_enumerated_larger_worlds_first():
    small = job({"num_layers": 2}, global_batch=2)
    found = candidates(small, nodes=4, slots=4, history=())
    assert sorted(names(found)) == sorted(
        ["TP1xPP1xDP1", "TP1xPP1xDP2", "TP1xPP2xDP1", "TP1xPP2xDP2", "TP2xPP1xDP1", "TP2xPP1xDP2", "TP2xPP2xDP1",
         "TP4xPP1xDP1"]
    )  # fmt: skip
    sizes = [layout.world_size for layout in found]
    assert sizes == sorted(sizes, reverse=True)


def test_tensor_parallelism_is_enumerated_up_to_the_limit_of_the_job():
    for limit, tensor in ((None, {1, 2, 4}), (2, {1, 2}), (1, {1})):
        rules = {} if limit is None else {"tensor_parallel_max": limit}
        assert {each.tp for each in candidates(job(layouts=rules), nodes=8, slots=8, history=())} == tensor


def test_pinned_layouts_of_a_count_take_turns_after_the_last_one_used_there():
    pinned = job(layouts=JOB["layouts"])
    used: list[LayoutUse] = []
    for expected in ("TP2xPP2xDP1", "TP2xPP1xDP2", "TP2xPP2xDP1", "TP2xPP1xDP2"):
        assert names(candidates(pinned, nodes=4, slots=4, history=tuple(used))) == [expected]
        used += [LayoutUse(4, expected), LayoutUse(3, "TP1xPP3xDP1"), LayoutUse(4, "TP1xPP1xDP4")]
    assert names(candidates(pinned, nodes=3, slots=4, history=tuple(used))) == ["TP1xPP3xDP1"]
    assert candidates(pinned, nodes=4, slots=3, history=()) == (), "has too few slots"
    assert candidates(pinned, nodes=1, slots=8, history=()) == (), "is pinned for other counts only"


def test_a_layout_that_no_device_of_the_job_can_hold_is_no_candidate():
    large = job({"hidden_size": 1536})
    every = candidates(large, nodes=2, slots=4, history=())
    measured = {layout: rank_memory(training_shape(large), layout, DeviceOverheads()).total for layout in every}
    limit = sorted(measured.values())[len(measured) // 2]
    small = large.model_copy(update={"device_bytes": limit})
    left = candidates(small, nodes=2, slots=4, history=())
    assert set(left) == {layout for layout, needed in measured.items() if needed <= limit}
    [refused, *_] = [layout for layout in every if layout not in left]
    [broken] = violations(small, refused)
    assert broken.field == "device_bytes" and str(refused) in broken.rule
