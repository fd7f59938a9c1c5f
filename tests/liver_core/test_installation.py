"""What says that an extra is missing knows the extras of pyproject.toml, and names a file, never a bare name."""

import re
import tomllib
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

from liver_core import installation
from liver_core.installation import DISTRIBUTION, NEEDS, install_command, is_there, lacking

PROJECT = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """What is importable; everything else is not."""
    names: set[str] = set()
    monkeypatch.setattr(installation, "is_there", names.__contains__)
    monkeypatch.setattr(installation, "release", lambda: "1.2.3")
    return names


@pytest.mark.parametrize("extra", NEEDS)
def test_an_extra_is_told_by_what_it_brings_and_the_base_does_not(extra: str):
    owners = packages_distributions()
    brings = declared(extra) | (declared("core") if extra == "agent" else set())
    for module in NEEDS[extra]:
        distributions = {normalized(name) for name in owners[module]}
        assert distributions & brings and not distributions & names_in(PROJECT["dependencies"]), module


def test_the_name_of_the_distribution_is_the_projects():
    assert PROJECT["name"] == DISTRIBUTION


def test_nothing_is_said_where_all_is_there(installed: set[str]):
    installed |= {*NEEDS["agent"], *NEEDS["service"]}
    assert lacking("agent") == lacking("service") == lacking("agent", "service") == ""


def test_what_is_missing_is_one_line_that_names_the_file_and_the_extras(installed: set[str]):
    installed |= {*NEEDS["agent"], *NEEDS["service"]} - {"dbus_fast"}
    wheel = "./liver_handoff-1.2.3-py3-none-any.whl"
    assert lacking("agent") == f"needs pip install '{wheel}[agent]' (dbus_fast is not installed)"
    installed.clear()
    assert lacking("service") == (
        f"needs pip install '{wheel}[service]' (alembic, boto3, fastapi and more are not installed)"
    )
    assert lacking("agent", "service").startswith(f"needs pip install '{wheel}[agent,service]' (")


def test_in_a_tree_that_is_not_installed_the_tree_is_what_to_install(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(installation, "release", lambda: installation.SOURCE)
    assert install_command("core") == "pip install '.[core]'"


def test_a_module_of_a_package_that_is_not_there_is_not_there():
    assert is_there("json.decoder") and not is_there("no_such_package") and not is_there("no_such_package.module")


def declared(extra: str) -> set[str]:
    return names_in(PROJECT["optional-dependencies"][extra])


def names_in(requirements: list[str]) -> set[str]:
    return {normalized(re.split(r"[\[<>=!~ ;]", each)[0]) for each in requirements}


def normalized(distribution: str) -> str:
    return re.sub(r"[-_.]+", "-", distribution).lower()
