"""A process that others are forked from starts no CUDA, not even to ask whether there is a GPU."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from liver_core.device.unasked import CONTROL, cuda_unasked, gpu_is_here
from tests.tiers import sample

PRELOADED = """
import torch
torch.cuda.is_available = lambda: (_ for _ in ()).throw(AssertionError("torch was asked for a GPU"))
asked = torch.cuda.is_available
import {module}
assert torch.cuda.is_available is asked
"""


@pytest.fixture
def built_for_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", "13.0")


@pytest.mark.usefixtures("built_for_cuda")
@pytest.mark.parametrize(
    ("environment", "here"),
    [
        ({}, True),
        ({"CUDA_VISIBLE_DEVICES": "GPU-a,GPU-b"}, True),
        ({"CUDA_VISIBLE_DEVICES": ""}, False),
        ({"CUDA_VISIBLE_DEVICES": "-1"}, False),
    ],
)
def test_a_gpu_is_here_where_the_driver_is_loaded_and_not_all_of_them_are_hidden(
    tmp_path: Path, environment: dict[str, str], here: bool
):
    assert not gpu_is_here(environment, tmp_path)
    (tmp_path / CONTROL).touch()
    assert gpu_is_here(environment, tmp_path) is here


def test_a_torch_without_cuda_uses_no_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.version, "cuda", None)
    (tmp_path / CONTROL).touch()
    assert not gpu_is_here({}, tmp_path)


def test_torch_answers_for_itself_again_after_the_block():
    asked = torch.cuda.is_available
    with pytest.raises(KeyError), cuda_unasked() as here:
        assert torch.cuda.is_available() is here
        raise KeyError
    assert torch.cuda.is_available is asked


@pytest.mark.real
@pytest.mark.parametrize(
    "module", sample(["agent.worker.preload", "tests.cluster.real_ranks_preload"], "agent.worker.preload")
)
def test_nothing_that_is_preloaded_asks_for_a_gpu(module: str):
    done = subprocess.run(
        [sys.executable, "-c", PRELOADED.format(module=module)], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
