"""What a job's class is called with, out of the sections of a job file."""

import pytest

from agent.protocol.jobfile import JobFile
from liver_core.layout.experts import ExpertShape
from tests.service.fake_agent import JOB

SETTINGS = {"overlap_grad_reduce": True, "overlap_param_gather": True, "bucket_size": 5000}


def arguments(**changes) -> dict:
    return JobFile.model_validate(JOB | changes).job_args()


def test_what_ddp_says_reaches_the_job_by_megatrons_names():
    expected = {"overlap_grad_reduce": True, "overlap_param_gather": True, "ddp_bucket_size": 5000}
    assert arguments(ddp=SETTINGS) == arguments() | expected
    expected["grad_reduce_in_fp32"] = False
    assert arguments(ddp={**SETTINGS, "grad_reduce_in_fp32": False}) == arguments() | expected


def test_a_job_that_says_nothing_of_ddp_gets_nothing_of_it():
    assert not arguments().keys() & {"overlap_grad_reduce", "overlap_param_gather", "ddp_bucket_size", "bucket_size"}


def test_what_a_model_says_of_experts_reaches_the_job_by_megatrons_names_and_a_dense_one_says_nothing():
    said = {"num_experts": 4, "moe_layer_freq": [0, 1] * 6, "moe_router_topk": 1}
    assert arguments(model=JOB["model"] | said) == arguments() | said
    assert not [name for name in arguments() if name.startswith("moe_")]


def test_the_experts_of_a_model_are_counted_by_megatrons_defaults():
    every = JobFile.model_validate(JOB | {"model": JOB["model"] | {"num_experts": 4}}).model
    assert every.experts() == ExpertShape(4, 512, 2, (True,) * 12)
    third = JobFile.model_validate(JOB | {"model": JOB["model"] | {"num_experts": 4, "moe_layer_freq": 3}}).model
    assert third.experts() == ExpertShape(4, 512, 2, (True, False, False) * 4)
    assert JobFile.model_validate(JOB).model.experts() is None


def test_arguments_win_over_every_section():
    given = {"num_layers": 3, "ddp_bucket_size": 7}
    assert given.items() <= arguments(ddp=SETTINGS, args=given).items()


def test_a_job_file_with_ddp_is_the_same_after_a_round_trip():
    file = JobFile.model_validate(JOB | {"ddp": SETTINGS})
    assert JobFile.model_validate_json(file.model_dump_json()) == file


@pytest.mark.parametrize(("every", "micro_batches", "share"), [(2, 12, 1 / 6), (5, 12, 5 / 12), (12, 12, None)])
def test_a_part_of_a_step_is_a_share_of_it_and_a_step_of_one_part_cannot_be_dropped(every, micro_batches, share):
    rule = JobFile.model_validate(JOB | {"drop_step": {"every_micro_batches": every}}).drop_step
    assert rule is not None and rule.part_of_step(micro_batches) == share


def test_a_layout_with_few_micro_batches_is_no_reason_to_refuse_what_another_can_use():
    layouts = {"layouts": {"allowed": ["DP4", "PP4"]}}
    assert JobFile.model_validate(JOB | layouts | {"drop_step": {"every_micro_batches": 20}}).drop_step is not None


@pytest.mark.parametrize(
    ("path", "rule"),
    [
        ("/checkpoints/tensorboard", ""),
        ("/checkpoints/a/b", ""),
        ("/checkpoints", "must be a folder inside checkpoint.path, /checkpoints,"),
        ("/elsewhere", "must be a folder inside checkpoint.path"),
        ("/checkpoints/../etc", "without '..'"),
        ("tensorboard", "must be a folder inside checkpoint.path"),
    ],
)
def test_event_files_lie_inside_the_place_of_the_checkpoints(path, rule):
    if not rule:
        assert JobFile.model_validate(JOB | {"tensorboard": path}).tensorboard == path
        return
    with pytest.raises(ValueError, match="tensorboard") as error:
        JobFile.model_validate(JOB | {"tensorboard": path})
    assert rule in str(error.value)


def test_event_files_need_a_place_for_checkpoints():
    with pytest.raises(ValueError, match=r"needs checkpoint\.path"):
        JobFile.model_validate(JOB | {"tensorboard": "/checkpoints/tensorboard", "checkpoint": None})
