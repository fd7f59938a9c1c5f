"""`liver simulate`: a trace from a file, what a person sees, what a program reads, and how it refuses."""

import json
from pathlib import Path

import pytest

pytest.importorskip("typer")

from typer.testing import CliRunner

from service.cli.main import app

JOB = """
name: gpt
entrypoint: train:Job
global_batch: 24
micro_batch: 1
nodes: {min: 2, max: 6}
model:
  {num_layers: 12, hidden_size: 768, num_attention_heads: 12, padded_vocab_size: 50304, seq_length: 1024}
stop: {steps: 500}
"""
TRACE = "0,add,a\n0,add,b\n0,add,c\n0,add,d\n600000,remove,b\n1200000,add,e\n1800000,remove,a\n"


def run(tmp_path: Path, *more: str, trace: str = TRACE, job: str = JOB):
    (tmp_path / "trace.csv").write_text(trace)
    (tmp_path / "job.yaml").write_text(job)
    given = ["simulate", "--trace", str(tmp_path / "trace.csv"), "--job", str(tmp_path / "job.yaml"), *more]
    return CliRunner().invoke(app, given)


def test_a_program_reads_goodput_bounds_causes_and_baselines(tmp_path) -> None:
    found = run(tmp_path, "--json", "--change", "2", "--html", str(tmp_path / "page.html"))
    assert found.exit_code == 0, found.output
    facts = json.loads(found.stdout)
    assert 0.5 < facts["goodput"] < 1
    assert 0 <= facts["regret_victim_oracle"] < 0.5
    assert set(facts["baselines"]) == {"hold_all", "reactive", "checkpoint_restart"}
    assert sum(facts["tokens_lost_by"].values()) == pytest.approx(facts["ideal_tokens"] - facts["tokens"], rel=1e-6)
    page = (tmp_path / "page.html").read_text()
    assert "<svg" in page and "http" not in page and "<script" not in page


def test_a_person_sees_a_table_and_that_the_cost_of_a_change_is_a_guess(tmp_path) -> None:
    found = run(tmp_path)
    assert found.exit_code == 0, found.output
    assert "checkpoint restart" in found.stdout and "two CPU cores" in found.stdout


def test_with_the_machines_the_answer_says_which_handoffs_and_restarts_there_were(tmp_path) -> None:
    found = run(tmp_path, "--machines", "--json", "--unannounced", "1")
    assert found.exit_code == 0, found.output
    facts = json.loads(found.stdout)
    # The nodes that go at 600 s and 1,800 s are missed; the one that comes at 1,200 s is brought in by a handoff. The
    # trace ends a minute after its last event, before the restart that this one costs has made a step.
    assert facts["enacted"] == {"restart active": 1, "restart open": 1, "start active": 1, "stop_and_copy active": 1}
    assert (facts["handoffs_refused"], facts["gave_up"]) == (0, "")
    assert facts["goodput"] < json.loads(run(tmp_path, "--json", "--unannounced", "1").stdout)["goodput"]
    shown = run(tmp_path, "--machines", "--unannounced", "1").stdout
    assert "1 restart active, 1 restart open, 1 start active, 1 stop and copy active" in shown
    assert "enacted" not in run(tmp_path).stdout


def test_with_the_machines_the_job_file_says_whether_there_are_checkpoints_and_parts_of_a_step(tmp_path) -> None:
    def facts(*lines: str, more: tuple[str, ...] = ()):
        batch = JOB.replace("global_batch: 24", "global_batch: 36000")
        found = run(tmp_path, "--machines", "--json", "--gang", "2", *more, job=batch + "\n".join(lines))
        assert found.exit_code == 0, found.output
        return json.loads(found.stdout)

    silent = ("--unannounced", "1")
    never, often = facts(more=silent), facts("checkpoint: {path: /tmp/gpt, every_steps: 1}", more=silent)
    assert never["tokens_lost_by"]["lost_work"] > 2 * often["tokens_lost_by"]["lost_work"] > 0
    announced = ("--unannounced", "0", "--notice", "25")
    whole, parted = facts(more=announced), facts("drop_step: {every_micro_batches: 100}", more=announced)
    assert not any(what.startswith("drop_step") for what in whole["enacted"])
    assert parted["enacted"].get("drop_step active", 0) > 0, parted["enacted"]


def test_with_the_machines_the_answer_says_what_of_the_job_file_is_not_followed(tmp_path) -> None:
    total = JOB + "prefer: total\n"
    found = json.loads(run(tmp_path, "--machines", "--json", job=total).stdout)["not_followed"]
    assert found == ["prefer: total: in a replay every rung costs the same, and the shortest pause is taken"]
    assert "not followed" in run(tmp_path, "--machines", job=total).stdout
    for given in (run(tmp_path, "--machines", "--json"), run(tmp_path, "--json", job=total)):
        assert json.loads(given.stdout)["not_followed"] == []


def test_the_policy_of_the_job_file_is_followed_but_for_what_is_asked(tmp_path) -> None:
    """Its tokens are worth less than any node costs."""
    own = JOB + "policy: {usd_per_mtok: 0.000001}\n"
    rich = ("--usd-per-mtok", "3000")
    plain, poor, asked = (
        json.loads(run(tmp_path, "--json", "--change", "2", *more, job=job).stdout)["tokens"]
        for job, more in ((JOB, rich), (own, ()), (own, rich))
    )
    assert poor == 0 and asked == plain > 0


@pytest.mark.parametrize(
    ("given", "rule"),
    [
        ({"trace": "0,add,a\n0,add,a\n"}, "row 2: a came twice"),
        ({"trace": "hello\n"}, "line 1 is of no known format"),
        ({"job": JOB.replace("global_batch: 24", "global_batch: 0")}, "global_batch"),
    ],
)
def test_what_cannot_be_read_is_refused_by_name(tmp_path, given, rule) -> None:
    found = run(tmp_path, **given)
    assert found.exit_code != 0
    assert rule in found.output


def test_a_gang_of_more_nodes_than_the_job_can_use_is_refused(tmp_path) -> None:
    assert run(tmp_path, "--gang", "6").exit_code == 0
    found = run(tmp_path, "--gang", "7")
    assert found.exit_code == 1
    assert "--gang must be at most 6, the most nodes that a layout of the job uses, is 7" in found.output


def test_prices_without_the_pool_are_refused(tmp_path) -> None:
    (tmp_path / "prices.csv").write_text("pool,from_s,usd_per_hour\nspot,0,1\n")
    found = run(tmp_path, "--prices", str(tmp_path / "prices.csv"))
    assert found.exit_code != 0 and "pool 'on-demand' has no price" in found.output
