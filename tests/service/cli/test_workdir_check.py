"""What of a job file's working directory and entrypoint is seen from the machine that submits it."""

from pathlib import Path

import pytest

from service.cli.offline.workdir_check import remarks


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "pkg").mkdir()
    (tmp_path / "pkg" / "__init__.py").write_text("raise SystemExit('never imported')\nclass Whole: ...\n")
    (tmp_path / "pkg" / "job.py").write_text("if 1:\n    class MyJob: ...\nfrom x import Other as Renamed\nMade = 3\n")
    (tmp_path / "pkg" / "broken.py").write_text("class :\n")
    (tmp_path / "star.py").write_text("from pkg.job import *\n")
    return tmp_path


@pytest.mark.parametrize(
    "entrypoint", ["pkg:Whole", "pkg.job:MyJob", "pkg.job:Renamed", "pkg.job:Made", "star:Any", None]
)
def test_what_is_there_needs_no_remark(folder: Path, entrypoint: str | None):
    assert remarks(str(folder), entrypoint) == []


@pytest.mark.parametrize(
    ("entrypoint", "remark"),
    [
        ("pkg.job:MyJop", "job.py defines no MyJop; did you mean MyJob?"),
        ("pkg.jobs:MyJob", "there is no pkg/jobs.py in"),
        ("pkq.job:MyJob", "there is no pkq.py or pkq/ in"),
        ("pkg.broken:MyJob", "broken.py line 1: invalid syntax"),
    ],
)
def test_what_is_not_there_is_named_with_its_file(folder: Path, entrypoint: str, remark: str):
    (found,) = remarks(str(folder), entrypoint)
    assert found.startswith("entrypoint: ") and remark in found


@pytest.mark.parametrize("line", ["from agent.mine import X", "import agent.mine", "def f():\n    import agent"])
def test_a_package_that_is_named_like_one_of_liver_is_named(folder: Path, line: str):
    (folder / "uses.py").write_text(f"{line}\nclass MyJob: ...\n")
    assert remarks(str(folder), "uses:MyJob") == [], "it is the installed one"
    (folder / "agent").mkdir()
    (remark,) = remarks(str(folder), "uses:MyJob")
    assert "imports agent, the name of a package of LiveR" in remark


def test_nothing_is_guessed_where_nothing_can_be_seen(folder: Path):
    assert remarks(None, "nowhere.at_all:Job") == []
    assert remarks(str(folder), "json.decoder:JSONDecoder") == [], "it is installed here"
    assert remarks(str(folder), 7) == remarks(str(folder), "no colon") == []


def test_a_working_directory_that_is_absent_or_relative_is_named():
    assert remarks("/nowhere/at/all", "a:B") == [
        "workdir: /nowhere/at/all is no directory on this machine; each node needs it"
    ]
    assert "is relative" in remarks("src", "a:B")[0]
