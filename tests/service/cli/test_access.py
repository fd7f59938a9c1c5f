"""`liver tokens` and the file that a new secret goes to."""

import os
import stat
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("typer")

from typer.testing import CliRunner, Result

from service.cli.main import app

VERBS = {"rotate": ["tokens", "rotate", "3f9a"], "create": ["tokens", "create", "admin", "--name", "first"]}


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The requests that a stand-in for the service has got; it answers each with a token."""
    paths: list[str] = []

    def post(path: str, **_: object) -> dict[str, str]:
        paths.append(path)
        return {"token_id": "77aa", "role": "admin", "name": "first", "token": "liver_77aa_new"}

    monkeypatch.setattr("service.cli.access.connect", lambda *_: SimpleNamespace(post=post))
    return paths


def out(verb: str, path: Path, *options: str) -> Result:
    return CliRunner().invoke(app, [*VERBS[verb], "--out", str(path), *options])


@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize(("place", "why"), [("nowhere/x", "No such file or directory"), (".", "Is a directory")])
def test_no_token_is_made_where_its_file_cannot_be(tmp_path: Path, asked: list[str], verb: str, place: str, why: str):
    done = out(verb, tmp_path / place)
    assert done.exit_code == 1
    assert done.stderr == f"error: --out: cannot write {tmp_path / place}: {why}; no token was made\n"
    assert asked == [] and list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("verb", VERBS)
def test_a_token_takes_the_place_of_the_file_for_its_owner_only_and_leaves_nothing_beside_it(
    tmp_path: Path, asked: list[str], verb: str
):
    path = tmp_path / "admin.token"
    path.write_text("old\n")
    path.chmod(0o644)
    done = out(verb, path)
    assert done.exit_code == 0 and "liver_77aa_new" not in done.stdout and len(asked) == 1
    assert path.read_text() == "liver_77aa_new\n" and stat.S_IMODE(path.stat().st_mode) == 0o600
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("options", [(), ("--json",)])
@pytest.mark.parametrize("verb", VERBS)
def test_a_token_whose_file_cannot_be_written_after_all_is_shown(
    tmp_path: Path, asked: list[str], monkeypatch: pytest.MonkeyPatch, verb: str, options: tuple[str, ...]
):
    def replace(*_: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "replace", replace)
    done = out(verb, tmp_path / "x", *options)
    assert done.exit_code == 1 and "liver_77aa_new" in done.stdout and "liver_77aa_new" not in done.stderr
    assert "Operation not permitted; the token was made and is shown instead" in done.stderr
    assert list(tmp_path.iterdir()) == []
