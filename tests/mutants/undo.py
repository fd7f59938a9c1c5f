"""Undoes commits, one at a time, in a copy of the tree, and says which tests find it and by which command they run.

python -m tests.mutants.undo --list 20
python -m tests.mutants.undo --commits 20 --report build/reports/undo.json
"""

import argparse
import ast
import itertools
import json
import os
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from tests.durations import parted
from tests.touched import reached_tests

ROOT = Path(__file__).resolve().parents[2]
SAME_BEHAVIOUR = Path(__file__).with_name("same_behaviour.toml")
PLACES = (
    *(f"liver_core/{name}" for name in ("rank", "state", "streaming", "transport", "worlds")),
    *(f"agent/{name}" for name in ("driver", "supervisor", "worker")),
    *(f"service/{name}" for name in ("jobs", "sync", "handoffs")),
)
"""What is no pure machine: mutants are planted elsewhere."""

IDENTITY = ("-c", "user.name=undo", "-c", "user.email=undo@localhost")
LIMIT_S = 1_800.0
NO_TEST = 5  # pytest's exit code where none was chosen.
STAGES = (0, 2, 3, 4, 99)
"""Test files are run in stages, by how many imports lie between them and what was undone."""


class NoProgramError(Exception):
    """No test could begin: that is no finding of a test."""


@dataclass(frozen=True, slots=True)
class Commit:
    revision: str
    title: str
    files: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Found:
    """By which test the undoing of a commit was found, and which command runs that test; none: by nothing."""

    commit: Commit
    test: str | None
    command: str | None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--list", type=int, default=0, metavar="N", help="only list the newest N such commits")
    parser.add_argument("--commits", type=int, default=20, metavar="N")
    parser.add_argument("--only", nargs="+", default=[], metavar="REVISION", help="these of them")
    parser.add_argument("--report", type=Path, default=ROOT / "build" / "reports" / "undo.json")
    options = parser.parse_args()
    commits = list(_newest(options.list or options.commits))
    if options.list:
        for commit in commits:
            print(commit.revision, commit.title, *commit.files, sep="\n    ")
        return 0
    found = []
    for commit in commits:
        if not options.only or commit.revision in options.only:
            found.append(undone(commit))
            print(f"{commit.revision} {commit.title}\n    {found[-1].command}: {found[-1].test}", flush=True)
    options.report.parent.mkdir(parents=True, exist_ok=True)
    options.report.write_text(json.dumps([asdict(each) for each in found], indent=2) + "\n")
    return int(any(each.test is None for each in found))


def _newest(count: int) -> Iterator[Commit]:
    """The newest commits that change what a program in PLACES does, none skipped but those that are argued about."""
    argued = {each["commit"] for each in tomllib.loads(SAME_BEHAVIOUR.read_text()).get("commit", [])}
    left = count
    for line in _git("log", "--no-merges", "--format=%h %s", "--abbrev=8", "--", *PLACES).splitlines():
        revision, _, title = line.partition(" ")
        files = tuple(filter(None, _git("show", "--format=", "--name-only", revision, "--", *PLACES).splitlines()))
        if revision not in argued and any(_program(f"{revision}^", f) != _program(revision, f) for f in files):
            yield Commit(revision, title, _to_undo(revision))
            left -= 1
        if left == 0:
            return


def _to_undo(revision: str) -> tuple[str, ...]:
    """What the commit changed of the product: half a change is no program. A module that it brought stays, and is not
    used any more, so that tests that import it still run."""
    shown = ("show", "--format=", "--name-only", revision, "--", "*.py", ":!tests")
    changed = _git(*shown[:2], "--diff-filter=a", *shown[2:]).split()
    return tuple(changed or _git(*shown).split())


def _program(revision: str, path: str) -> str:
    """A module without its comments and docstrings."""
    shown = subprocess.run(["git", "show", f"{revision}:{path}"], cwd=ROOT, capture_output=True, text=True, check=False)
    if shown.returncode or not path.endswith(".py"):
        return shown.stdout
    tree = ast.parse(shown.stdout)
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if isinstance(body, list):
            kept = [each for each in body if not (isinstance(each, ast.Expr) and isinstance(each.value, ast.Constant))]
            node.body = kept or [ast.Pass()]  # type: ignore[attr-defined]
    return ast.dump(tree)


def undone(commit: Commit) -> Found:
    """Run the tests that import what was undone first, all others only where those pass; `make test`'s before the
    thorough tier's."""
    with tempfile.TemporaryDirectory(prefix="liver-undo-") as folder:
        copy = Path(folder, "tree")
        _git("clone", "--quiet", "--shared", str(ROOT), str(copy))
        # What later commits changed in the same lines goes with it, and the tests stay as they are.
        revert = ("revert", "--no-commit", "--strategy-option=theirs", commit.revision)
        done = subprocess.run(["git", *IDENTITY, *revert], cwd=copy, capture_output=True, text=True, check=False)
        kept = [path for path in _changed_in(copy) if path not in commit.files]
        subprocess.run(["git", "checkout", "--quiet", "HEAD", "--", *kept], cwd=copy, check=bool(kept))
        if not set(_changed_in(copy)) & set(commit.files):
            return Found(commit, None, f"cannot be undone: {done.stderr.strip()}")
        near = reached_tests(commit.files)
        for command, chosen in (("make test", "not thorough"), ("make test-thorough", "thorough")):
            for least, most in itertools.pairwise(STAGES):
                files = sorted(path for path, far in near.items() if least <= far < most)
                try:
                    test = _first_failure(copy, files, chosen)
                except NoProgramError as error:
                    return Found(commit, None, f"what is left is no program: {error}")
                if test:
                    return Found(commit, test, command)
    return Found(commit, None, None)


def _changed_in(copy: Path) -> list[str]:
    lines = subprocess.run(
        ["git", "status", "--porcelain"], cwd=copy, capture_output=True, text=True, check=True
    ).stdout
    return [line[3:].split(" -> ")[-1] for line in lines.splitlines()]


def _first_failure(copy: Path, files: list[str], marks: str) -> str | None:
    """Test files that import a name which is gone with the commit are left out: to miss a name is no finding."""
    environment = {**os.environ, "PYTHONPATH": str(copy)}
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-n", "3", "--dist", "loadgroup", "--no-loadscope-reorder"]
    while files:
        done = subprocess.run(
            [*command, "-p", "no:cacheprovider", "-m", marks, "--thorough", *files],
            cwd=copy, env=environment, capture_output=True, text=True, timeout=LIMIT_S, check=False,
        )  # fmt: skip
        told = [line.split(" - ")[0] for line in done.stdout.splitlines() if line.startswith(("FAILED ", "ERROR "))]
        found = [parted(line.split(" ", 1)[1])[0] for line in told]
        if failed := [test for test in found if "::" in test]:
            return failed[0]
        if not found:
            if done.returncode not in (0, NO_TEST):
                raise NoProgramError(done.stdout[-2_000:] + done.stderr[-2_000:])
            return None
        files = [path for path in files if path not in found]
    return None


def _git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True).stdout


if __name__ == "__main__":
    sys.exit(main())
