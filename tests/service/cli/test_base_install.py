"""What the base installation runs: the client's verbs. What it does not run says so in one line."""

import json
import re
import subprocess
import sys
import tomllib
from importlib.metadata import PackageNotFoundError, packages_distributions, requires
from pathlib import Path

import pytest

from liver_core.installation import DISTRIBUTION

pytest.importorskip("typer")

ROOT = Path(__file__).parents[3]
JOB = str(ROOT / "docs" / "examples" / "job.yaml")
NOWHERE = ("--service-url", "http://127.0.0.1:9")
CLIENTS = {
    "jobs submit": (JOB, *NOWHERE),
    "jobs list": NOWHERE,
    "jobs what-if": ("1", *NOWHERE),
    "nodes list": NOWHERE,
    "audit": NOWHERE,
}
ALONE = {
    "--help": (),
    "--version": (),
    "plan memory": ("--job", JOB, "--from", "TP1", "--to", "TP2", "--device-bytes", "80GiB"),
}
OTHERS = {
    "serve": ((), "service"),
    "simulate": (("--trace", "trace.csv", "--job", JOB), "service"),
    "demo": ((), "agent,service"),
}
Told = dict[str, tuple[int, str, str]]
RUN = """
import json, sys
blocked, commands = json.load(sys.stdin)
class NotInstalled:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in blocked:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, NotInstalled())
from typer.testing import CliRunner
from service.cli.main import app
done = [CliRunner().invoke(app, command, env={"LIVER_TOKEN": "liver_a_b"}) for command in commands]
print(json.dumps([(each.exit_code, each.output, repr(each.exception)) for each in done]))
"""


@pytest.fixture(scope="module")
def told() -> Told:
    """By verb: status, output and exception where only the base is installed."""
    arguments = CLIENTS | ALONE | {verb: given for verb, (given, _) in OTHERS.items()}
    commands = [[*verb.split(), *given] for verb, given in arguments.items()]
    command = [sys.executable, "-c", RUN]
    asked = json.dumps((modules_beside_the_base(), commands))
    done = subprocess.run(command, cwd=ROOT, input=asked, capture_output=True, text=True, timeout=50)
    assert done.returncode == 0, done.stderr
    return dict(zip(arguments, json.loads(done.stdout), strict=True))


@pytest.mark.parametrize("verb", CLIENTS)
def test_the_base_installation_runs_a_verb_of_a_client_as_far_as_its_service(told: Told, verb: str):
    status, output, exception = told[verb]
    assert (status, exception) == (1, "SystemExit(1)"), output
    assert output.startswith("error: ") and "http://127.0.0.1:9" in output


@pytest.mark.parametrize("verb", ALONE)
def test_the_base_installation_runs_what_needs_no_service(told: Told, verb: str):
    status, output, _ = told[verb]
    assert status == 0 and output


@pytest.mark.parametrize("verb", OTHERS)
def test_what_needs_an_extra_says_which_in_one_line(told: Told, verb: str):
    status, output, _ = told[verb]
    extra = re.escape(OTHERS[verb][1])
    assert status == 1
    assert re.fullmatch(rf"error: liver {verb} needs pip install '\./\S+\[{extra}\]' \(.* not installed\)\n", output)


def modules_beside_the_base() -> list[str]:
    """Top-level modules of this environment that neither the base nor what it needs has."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    base = {DISTRIBUTION, *closure_of(project["dependencies"])}
    owners = packages_distributions()
    return [module for module, names in owners.items() if not {normalized(name) for name in names} & base]


def closure_of(requirements: list[str]) -> set[str]:
    """Names of distributions, with all that they need."""
    found: set[str] = set()
    waiting = [*requirements]
    while waiting:
        name = normalized(re.split(r"[\[<>=!~ ;(]", waiting.pop())[0])
        if name not in found:
            found.add(name)
            try:
                waiting += [each for each in requires(name) or () if "extra ==" not in each]
            except PackageNotFoundError:
                continue
    return found


def normalized(distribution: str) -> str:
    return re.sub(r"[-_.]+", "-", distribution).lower()
