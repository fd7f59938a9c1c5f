"""Recipes are executed, and each is taken or refused with the setting that stands in the way."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

RECIPES = """
from megatron.bridge import AutoBridge
from megatron.bridge.training.config import ConfigContainer, DistributedDataParallelConfig, OptimizerConfig


def _common(**settings):
    made = ConfigContainer()
    made.model = AutoBridge.from_hf_pretrained("some/model").to_megatron_provider(load_weights=False)
    made.ddp, made.optimizer = DistributedDataParallelConfig(grad_reduce_in_fp32=False), OptimizerConfig()
    for name, value in settings.items():
        setattr(made.model, name, value)
    return made


def plain_config():
    return _common(tensor_model_parallel_size=8, pipeline_model_parallel_size=4)


def experts_config():
    return _common(expert_model_parallel_size=8, moe_router_enable_expert_bias=True)


def packed_experts_config():
    return _common(expert_model_parallel_size=8, moe_use_legacy_grouped_gemm=True)


def uneven_config():
    return _common(pipeline_model_parallel_size=2, num_layers_in_last_pipeline_stage=3)


def narrow_config():
    made = _common()
    made.mixed_precision = "narrow"
    return made


def needs_more_config(model):
    return _common()


def fails_config():
    raise RuntimeError("not today")
"""
PRECISION = """
class Precision:
    def __init__(self):
        self.fp8_param_gather = True


MIXED_PRECISION_RECIPES = {"narrow": Precision}
"""
MEGATRON = {
    "model_parallel_config.py": "class ModelParallelConfig:\n    fp8_param: bool = False\n",
    "transformer/transformer_config.py": "class TransformerConfig:\n    num_moe_experts: int = None\n",
    "optimizer/optimizer_config.py": "class OptimizerConfig:\n    optimizer: str = 'adam'\n",
    "distributed/distributed_data_parallel_config.py": (
        "class DistributedDataParallelConfig:\n    nccl_ub: bool = False\n    fp8_param_gather: bool = False\n"
    ),
}


@pytest.fixture
def checkouts(tmp_path: Path) -> list[str]:
    texts = {f"megatron/megatron/core/{name}": text for name, text in MEGATRON.items()}
    bridge = "bridge/src/megatron/bridge"
    texts |= {f"{bridge}/recipes/some/model.py": RECIPES, f"{bridge}/training/mixed_precision.py": PRECISION}
    texts |= {f"{bridge}/{folder}/__init__.py": "" for folder in ("recipes", "recipes/some", "perf_recipes")}
    for name, text in texts.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return ["--bridge", str(tmp_path / "bridge"), "--megatron", str(tmp_path / "megatron")]


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tests.recipes.run", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)


def test_each_recipe_is_taken_or_refused_with_the_setting(checkouts: list[str], tmp_path: Path):
    report = tmp_path / "recipes.json"
    done = run(*checkouts, "--report", str(report))
    assert done.returncode == 0, done.stderr
    said = json.loads(report.read_text())
    names = {each["name"].rpartition(".")[2]: list(each["refused"]) for each in said["recipes"]}
    assert names == {
        "plain_config": [],
        "experts_config": [],
        "packed_experts_config": ["moe_use_legacy_grouped_gemm"],
        "uneven_config": ["num_layers_in_last_pipeline_stage"],
        "narrow_config": ["fp8_param_gather", "fp8_param"],
    }
    assert said["kinds"]["library"]["accepted"] == 2 and said["kinds"]["performance"]["recipes"] == 0
    (error,) = said["errors"]
    assert "fails_config: RuntimeError('not today')" in error


def test_a_folder_that_is_no_checkout_is_named(checkouts: list[str], tmp_path: Path):
    checkouts[1] = str(tmp_path)
    done = run(*checkouts, "--report", str(tmp_path / "recipes.json"))
    assert done.returncode == 2 and f"{tmp_path} is no checkout of it: src/megatron/bridge/recipes" in done.stderr
