"""`liver plan memory`: what a person sees, and how it refuses."""

import json

import pytest

pytest.importorskip("typer")

from typer.testing import CliRunner

from service.cli.main import app

JOB = """
name: llama-7b
entrypoint: train:Job
global_batch: 96
micro_batch: 1
nodes: {min: 1, max: 8}
model:
  {num_layers: 32, hidden_size: 4096, num_attention_heads: 32, ffn_hidden_size: 11008, padded_vocab_size: 32000,
   seq_length: 4096}
stop: {steps: 500}
"""


def _plan(tmp_path, *arguments: str, more: str = "", layouts: tuple[str, str] = ("TP2xDP4", "TP2xDP2")):
    path = tmp_path / "job.yaml"
    path.write_text(JOB + more)
    source, target = layouts
    given = ["plan", "memory", "--job", str(path), "--from", source, "--to", target, *arguments]
    return CliRunner().invoke(app, given)


def test_the_plan_says_what_waits_where(tmp_path):
    done = _plan(tmp_path, "--device-bytes", "81559MiB", "--json")
    assert done.exit_code == 0, done.output
    plan = json.loads(done.stdout)
    assert plan["fits"] is True
    assert [world["layout"] for world in plan["worlds"]] == ["TP2xPP1xDP4", "TP2xPP1xDP2"]
    assert plan["waits"] == ["master", "exp_avg", "exp_avg_sq", "weights"]
    assert plan["choices"][1]["device_bytes"] > plan["device_bytes"] >= plan["choices"][2]["device_bytes"]
    shown = _plan(tmp_path, "--device-bytes", "81559MiB").stdout
    assert "grad come at the cutover" in shown and "context of the stream relay" in shown


def test_the_size_of_a_device_may_stand_in_the_job_file(tmp_path):
    assert _plan(tmp_path).exit_code == 1
    assert "--device-bytes" in _plan(tmp_path).stderr
    assert _plan(tmp_path, more="device_bytes: 85520809984\n").exit_code == 0


@pytest.mark.parametrize(
    ("arguments", "layouts", "said"),
    [
        (("--device-bytes", "80 parsecs"), ("DP4", "DP2"), "--device-bytes"),
        (("--device-bytes", "80GB"), ("TP2xQP4", "DP2"), "--from"),
        (("--device-bytes", "80GB"), ("DP4", "PP5"), "model.num_layers: 32 must be divisible by PP 5"),
    ],
)
def test_what_cannot_be_read_is_refused_by_its_name(tmp_path, arguments, layouts, said):
    done = _plan(tmp_path, *arguments, layouts=layouts)
    assert done.exit_code != 0
    assert said in done.stderr


def test_a_plan_that_does_not_fit_has_a_status_of_its_own(tmp_path):
    done = _plan(tmp_path, "--device-bytes", "24GB", layouts=("DP4", "DP2"))
    assert done.exit_code == 1
    assert "does not fit" in done.stdout
