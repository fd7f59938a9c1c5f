"""What the command says about itself, and that it starts without loading what it does not need."""

import subprocess
import sys
from typing import Any

import pytest

pytest.importorskip("typer")

from typer.main import get_command
from typer.testing import CliRunner

from service.cli.main import app

VERBS = [
    "serve", "demo", "jobs submit", "jobs list", "jobs show", "jobs watch", "jobs logs", "jobs stop", "jobs try",
    "nodes list", "handoffs list", "handoffs show", "notices list", "prices list", "prices set",
]  # fmt: skip
HEAVY = ("torch", "httpx", "sqlalchemy", "fastapi", "megatron", "numpy")


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_explains_itself_with_an_example(verb: str):
    result = CliRunner().invoke(app, [*verb.split(), "--help"], env={"COLUMNS": "200"})
    assert result.exit_code == 0
    assert f"Example: liver {verb}" in result.stdout


def test_every_verb_that_exists_is_in_the_list_above():
    assert sorted(_verbs(get_command(app))) == sorted(VERBS)


@pytest.mark.parametrize("verb", VERBS)
def test_no_option_takes_a_secret(verb: str):
    text = CliRunner().invoke(app, [*verb.split(), "--help"], env={"COLUMNS": "200"}).stdout
    assert "--token " not in text and "--password" not in text


def test_the_command_starts_without_loading_what_only_some_verbs_need():
    program = f"import sys, service.cli.main; print([name for name in {HEAVY!r} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=50, check=True)
    assert done.stdout.strip() == "[]"


def _verbs(command: Any, prefix: str = "") -> list[str]:
    commands = getattr(command, "commands", None)
    if commands is None:
        return [prefix.strip()]
    return [verb for name, part in commands.items() for verb in _verbs(part, f"{prefix} {name}")]
