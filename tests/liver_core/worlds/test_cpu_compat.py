"""Every CPU patch is needed by a scenario that has a name, and none is ever applied where there is a GPU."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.real, pytest.mark.timeout(240)]

NEEDED_BY = {
    "current_device": "train",
    "cuda_factories": "train",
    "tensor_type_names": "train",
    "rng_state": "train",
    "synchronize": "checkpoint",
    "tensor_cuda": "Megatron's own way",
    "grouped_gemm_of_transformer_engine": "experts",
    "splits_as_numbers": "experts",
    "streams": "experts",
    "uneven_collectives": "experts over TP",
}


@pytest.fixture(scope="module")
def ablation(corpus: str) -> dict[str, dict[str, str]]:
    """Patch left out -> scenario -> "ok" or the error."""
    root = Path(__file__).parents[3]
    command = [sys.executable, "-W", "ignore", "-m", "tests.liver_core.worlds.ablation", corpus]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=140, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_with_all_patches_every_scenario_works(ablation: dict[str, dict[str, str]]):
    scenarios = ("train", "checkpoint", "Megatron's own way", "experts", "experts over TP")
    assert ablation["nothing"] == dict.fromkeys(scenarios, "ok")


def test_every_patch_has_a_scenario_that_needs_it(ablation: dict[str, dict[str, str]]):
    assert NEEDED_BY.keys() == ablation.keys() - {"nothing", "on a machine with CUDA"}


@pytest.mark.parametrize(("patch", "scenario"), NEEDED_BY.items())
def test_without_the_patch_its_scenario_fails(ablation: dict[str, dict[str, str]], patch: str, scenario: str):
    assert ablation[patch][scenario] != "ok"
    if scenario != "train":
        assert ablation[patch]["train"] == "ok", "the patch is needed earlier than said"


def test_it_refuses_a_machine_with_a_gpu(ablation: dict[str, dict[str, str]]):
    assert "must not be applied on a machine with a GPU" in ablation["on a machine with CUDA"]["apply"]
