"""Which trials may be counted together."""

import subprocess
from pathlib import Path

import pytest

from tests.chaos.report import TRIED, tree_now


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    for name in TRIED:
        path = tmp_path / name if "." in name else tmp_path / name / "some.py"
        path.parent.mkdir(exist_ok=True)
        path.write_text("1\n")
    git(tmp_path, "init", "-q")
    commit(tmp_path)
    return tmp_path


def git(folder: Path, *words: str) -> None:
    subprocess.run(["git", "-c", "user.name=a", "-c", "user.email=a@b", *words], cwd=folder, check=True)


def commit(folder: Path) -> None:
    git(folder, "add", ".")
    git(folder, "commit", "-qm", "more")


def test_what_is_not_tried_may_change_between_trials(tree: Path):
    before = tree_now(tree)
    (tree / "README.md").write_text("new\n")
    assert tree_now(tree) == before
    commit(tree)
    assert tree_now(tree) == before


@pytest.mark.parametrize("name", TRIED)
def test_what_is_tried_may_not(tree: Path, name: str):
    before = tree_now(tree)
    path = tree / name if "." in name else tree / name / "more.py"
    path.write_text("2\n")
    assert tree_now(tree) == f"{before}-changed"
    commit(tree)
    assert not tree_now(tree).startswith(before)


def test_outside_of_a_repository_no_two_trials_are_of_one_tree(tmp_path: Path):
    assert tree_now(tmp_path) == ""
