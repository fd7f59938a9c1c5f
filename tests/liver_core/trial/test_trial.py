"""A trial finds what is wrong with a job, and nothing with one that is right."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from liver_core.layout.fit import EXPERTS_RUN
from tests.cluster.real_ranks import run_alone
from tests.cluster.real_ranks_model import small_gpt
from tests.tiers import sample

pytestmark = [pytest.mark.real, pytest.mark.timeout(180)]
WRONG = "tests.liver_core.trial.wrong_jobs"
PLAN: dict[str, Any] = {
    "global_batch": 4,
    "micro_batch": 1,
    "seed": 7,
    "workdir": None,
    "layouts": ("TP1", "TP2xPP2"),
    "layout": "TP1",
    "steps": 3,
    "drop_every": None,
}


def trial(entrypoint: str, corpus: str, **changes: Any) -> dict[str, dict[str, Any]]:
    """Findings by check of a trial of that job, in order."""
    named = entrypoint if ":" in entrypoint else f"{WRONG}:{entrypoint}"
    plan = {**PLAN, "entrypoint": named, "args": small_gpt(corpus, num_layers=2), **changes}
    lines = run_alone(_trial, plan, timeout_s=120.0)
    return {line["check"]: line for line in lines if "check" in line}


def _trial(plan: dict[str, Any]) -> list[dict[str, Any]]:

    from liver_core.trial.findings import Findings
    from liver_core.trial.single_process import JobTrial, TrialPlan

    lines: list[str] = []
    JobTrial(TrialPlan(**plan), Findings(lines.append)).run()
    return [json.loads(line) for line in lines]


def missing(found: dict[str, dict[str, Any]]) -> dict[str, str]:
    return {check: line["text"] for check, line in found.items() if line["result"] == "missing"}


NARROW = {"precision": "bf16", "grad_reduce_in_fp32": False, "norms_in_fp32": True}


@pytest.mark.parametrize("arguments", [{}, pytest.param(NARROW, marks=pytest.mark.thorough)], ids=["fp32", "16 bits"])
def test_the_reference_job_passes_every_check(corpus: str, arguments: dict[str, Any]):
    args = small_gpt(corpus, num_layers=2, **arguments)
    found = trial("liver_core.training.gpt:GptJob", corpus, drop_every=1, args=args)
    assert {line["result"] for line in found.values()} == {"ok"}
    assert list(found) == [
        "module", "class", "build", "next world", "optimizer", "parameters", "layouts", "builds", "warm_up",
        "initial values", "step", "same batch", "step in parts", "replay", "steps", "same seed", "checkpoint",
        "on_step", "imports",
    ]  # fmt: skip
    assert found["replay"]["values"] == {"rung": "live"}
    assert len(found["steps"]["values"]["losses"]) == 3


MISTAKES = [
    ("my_gtp:MyGpt", "module", "there is no module my_gtp on Python's path; set workdir to its folder"),
    ("GptJobb", "module", "has no GptJobb; its jobs are: AsksGlobals,"),
    ("NotAJob", "module", "NotAJob is not a TrainingJob: it must derive from liver_core.training.job.TrainingJob"),
    ("LossIsNaN", "module", "did you mean LossIsNan?"),
    ("Unfinished", "class", "Unfinished: lacks initial_parameter, step, which every TrainingJob must have"),
    ("OldSignature", "class", "is called as OldSignature(args, *, global_batch, micro_batch, seed), but"),
    ("BuildRaises", "build", "KeyError: 'rope_theta'"),
    ("BuildReturnsTuple", "build", "build returned a tuple; it must return a liver_core.training.job.TrainState"),
    ("BuildDraws", "next world", "build draws random numbers"),
    ("BuildComputes", "next world", "build must not compute with parameters nor initialise them"),
    ("AsksGlobals", "build", "take sizes and ranks from world, and pass pg_collection=world.collection"),
    ("Unmarked", "build", "linear_qkv.weight: is split over tensor-parallel ranks, but not marked so"),
    ("MarkedLate", "build", "was made before the parameters were marked"),
    ("OneStageOnly", "builds", "TP2xPP2: AssertionError: vp_stage must be provided"),
    ("PicksLayouts", "layouts", "TP2xPP2: tp: this kernel is written for TP1"),
    ("DrawsOtherwise", "initial values", "draw from the generator it is given"),
    ("HalfParameters", "initial values", "must be the whole parameter of"),
    ("ReturnsLoss", "step", "returned a float; it must return a StepResult"),
    ("StepsItself", "step", "the loop does the optimizer step"),
    ("LossIsNan", "step", "loss is nan in the first step"),
    ("KeepsGradients", "same batch", "times the gradients the second time"),
    ("DataGoesOn", "same batch", "must depend on its sample ids and the seed only"),
    ("NanLater", "steps", "step 3: loss is nan"),
    ("TensorInSchedule", "steps", "scheduler.state_dict(): must hold plain JSON"),
    ("ForgetfulSchedule", "checkpoint", "scheduler is {'count': 0} after loading, was {'count': 1}"),
    ("HiddenState", "checkpoint", "keep no state outside of model, optimizer, scheduler and small_state"),
]
QUICK = ("NotAJob", "OneStageOnly", "BuildReturnsTuple", "StepsItself", "HiddenState")
"""One for each part of a trial."""


@pytest.mark.parametrize(("job", "check", "says"), sample(MISTAKES, *(each for each in MISTAKES if each[0] in QUICK)))
def test_each_mistake_gets_its_sentence(corpus: str, job: str, check: str, says: str):
    found = trial(job, corpus)
    problems = missing(found)
    assert list(problems) == [check]
    assert says in problems[check]


def test_a_traceback_is_shown_whole(corpus: str):
    found = trial("BuildRaises", corpus)
    assert 'raise KeyError("rope_theta")' in found["build"]["details"]
    assert "layouts" not in found


def test_layouts_that_cannot_run_are_refused_by_name_and_rule(corpus: str):
    found = trial("liver_core.training.gpt:GptJob", corpus, layouts=("TP1", "CP2", "PP2xVPP2", "PP3", "TP8", "DP3"))
    text = missing(found)["layouts"]
    assert "CP2: CP2 is not supported, this version runs TP, PP, DP, EP and ETP only" in text
    assert "VPP2 is not supported" in text
    assert "PP3: num_layers" in text and "TP8" in text
    assert "DP3: global_batch: 4 is not a multiple of micro_batch x DP" in text
    assert found["layouts"]["values"]["supported"] == ["TP1"]


def test_of_a_model_with_experts_it_is_said_what_runs_with_them(corpus: str):
    args = small_gpt(corpus, num_layers=2, num_experts=2)
    found = trial("liver_core.training.gpt:GptJob", corpus, layouts=("DP2xEP2", "TP2xEP2xETP1"), args=args)
    assert not missing(found) and EXPERTS_RUN in found["layouts"]["text"]


@pytest.mark.thorough
def test_a_layout_that_cannot_cut_the_experts_is_refused_by_name(corpus: str):
    args = small_gpt(corpus, num_layers=2, num_experts=2)
    found = trial("liver_core.training.gpt:GptJob", corpus, layouts=("DP2xEP2", "DP3xEP3"), args=args)["layouts"]
    assert "DP3xEP3: ep: EP3 does not divide the 2 experts of a layer" in found["text"]
    assert found["values"]["supported"] == ["DP2xEP2"]


@pytest.mark.thorough
def test_experts_of_which_the_job_file_says_nothing_are_told(corpus: str):
    found = trial("OwnExperts", corpus, layouts=("TP1",))["layouts"]
    assert found["result"] == "warning" and "model.num_experts is not given, and the model has 2" in found["text"]


def test_an_optimizer_that_cannot_be_replayed_is_a_warning_with_the_rung_it_takes(corpus: str):
    found = trial("tests.liver_core.rank.support.stream_jobs:FusedJob", corpus)
    assert not missing(found)
    assert found["replay"]["result"] == "warning"
    assert "stop-and-copy" in found["replay"]["text"] and "fused" in found["replay"]["text"]


@pytest.mark.thorough
def test_random_numbers_in_a_step_are_drawn_alike_from_the_seed_and_from_a_checkpoint(corpus: str):
    found = trial("tests.liver_core.rank.support.stream_jobs:DropoutJob", corpus)
    assert {line["result"] for line in found.values()} == {"ok"}
    assert "with random numbers such as dropout" in found["step"]["text"]


@pytest.mark.thorough
def test_a_job_whose_small_state_holds_nan_passes_every_check(corpus: str):
    found = trial("NothingBestYet", corpus)
    assert not missing(found)


def in_two_ranks(job: str, corpus: str, *, draws: bool = False) -> dict[str, Any]:
    """What is found in TP2, where one rank gave these losses."""
    one_rank = trial("liver_core.training.gpt:GptJob", corpus)["steps"]["values"]
    plan = {**PLAN, "entrypoint": f"{WRONG}:{job}", "args": small_gpt(corpus, num_layers=2), "layout": "TP2"}
    return run_alone(_in_layout, plan, one_rank | {"draws": draws}, timeout_s=120.0)


def _in_layout(plan: dict[str, Any], expected: dict[str, Any]) -> dict[str, Any]:
    from dataclasses import asdict

    from liver_core.trial.other_layout import try_layout
    from liver_core.trial.single_process import TrialPlan

    return asdict(try_layout(TrialPlan(**plan), expected, timeout_s=60.0))


def test_a_job_that_computes_something_else_in_another_layout_is_found(corpus: str):
    found = in_two_ranks("Diverges", corpus)
    assert found["result"] == "missing"
    assert "loss of the first step is" in found["text"] and "the same in every layout" in found["text"]


@pytest.mark.thorough
def test_a_job_that_fails_in_one_rank_of_a_layout_is_shown_with_its_traceback(corpus: str):
    found = in_two_ranks("FailsBesideOthers", corpus)
    assert found["result"] == "missing"
    assert found["text"] == "rank 1: IndexError: no such shard"
    assert 'raise IndexError("no such shard")' in found["details"]


@pytest.mark.thorough
def test_layouts_with_other_random_numbers_are_not_compared(corpus: str):
    found = in_two_ranks("Diverges", corpus, draws=True)
    assert found["result"] == "warning" and "cannot be compared" in found["text"]


@pytest.mark.thorough
def test_a_long_hook_is_a_warning(corpus: str):
    found = trial("SlowHook", corpus)
    assert not missing(found)
    assert found["on_step"]["result"] == "warning" and "every step takes that much longer" in found["on_step"]["text"]


@pytest.mark.thorough
def test_a_validation_is_tried_where_the_job_file_asks_for_one(corpus: str):
    assert trial("Validates", corpus, validates=True)["validate"]["result"] == "ok"
    found = missing(trial("ValidatesWithBackward", corpus, validates=True))
    assert "validate: it changes weights or gradients" in found["validate"]
    found = missing(trial("liver_core.training.gpt:GptJob", corpus, validates=True))
    assert found == {"validate": "validate: GptJob has none, but the job file has validate_every_steps"}


@pytest.mark.parametrize("package", ["agent", "service"])
def test_a_package_that_is_named_like_one_of_liver_is_refused_by_name(tmp_path: Path, corpus: str, package: str):
    (tmp_path / package).mkdir()
    (tmp_path / package / "__init__.py").write_text("")
    (tmp_path / package / "mine.py").write_text("X = 1\n")
    (tmp_path / "named_job.py").write_text(f"from {package}.mine import X\n")
    text = missing(trial("named_job:Job", corpus, workdir=str(tmp_path)))["module"]
    assert f"{package} is the name of a package of LiveR, which ranks import in its place; rename yours" in text


def test_a_module_that_does_not_import_is_named_with_its_line(tmp_path: Path, corpus: str):
    (tmp_path / "broken_job.py").write_text("import json\n\nimport no_such_package\n")
    found = trial("broken_job:Job", corpus, workdir=str(tmp_path))
    text = missing(found)["module"]
    assert "importing broken_job failed: ModuleNotFoundError: No module named 'no_such_package'" in text
    assert f"{tmp_path}/broken_job.py:3" in text
