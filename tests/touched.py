"""Which test files a change touches, by what imports what.

A file that is started as a program, or named in a text, counts as imported by whoever names it. So does a file that is
no module, such as a template, by whoever names it.
"""

import ast
import re
import subprocess
from collections import deque
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("liver_core", "agent", "service", "migrations", "deploy", "tests")
MODULE_NAME = re.compile(r"[a-z_]\w*(?:\.\w+)+")
BROWSER_HALF, BROWSER_TESTS = "service/console/web/", "tests/e2e/conftest.py"
NAME_LEAST = 6
"""A shorter name of a file that is no module says too little to be looked for in texts."""

A_CHANGE_LASTS_S = 6 * 3600


def changed_since(base: str) -> list[str]:
    """Paths that differ between a revision and the working tree."""
    return sorted(filter(None, _git("diff", "--name-only", base, "--").splitlines()))


def default_base() -> str:
    """The newest commit that is older by six hours than the newest of all: what came since is one change."""
    newest_s = int(_git("log", "-1", "--format=%ct"))
    found = _git("rev-list", "-1", f"--before={newest_s - A_CHANGE_LASTS_S}", "HEAD").strip()
    return found or _git("rev-list", "--max-parents=0", "HEAD").split()[-1]


def reached(changed: Iterable[str]) -> dict[str, int]:
    """Files that a change reaches, with the number of imports in between; 0: it was changed itself."""
    users = _users()
    known = dict.fromkeys(changed, 0)
    known |= {path: 1 for each in list(known) if not each.endswith(".py") for path in _who_names(each)}
    queue = deque(sorted(known, key=known.__getitem__))
    while queue:
        path = queue.popleft()
        for user in users.get(path, ()):
            if user not in known:
                known[user] = known[path] + 1
                queue.append(user)
    return known


def reached_tests(changed: Iterable[str]) -> dict[str, int]:
    return {path: far for path, far in reached(changed).items() if is_test(path)}


def is_test(path: str) -> bool:
    return path.startswith("tests/") and Path(path).name.startswith("test_") and (ROOT / path).is_file()


def uses(path: str) -> set[str]:
    """Files of the tree that a module imports or names, and the packages and fixtures that come with them."""
    modules = _modules()
    tree = ast.parse((ROOT / path).read_text(encoding="utf-8"), filename=path)
    found = {modules[name] for name in _named(tree) for name in _with_parents(name) if name in modules}
    # The fixtures of every folder above it.
    found |= {str(conftest) for folder in Path(path).parents if (ROOT / (conftest := folder / "conftest.py")).is_file()}
    return found - {path}


def _named(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=names):
                yield from (alias.name for alias in names)
            case ast.ImportFrom(module=str(module), names=names):
                yield from (f"{module}.{alias.name}" for alias in names)
            case ast.Constant(value=str(text)) if "." in text:
                yield from MODULE_NAME.findall(text)


def _with_parents(name: str) -> Iterator[str]:
    """`a.b.c` may be a module, or a name in `a.b`; importing it runs `a` and `a.b` first."""
    while name:
        yield name
        name = name.rpartition(".")[0]


@cache
def _users() -> dict[str, set[str]]:
    """By file, who imports it."""
    found: dict[str, set[str]] = {}
    for path in _modules().values():
        for used in uses(path):
            found.setdefault(used, set()).add(path)
    return found


@cache
def _modules() -> dict[str, str]:
    """By name, the file of each module of the tree."""
    paths = [path.relative_to(ROOT).as_posix() for package in PACKAGES for path in (ROOT / package).rglob("*.py")]
    paths = [path for path in paths if "node_modules" not in path]
    return {path.removesuffix(".py").removesuffix("/__init__").replace("/", "."): path for path in paths}


def _who_names(path: str) -> list[str]:
    """Modules in whose text the name of a file, or of its folder, stands; of the browser's half those that open it."""
    if path.startswith(BROWSER_HALF):
        return [BROWSER_TESTS]
    names = {name for name in (Path(path).name, Path(path).parent.name) if len(name) >= NAME_LEAST}
    texts = {module: (ROOT / module).read_text(encoding="utf-8") for module in _modules().values()}
    return [module for module, text in texts.items() if any(name in text for name in names)]


def _git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True).stdout
