"""A demo on GPUs is refused at once where there are none."""

from pathlib import Path

import pytest

from deploy.demo.run import EXIT_FAILED, run_demo


def test_a_demo_on_gpus_is_refused_where_there_are_none_before_anything_is_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setattr("deploy.demo.run.Cluster", None)
    assert run_demo(report=tmp_path / "demo.json", keep=False, plain=True, device="H100") == EXIT_FAILED
    said = capsys.readouterr().err
    assert "error: --device H100: this machine has no GPU (nvidia-smi -L, CUDA_VISIBLE_DEVICES); use cpu" in said
    assert not (tmp_path / "demo.json").exists()
