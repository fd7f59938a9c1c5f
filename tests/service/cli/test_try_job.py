"""`liver jobs try` up to the process that has torch, and what it makes of that process; a shell script plays it."""

import json
import os
import select
import time
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("typer")

from typer.testing import CliRunner, Result

from service.cli.main import app

JOB: dict[str, Any] = {
    "name": "small",
    "entrypoint": "my_gpt:MyGpt",
    "model": {
        "num_layers": 4,
        "hidden_size": 64,
        "num_attention_heads": 4,
        "padded_vocab_size": 256,
        "seq_length": 64,
    },
    "global_batch": 8,
    "micro_batch": 2,
    "nodes": {"min": 1, "max": 2},
    "layouts": {"allowed": ["TP1", "TP2"]},
    "stop": {"steps": 10},
}


def attempt(folder: Path, *options: str, python: Path | None = None, **changes: Any) -> Result:
    """Try the job above, changed, with an interpreter that is a script."""
    job_file = folder / "job.yaml"
    job_file.write_text(json.dumps(JOB | {"workdir": str(folder)} | changes))
    interpreter = () if python is None else ("--python", str(python))
    return CliRunner().invoke(app, ["jobs", "try", str(job_file), *interpreter, *options])


def interpreter(folder: Path, *, lacks: str = "", does: str = "") -> Path:
    """A script that says what it `lacks` when it is asked so, and else does what a trial's child does."""
    script = folder / "python"
    script.write_text(f"#!/bin/sh\nif [ \"$1\" = -c ]; then echo '{lacks}'; exit 0; fi\ncat > {folder}/plan\n{does}\n")
    script.chmod(0o755)
    return script


def says(*lines: dict[str, Any]) -> str:
    text = "\n".join(json.dumps(line) for line in lines)
    return f"cat <<'END'\n{text}\nEND"


def found(check: str, result: str, text: str = "as it should be", details: str = "") -> dict[str, Any]:
    return {"check": check, "result": result, "text": text, "details": details, "values": {}}


def test_a_field_that_breaks_its_rule_is_named_and_nothing_else_is_tried(tmp_path: Path):
    result = attempt(tmp_path, global_batch=0, colour="red")
    assert result.exit_code == 1
    assert "global_batch: " in result.output and "colour: is not a known field" in result.output
    assert "not ready: 0 ok, 0 warnings, 2 missing" in result.output


def test_a_job_file_that_is_not_there_or_no_yaml_is_missing(tmp_path: Path):
    assert "No such file" in CliRunner().invoke(app, ["jobs", "try", str(tmp_path / "none.yaml")]).output
    (tmp_path / "bad.yaml").write_text("a: [1,\n")
    assert "must be YAML or JSON" in CliRunner().invoke(app, ["jobs", "try", str(tmp_path / "bad.yaml")]).output


def test_layouts_that_the_service_would_refuse_are_named(tmp_path: Path):
    result = attempt(tmp_path, layouts={"allowed": ["PP3"]})
    assert result.exit_code == 1
    assert "model.num_layers: 4 must be divisible by" in result.output


def test_a_layout_that_is_none_is_refused_with_an_example(tmp_path: Path):
    result = attempt(tmp_path, "--layout", "QQ3")
    assert result.exit_code == 1
    assert "expected something like TP2xPP2" in result.output


def test_a_workdir_that_is_not_there_says_how_to_name_another(tmp_path: Path):
    result = attempt(tmp_path, workdir=str(tmp_path / "gone"))
    assert result.exit_code == 1
    assert f"workdir: {tmp_path}/gone does not exist on this machine; --workdir names another place" in result.output


def test_without_torch_one_sentence_says_what_to_install(tmp_path: Path):
    result = attempt(tmp_path, python=interpreter(tmp_path, lacks="torch,megatron.core"))
    assert result.exit_code == 1
    assert "has no torch, megatron.core: install it with pip install './liver_handoff-" in result.output
    assert not (tmp_path / "plan").exists()


def test_an_interpreter_that_does_not_run_is_named(tmp_path: Path):
    result = attempt(tmp_path, python=tmp_path / "nothing")
    assert result.exit_code == 1
    assert f"--python: {tmp_path}/nothing does not run" in result.output


def test_what_the_child_finds_becomes_a_line_each_and_the_job_is_ready(tmp_path: Path):
    lines = ({"started": "module"}, found("module", "ok"), found("replay", "warning", "stop-and-copy"))
    script = interpreter(tmp_path, does=says(*lines, {"step_s": 0.25, "state_bytes": 3_000_000}))
    result = attempt(tmp_path, "--steps", "6", python=script)
    assert result.exit_code == 0, result.output
    assert "module\tok\tas it should be\n" in result.output
    assert "replay\twarning\tstop-and-copy\n" in result.output
    assert "ready: 3 ok, 1 warning, 0 missing; 0.25 s a step, 3 MB of state" in result.output
    plan = json.loads((tmp_path / "plan").read_text())
    assert (plan["entrypoint"], plan["steps"], plan["layouts"]) == ("my_gpt:MyGpt", 6, ["TP1", "TP2"])
    assert (plan["args"]["hidden_size"], plan["layout"]) == (64, "")


