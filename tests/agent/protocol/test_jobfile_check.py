"""What is said of a job file with a mistake: field, rule in words, value, a right one, and what was probably meant."""

import re

import pytest

from agent.protocol.jobfile import EXAMPLE
from agent.protocol.jobfile_check import JobFileError, check_job_file
from tests.service.fake_agent import JOB

MISTAKES = [
    ({"name": "my job"}, "name", "did you mean my-job?"),
    ({"layots": {}}, "layots", "is not a known field; did you mean layouts?"),
    ({"stop": {"step": 5}}, "stop.step", "is not a known field; did you mean steps?"),
    ({"num_layers": 4}, "num_layers", "is not a known field here; it belongs under model"),
    ({"every_steps": 4}, "every_steps", "is not a known field here; it belongs under checkpoint"),
    ({"nodes": {"min": 1, "max": 2, "stop": 1}}, "nodes.stop", "it belongs to the top level"),
    ({"stop": {"after": 5}}, "stop.after", "is not a known field; known here: steps"),
    ({"stop": {}}, "stop.steps", "is required, such as steps: 500"),
    ({"stop": {"steps": 0}}, "stop.steps", "must be greater than or equal to 1, such as 500; is 0"),
    ({"global_batch": "many"}, "global_batch", "must be a whole number, such as 16; is 'many'"),
    ({"seed": 1.5}, "seed", "must be a whole number; is 1.5"),
    ({"layouts": {"allowed": "TP2"}}, "layouts.allowed", "must be a list, such as [TP2xPP2, PP3, TP2xDP2]; is 'TP2'"),
    ({"layouts": {"allowed": ["PP3", "tp2pp2"]}}, "layouts.allowed.1", "is 'tp2pp2'; did you mean TP2xPP2?"),
    ({"layouts": {"allowed": ["TP=2,PP=3"]}}, "layouts.allowed.0", "did you mean TP2xPP3?"),
    ({"entrypoint": "pkg.mod.Job"}, "entrypoint", "is 'pkg.mod.Job'; did you mean pkg.mod:Job?"),
    ({"entrypoint": "my/pkg/mod.py:Job"}, "entrypoint", "did you mean my.pkg.mod:Job?"),
    ({"entrypoint": "pkg.mod:Job()"}, "entrypoint", "did you mean pkg.mod:Job?"),
    ({"entrypoint": "agent.mine:Job"}, "entrypoint", "must not begin with agent: it is the name of a package of LiveR"),
    ({"nodes": {"min": 4, "max": 2}}, "nodes.max", "nodes.max 2 must be at least nodes.min 4"),
    ({"micro_batch": 5}, "micro_batch", "global_batch 24 must be divisible by micro_batch 5"),
    (
        {"model": JOB["model"] | {"hidden_size": 130}},
        "model.hidden_size",
        "model.hidden_size 130 must be divisible by model.num_attention_heads 4",
    ),
    (
        {"model": JOB["model"] | {"num_query_groups": 3}},
        "model.num_query_groups",
        "model.num_attention_heads 4 must be divisible by model.num_query_groups 3",
    ),
    ({"layouts": {"allowed": ["TP2xETP1"]}}, "layouts.allowed.0", "ETP1 needs EP above 1"),
    ({"layouts": {"allowed": ["EP2"]}}, "layouts.allowed.0", "does not divide the 1 ranks of a stage"),
    *(
        ({"model": JOB["model"] | said}, f"model.{field}", words)
        for said, field, words in (
            ({"moe_ffn_hidden_size": 64}, "moe_ffn_hidden_size", "needs model.num_experts"),
            ({"moe_layer_freq": 2}, "moe_layer_freq", "needs model.num_experts"),
            ({"num_experts": 4, "moe_router_topk": 5}, "moe_router_topk", "must be at most model.num_experts 4"),
            ({"num_experts": 1}, "moe_router_topk", "2 (Megatron's default) must be at most model.num_experts 1"),
            ({"num_experts": 4, "moe_layer_freq": [1, 0]}, "moe_layer_freq", "num_layers is 12, the list has 2"),
            ({"num_experts": 4, "moe_layer_freq": [0] * 12}, "moe_layer_freq", "must have a 1"),
            (
                {"num_experts": 4, "moe_layer_freq": [2] * 12},
                "moe_layer_freq",
                "must be a whole number of at least 1, or",
            ),
            ({"num_experts": 4, "moe_layer_freq": "1"}, "moe_layer_freq", "must be a whole number of at least 1, or"),
            ({"num_experts": 4, "moe_layer_freq": 0}, "moe_layer_freq", "must be a whole number of at least 1, or"),
        )
    ),
    ({"moe_router_topk": 2}, "moe_router_topk", "is not a known field here; it belongs under model"),
    ({"args": {"num_experts": 8}}, "args.num_experts", "belongs to model.num_experts"),
    ({"name": "x" * 64}, "name", "must have at most 63 characters"),
    ({"checkpoint": {"path": ""}}, "checkpoint.path", "must not be empty, such as /tmp/checkpoints; is ''"),
    ({"deadline": "2030-01-01T00:00:00"}, "deadline", "must have a time zone"),
    ({"args": {"num_layers": 7}}, "args.num_layers", "belongs to model.num_layers"),
    ({"args": {"ffn_hidden_size": 64}}, "args.ffn_hidden_size", "belongs to model.ffn_hidden_size"),
    ({"args": {"ddp_bucket_size": 0}}, "args.ddp_bucket_size", "belongs to ddp.bucket_size"),
]


