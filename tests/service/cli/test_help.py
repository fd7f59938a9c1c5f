"""What the command says about itself, and that it starts without loading what it does not need."""

import os
import subprocess
import sys
from importlib.metadata import version
from typing import Any

import pytest

pytest.importorskip("typer")

from typer.main import get_command
from typer.testing import CliRunner

from liver_core.installation import DISTRIBUTION
from service.cli.main import app

VERBS = [
    "serve", "demo", "jobs submit", "jobs list", "jobs show", "jobs watch", "jobs logs", "jobs stop", "jobs try",
    "jobs checkpoint", "jobs pause", "jobs resume", "jobs rotate-key", "jobs update", "jobs delete", "jobs export",
    "jobs wires", "jobs decisions", "jobs plan", "jobs metrics", "jobs what-if",
    "nodes list", "nodes show", "nodes drain", "handoffs list", "handoffs show", "notices list", "notices end",
    "incidents list", "incidents show",
    "prices list", "prices set",
    "plan memory", "simulate", "ledger show", "ledger check",
    "tokens create", "tokens list", "tokens rotate", "tokens revoke", "audit", "cloud check",
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


def test_a_request_is_made_without_loading_what_only_the_service_needs():
    """What a command loads comes before its first answer, also before the one that a token is wrong."""
    program = (
        "import sys\n"
        "from service.cli.main import app\n"
        "app(['nodes', 'list', '--service-url', 'http://127.0.0.1:9'], standalone_mode=False)\n"
        f"print([name for name in {(*HEAVY, 'yaml', 'jinja2')!r} if name != 'httpx' and name in sys.modules])"
    )
    environment = {"LIVER_TOKEN": "liver_0_0", "PATH": ""}
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True, text=True, timeout=50, check=True, env=os.environ | environment,
    )  # fmt: skip
    assert "no answer from the service at http://127.0.0.1:9" in done.stderr
    assert done.stdout.strip() == "[]"


def test_the_version_is_told_and_no_command_is_missing():
    result = CliRunner().invoke(app, ["--version"])
    assert result.exit_code == 0
    assert result.stdout == f"liver {version(DISTRIBUTION)}\n"


def test_the_command_alone_shows_its_help():
    result = CliRunner().invoke(app, [])
    assert "Commands" in result.output and "--install-completion" in result.output


@pytest.mark.parametrize("shell", ["bash", "zsh"])
@pytest.mark.parametrize(
    ("typed", "offered"),
    [("liver ha", "handoffs"), ("liver jobs wa", "watch"), ("liver jobs logs --fol", "--follow")],
)
def test_verbs_and_options_are_completed(shell: str, typed: str, offered: str):
    environment = {
        "_LIVER_COMPLETE": f"complete_{shell}",
        "COMP_WORDS": typed,
        "COMP_CWORD": str(len(typed.split()) - 1),
        "_TYPER_COMPLETE_ARGS": typed,
    }
    result = CliRunner().invoke(app, [], prog_name="liver", env=environment)
    assert offered in result.stdout


def _verbs(command: Any, prefix: str = "") -> list[str]:
    commands = getattr(command, "commands", None)
    if commands is None:
        return [prefix.strip()]
    return [verb for name, part in commands.items() for verb in _verbs(part, f"{prefix} {name}")]
