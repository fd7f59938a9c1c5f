"""What of a job file can be seen on this machine: its working directory, and the entrypoint in it.

Remarks and not errors: the nodes may have other files. Nothing of the job is imported.
"""

import ast
import difflib
import sys
from collections.abc import Iterator
from importlib.machinery import PathFinder
from pathlib import Path

from liver_core import PACKAGES

SOURCE_BYTES_MAX = 4 * 1024 * 1024


def remarks(workdir: object, entrypoint: object) -> list[str]:
    """What looks wrong from here; nothing where nothing can be seen."""
    if not isinstance(workdir, str):
        return []
    folder = Path(workdir)
    if not folder.is_absolute():
        return [f"workdir: {workdir} is relative: on each node it counts from where its agent was started"]
    if not folder.is_dir():
        return [f"workdir: {workdir} is no directory on this machine; each node needs it"]
    if not isinstance(entrypoint, str) or entrypoint.count(":") != 1:
        return []
    module, name = entrypoint.split(":")
    remark = _of_module(folder, module, name)
    return [f"entrypoint: {remark}"] if remark else []


def _of_module(folder: Path, module: str, name: str) -> str:
    top = module.split(".")[0]
    if not (folder / top).is_dir() and not (folder / f"{top}.py").is_file():
        if PathFinder.find_spec(top, sys.path) is not None:
            return ""
        return f"there is no {top}.py or {top}/ in {folder}, and no such module is installed here; each node needs it"
    stem = folder.joinpath(*module.split("."))
    source = next((path for path in (stem.with_suffix(".py"), stem / "__init__.py") if path.is_file()), None)
    if source is None:
        return f"there is no {stem.relative_to(folder)}.py in {folder}"
    try:
        if source.stat().st_size > SOURCE_BYTES_MAX:
            return ""
        tree = ast.parse(source.read_bytes())
    except SyntaxError as error:
        return f"{source} line {error.lineno}: {error.msg}"
    except (OSError, ValueError) as error:
        return f"{source} cannot be read: {error}"
    for package in sorted(_imported(tree) & {*PACKAGES}):
        if (folder / package).is_dir() or (folder / f"{package}.py").is_file():
            return f"{source} imports {package}, the name of a package of LiveR, which ranks import instead; rename it"
    names = list(_bound(tree))
    if {name, "*", "__getattr__"} & set(names):
        return ""
    near = difflib.get_close_matches(name, names, n=1)
    return f"{source} defines no {name}" + (f"; did you mean {near[0]}?" if near else "")


def _imported(tree: ast.Module) -> set[str]:
    """The first parts of the names of all modules that it imports."""
    names: list[str] = []
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=found):
                names += [alias.name for alias in found]
            case ast.ImportFrom(module=str(module), level=0):
                names.append(module)
            case _:
                pass
    return {name.split(".")[0] for name in names}


def _bound(tree: ast.Module) -> Iterator[str]:
    """Names that any statement of a module may bind, those within `if` and `try` too. `*` stands for unknown ones."""
    for node in ast.walk(tree):
        match node:
            case ast.ClassDef(name=name) | ast.FunctionDef(name=name):
                yield name
            case ast.Name(id=name, ctx=ast.Store()):
                yield name
            case ast.Import(names=found) | ast.ImportFrom(names=found):
                yield from (alias.asname or alias.name.split(".")[0] for alias in found)
            case _:
                pass