@pytest.mark.parametrize(
    ("limits", "tried"),
    [
        ({"expert_model_parallel": [2], "expert_tensor_parallel": [1]}, {"TP2xPP1xDP1xEP2xETP1", "TP1xPP1xDP2xEP2"}),
        ({"expert_model_parallel": [8]}, {"TP1xPP1xDP8xEP8"}),
    ],
)
def test_where_only_the_cut_of_experts_is_said_layouts_with_it_are_tried(
    tmp_path: Path, limits: dict[str, list[int]], tried: set[str]
):
    model = {**JOB["model"], "num_experts": 8, "moe_ffn_hidden_size": 64}
    script = interpreter(tmp_path, does=says(found("builds", "ok")))
    result = attempt(tmp_path, python=script, model=model, layouts={"limits": limits}, micro_batch=1)
    layouts = json.loads((tmp_path / "plan").read_text())["layouts"]
    assert tried <= set(layouts), result.output
    assert all(f"xEP{limits['expert_model_parallel'][0]}" in layout for layout in layouts)


def test_ready_names_the_layouts_that_were_run_and_those_that_were_only_built(tmp_path: Path):
    lines = (found("builds", "ok"), {"built": ["TP2", "PP2"], "ran": ["TP1"]}, {"ran": ["TP1", "PP2"]})
    result = attempt(tmp_path, python=interpreter(tmp_path, does=says(*lines)))
    assert "ready in TP1, PP2, only built in TP2: 3 ok, 0 warnings, 0 missing" in result.output


def test_something_missing_makes_the_status_1_shows_the_traceback_and_what_was_not_looked_at(tmp_path: Path):
    lines = (found("build", "missing", "KeyError: 'x'", "Traceback:\n  line 3"), {"not_made": ["step", "replay"]})
    result = attempt(tmp_path, python=interpreter(tmp_path, does=says(*lines) + "\nexit 1"))
    assert result.exit_code == 1
    assert "    Traceback:\n      line 3\n" in result.output
    assert result.output.endswith("not ready: 2 ok, 0 warnings, 1 missing; not looked at yet: step, replay\n")


def test_json_holds_the_same_for_programs(tmp_path: Path):
    script = interpreter(tmp_path, does=says(found("module", "ok"), {"step_s": 0.5}))
    result = attempt(tmp_path, "--json", python=script)
    answer = json.loads(result.stdout)
    assert answer["ready"] is True and answer["step_s"] == 0.5
    assert [each["check"] for each in answer["findings"]] == ["job file", "workdir", "module"]


def test_on_a_terminal_lines_are_wrapped_and_lined_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("service.cli.offline.try_job.terminal_width", lambda: 80)
    monkeypatch.setenv("NO_COLOR", "1")
    script = interpreter(tmp_path, does=says(found("replay", "warning", "stop-and-copy because " + "word " * 20)))
    lines = attempt(tmp_path, python=script).output.splitlines()
    assert all(len(line) <= 80 for line in lines if "word" in line)
    assert [line for line in lines if line.startswith("replay          warning  stop-and-copy because word")]
    assert [line for line in lines if line.startswith(" " * 25 + "word")]


def test_a_child_that_takes_too_long_is_ended_with_all_that_it_started(tmp_path: Path):
    does = says({"started": "warm_up"}) + f"\nsleep 300 &\necho $! > {tmp_path}/pid\nwait"
    started = time.monotonic()
    result = attempt(tmp_path, "--timeout", "1", python=interpreter(tmp_path, does=does))
    assert time.monotonic() - started < 30
    assert result.exit_code == 1
    assert "warm_up\tmissing\tnot done after 1 s; --timeout gives it more" in result.output
    assert _is_gone(int((tmp_path / "pid").read_text()))


def _is_gone(pid: int) -> bool:
    """Ended within a moment, though perhaps not yet reaped by whoever has taken it over."""
    try:
        process = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([process], [], [], 5.0)[0])
    finally:
        os.close(process)


@pytest.mark.parametrize(("ends", "told"), [("kill -9 $$", "Killed"), ("exit 7", "status 7")])
def test_a_child_that_dies_is_told_with_what_it_was_doing(tmp_path: Path, ends: str, told: str):
    result = attempt(tmp_path, python=interpreter(tmp_path, does=says({"started": "step"}) + f"\n{ends}"))
    assert result.exit_code == 1
    assert f"step\tmissing\tthe process died: {told}" in result.output


def test_the_environment_of_the_job_reaches_the_child(tmp_path: Path):
    script = interpreter(tmp_path, does=f'echo "$MY_FLAG $PWD" > {tmp_path}/seen')
    attempt(tmp_path, python=script, environment={"MY_FLAG": "42"})
    assert (tmp_path / "seen").read_text() == f"42 {os.path.realpath(tmp_path)}\n"