def problems(change: dict) -> list[tuple[str, str]]:
    with pytest.raises(JobFileError) as caught:
        check_job_file(JOB | change)
    return [(problem.field, problem.rule) for problem in caught.value.problems]


@pytest.mark.parametrize(("change", "field", "words"), MISTAKES)
def test_a_mistake_is_named_with_its_field_its_rule_and_what_was_meant(change: dict, field: str, words: str):
    ((_, rule),) = [found for found in problems(change) if found[0] == field]
    assert words in rule


@pytest.mark.parametrize("change", [change for change, _, _ in MISTAKES] + [{"environment": {"A-B": "1"}}])
def test_no_rule_shows_a_regular_expression_or_a_word_of_the_library(change: dict):
    for _, rule in problems(change):
        assert not re.search(r"\\w|\[A-Z|\(\?:|Input should|String should|pattern|pydantic", rule)


def test_a_guess_is_made_only_where_it_would_be_accepted():
    assert "did you mean" not in problems({"layouts": {"allowed": ["2x2"]}})[0][1]
    assert "did you mean" not in problems({"entrypoint": "Job"})[0][1]
    assert "did you mean" not in problems({"name": "***"})[0][1]


def test_a_value_that_may_be_a_secret_is_not_repeated():
    for change in ({"environment": {"KEY": ["hunter2"]}}, {"environment": "hunter2"}, {"args": "hunter2"}):
        for _, rule in problems(change):
            assert "hunter2" not in rule


def test_a_long_value_is_cut():
    assert len(problems({"entrypoint": "x y" * 1_000})[0][1]) <= 500


def test_numbers_in_an_environment_become_text_and_truth_values_are_refused():
    found = check_job_file(JOB | {"environment": {"OMP_NUM_THREADS": 1, "RATIO": 0.5}})
    assert found.environment == {"OMP_NUM_THREADS": "1", "RATIO": "0.5"}
    assert problems({"environment": {"FLAG": True}})[0][1].startswith("must be text")


@pytest.mark.parametrize("content", [None, [], "text", 3])
def test_what_is_no_mapping_is_refused_as_a_whole(content: object):
    with pytest.raises(JobFileError, match="must be a mapping of fields"):
        check_job_file(content)


def test_the_example_that_errors_show_is_a_right_job_file():
    check_job_file(EXAMPLE)
