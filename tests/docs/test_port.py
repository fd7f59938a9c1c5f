"""docs/port.md and its example: the example is a whole job that passes a trial and is handed over."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from agent.protocol.jobfile import JobFile
from liver_core.layout.experts import ExpertShape
from liver_core.layout.fit import EXPERTS_RUN
from service.planner.feasibility import candidates, rule_violations
from service.planner.memory_fit import training_shape

yaml = pytest.importorskip("yaml")

ROOT = Path(__file__).resolve().parent.parent.parent
EXAMPLES = ROOT / "docs" / "examples"
PAGE = (ROOT / "docs" / "port.md").read_text(encoding="utf-8")


def test_the_job_file_beside_the_example_is_valid():
    job = JobFile.model_validate(yaml.safe_load((EXAMPLES / "job.yaml").read_text()))
    assert job.entrypoint == "my_gpt:MyGpt"


def test_the_example_in_16_bits_is_valid_and_known_to_planner_and_job():
    job = JobFile.model_validate(yaml.safe_load((EXAMPLES / "bf16.yaml").read_text()))
    shape = training_shape(job).model
    assert (shape.dtype, shape.gradients_fp32) == ("bfloat16", False)
    pytest.importorskip("torch")
    from liver_core.training.gpt import GptArguments

    arguments = GptArguments(**job.job_args())
    assert (arguments.precision, arguments.grad_reduce_in_fp32, arguments.norms_in_fp32) == ("bf16", False, True)


def test_the_example_with_experts_is_valid_and_known_to_planner_and_job():
    job = JobFile.model_validate(yaml.safe_load((EXAMPLES / "moe.yaml").read_text()))
    assert rule_violations(job) == ()
    found = candidates(job, nodes=4, slots=4, history=())
    assert {(layout.ep, layout.expert_tp) for layout in found} == {(1, 1), (2, 1), (4, 1)}
    assert training_shape(job).model.experts == ExpertShape(8, 1024, 2, (True, False) * 6, shared_ffn=1024)
    pytest.importorskip("torch")
    from liver_core.training.gpt import GptArguments

    assert GptArguments(**job.job_args()).num_experts == 8


def test_what_may_have_experts_is_said_as_submit_and_a_trial_say_it():
    assert EXPERTS_RUN in PAGE


def test_every_python_name_of_ours_in_the_page_exists():
    """`liver_core.a.b` is a file, and in `liver_core.a.b.Name` it defines that name."""
    found = set(re.findall(r"liver_core((?:[./]\w+)+)", PAGE))
    assert found
    for dotted in found:
        *places, last = re.split(r"[./]", dotted.removesuffix(".py"))[1:]
        folder = ROOT.joinpath("liver_core", *places)
        if (folder / f"{last}.py").is_file():
            continue
        assert re.search(rf"^(def|class) {last}\b", folder.with_suffix(".py").read_text(), re.MULTILINE), dotted


def test_the_page_names_every_part_of_the_contract():
    contract = ast.parse((ROOT / "liver_core" / "training" / "job.py").read_text())
    [job] = [node for node in contract.body if isinstance(node, ast.ClassDef) and node.name == "TrainingJob"]
    names = [node.name for node in job.body if isinstance(node, ast.FunctionDef)]
    assert len(names) > 5
    assert [name for name in names if f"`{name}" not in PAGE] == []


@pytest.mark.thorough
@pytest.mark.real
@pytest.mark.timeout(180)
def test_the_example_passes_its_trial_in_one_process_and_in_four():
    command = [sys.executable, "-m", "service.cli.main", "jobs", "try", "docs/examples/job.yaml"]
    options = ["--workdir", "docs/examples", "--layout", "TP2xPP2", "--json"]
    done = subprocess.run([*command, *options], cwd=ROOT, capture_output=True, text=True, timeout=150)
    assert done.returncode == 0, done.stdout + done.stderr
    answer = json.loads(done.stdout)
    assert {found["result"] for found in answer["findings"]} == {"ok"}
    assert answer["findings"][-1]["check"] == "other layout"
    assert answer["step_s"] > 0 and answer["state_bytes"] > 0


@pytest.mark.thorough
@pytest.mark.real
@pytest.mark.timeout(180)
def test_the_example_is_handed_over_live():
    from liver_core.handoff.messages import Rung
    from tests.cluster.rank_cluster import RankSetup
    from tests.liver_core.rank.support.chain import World, run_chain
    from tests.liver_core.rank.support.undisturbed_runs import run_undisturbed

    job = JobFile.model_validate(yaml.safe_load((EXAMPLES / "job.yaml").read_text()))
    arguments = job.job_args() | {"text": str(EXAMPLES / "my_gpt.py")}
    setup = RankSetup(arguments, job="docs.examples.my_gpt:MyGpt")
    chain = run_chain(setup, (World("PP2", "ab"), World("TP2", "bc")), rung=Rung.LIVE)
    undisturbed = run_undisturbed(setup, "PP2", max(chain.losses()))
    for step, loss in chain.losses().items():
        assert loss == pytest.approx(undisturbed.losses()[step], abs=2e-5)
