"""The house rules that no linter knows, checked by program over the whole tree.

Not here: formatting, printing, import order (ruff), types (pyright) and the import spine (import-linter).
An exception goes into the allow-list of its rule, with the reason beside it.
"""

import ast
import re
import sys
import tomllib
from collections.abc import Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from importlib.metadata import packages_distributions
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("liver_core", "agent", "service", "migrations", "deploy")
OUTSIDE_THE_TREE = {".git", ".venv", ".venv-service", "build", "dist", "node_modules", "__pycache__"}
TEXT_SUFFIXES = {
    ".py",
    ".md",
    ".toml",
    ".txt",
    ".yaml",
    ".yml",
    ".ini",
    ".mako",
    ".html",
    ".css",
    ".sh",
    ".svg",
    ".tf",
    ".ts",
    ".tsx",
    ".mjs",
    "",
}

DOCSTRING_LINES_MAX = 6
# The docstring of a package may be its manual: which parts there are, and how they play together.
PACKAGE_DOCSTRING_LINES_MAX = 60
FILE_LINES_MAX = 500
TEST_FILE_LINES_MAX = 800
FUNCTION_LINES_MAX = 60
POSITIONAL_PARAMETERS_MAX = 6

VAGUE_MODULE_NAMES = {"utils", "util", "helpers", "helper", "common", "manager", "managers", "misc"}
OBJECT_DECODERS = {"pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve", "jsonpickle"}

# Decorators under which parameters are options of a command line or fields of a request, named by whoever calls.
NAMED_BY_THE_CALLER = {"command", "callback", "get", "post", "put", "patch", "delete"}

# Where megatron may be imported. Everything else reaches it through these files, so that a new release of it
# is a change in a handful of places.
MEGATRON_PLACES = (
    "liver_core/worlds/megatron.py",  # groups, model and optimizer construction, private names
    "liver_core/worlds/cpu_compat.py",  # the patches that let it run without a GPU
    "liver_core/state/",  # its optimizer state and its checkpoint format
    "liver_core/training/megatron_job.py",  # model, optimizer and step on explicit groups
    "liver_core/training/gpt",  # the reference job is a Megatron GPT
    "liver_core/training/corpus.py",  # its data are in Megatron's indexed format
    "deploy/demo/restart/torchrun_rank.py",  # the restart to compare with is a plain Megatron script
    "tests/",  # the oracle is Megatron itself
)

# Names with a leading underscore change without notice, so they are touched only in files that check for them at start.
PRIVATE_TORCH_PLACES = (
    "liver_core/worlds/",
    "liver_core/state/",
    "tests/",
)

# A revision of the schema is a list of columns; cutting it up would hide what a table looks like.
MAY_HAVE_LONG_LISTS = "migrations/versions/"

MAY_BE_LONG: dict[str, str] = {}
MAY_HAVE_LONG_FUNCTIONS: dict[str, str] = {}
MAY_TAKE_MANY_PARAMETERS: dict[str, str] = {}
# Tests wait on conditions with a deadline, never on the clock.
MAY_SLEEP: dict[str, str] = {
    "tests/deploy/demo/test_unannounced_loss.py": "asks a real service about real processes, with a deadline",
    "tests/e2e/story.py": "asks a real service, with a deadline",
    "tests/agent/fake_rank.py": "a process that plays a rank whose cutover takes its time",
}

# A path of one developer's machine or the address of a package registry makes the tree work in one place only.
# This file is exempt, since it has to spell them.
FOREIGN_ADDRESSES = re.compile(
    r"(?<![\w.$}])/work/|/tmp/liver\b|/opt/(pypi|wheels)|/root/|"
    r"(pypi|files\.pythonhosted|test\.pypi)\.org|download\.pytorch\.org|registry\.npmjs\.org|"
    r"(--|_)index[-_]url\s*[= ]\s*http"
)


def test_every_file_opens_by_saying_what_it_is():
    found = []
    for path, tree in python_files():
        if not tree.body and path.startswith("tests/"):
            continue
        limit = PACKAGE_DOCSTRING_LINES_MAX if path.endswith("/__init__.py") else DOCSTRING_LINES_MAX
        docstring = ast.get_docstring(tree)
        if not docstring:
            found.append(f"{path}:1: has no opening docstring")
        elif len(docstring.splitlines()) > limit and not path.startswith("tests/"):
            found.append(f"{path}:1: its opening docstring has more than {limit} lines")
    assert_none(found)


def test_no_file_is_too_long_to_read_in_one_go():
    found = []
    for path, _ in python_files():
        lines = len(text_of(path).splitlines())
        limit = TEST_FILE_LINES_MAX if path.startswith("tests/") else FILE_LINES_MAX
        if lines > limit and path not in MAY_BE_LONG:
            found.append(f"{path}:{limit}: has {lines} lines, the limit is {limit}")
    assert_none(found)


def test_no_function_is_too_long_to_see_at_once():
    found = []
    for path, tree in python_files():
        if path.startswith(MAY_HAVE_LONG_LISTS):
            continue
        for function in functions(tree):
            lines = (function.end_lineno or function.lineno) - function.lineno + 1
            if lines > FUNCTION_LINES_MAX and f"{path}:{function.name}" not in MAY_HAVE_LONG_FUNCTIONS:
                found.append(f"{path}:{function.lineno}: {function.name} has {lines} lines of {FUNCTION_LINES_MAX}")
    assert_none(found)


def test_no_function_takes_more_positional_parameters_than_a_reader_can_keep_apart():
    found = []
    for path, tree in python_files():
        for function in functions(tree):
            if any(decorator_name(each) in NAMED_BY_THE_CALLER | {"fixture"} for each in function.decorator_list):
                continue
            names = [argument.arg for argument in function.args.posonlyargs + function.args.args]
            if names[:1] in (["self"], ["cls"]):
                names = names[1:]
            is_test = path.startswith("tests/") and function.name.startswith("test_")
            is_allowed = is_test or f"{path}:{function.name}" in MAY_TAKE_MANY_PARAMETERS
            if len(names) > POSITIONAL_PARAMETERS_MAX and not is_allowed:
                found.append(f"{path}:{function.lineno}: {function.name} takes {len(names)} positional parameters")
    assert_none(found)


def test_no_module_has_a_name_that_says_nothing():
    found = []
    for path, _ in python_files():
        words = {word for part in Path(path).with_suffix("").parts for word in part.split("_")}
        if vague := words & VAGUE_MODULE_NAMES:
            found.append(f"{path}:1: is named {', '.join(sorted(vague))}")
    assert_none(found)


def test_no_message_of_ours_can_carry_a_pickled_object():
    found = []
    for path, tree in python_files():
        if path.startswith("tests/"):
            continue
        for module, line in imported_modules(tree):
            if module.split(".")[0] in OBJECT_DECODERS:
                found.append(f"{path}:{line}: imports {module}")
    assert_none(found)


def test_no_test_waits_on_the_real_clock():
    found = []
    for path, tree in python_files():
        if path.startswith("tests/") and path not in MAY_SLEEP:
            found += [f"{path}:{line}: sleeps; wait for a condition with a deadline" for line in sleeping_lines(tree)]
    assert_none(found)


def test_megatron_is_imported_only_where_its_releases_are_looked_after():
    found = []
    for path, tree in python_files():
        for module, line in imported_modules(tree):
            if module.split(".")[0] == "megatron" and not path.startswith(MEGATRON_PLACES):
                found.append(f"{path}:{line}: imports {module}")
    assert_none(found)


def test_every_package_declares_what_it_imports():
    """A dependency that only comes along with another one is gone the day the other one drops it."""
    owners = packages_distributions()
    found = []
    for path, tree in python_files():
        declared = declared_distributions(path.split("/")[0])
        for module, line in imported_modules(tree) if declared else ():
            top = module.split(".")[0]
            names = {normalized(name) for name in owners.get(top, ())}
            if top not in (*sys.stdlib_module_names, *PACKAGES) and names and not names & declared:
                found.append(f"{path}:{line}: imports {module} of {', '.join(sorted(names))}, which is not declared")
    assert_none(found)


def test_no_imports_go_in_a_circle():
    """Counts imports inside functions and under TYPE_CHECKING too: what needs the other's types needs the other."""
    imports = {module_of(path): modules_it_imports(tree) for path, tree in python_files() if path.startswith(PACKAGES)}
    sorter = TopologicalSorter({module: wanted & imports.keys() for module, wanted in imports.items()})
    try:
        sorter.prepare()
    except CycleError as circle:
        raise AssertionError(" -> ".join(circle.args[1])) from None


def test_the_checker_of_plans_never_imports_the_planner_it_checks():
    [tree] = [tree for path, tree in python_files() if path == "tests/liver_core/reshard/checker.py"]
    assert "liver_core.reshard.planner" not in {module for module, _ in imported_modules(tree)}


def test_private_names_of_torch_are_touched_only_where_they_are_checked_at_start():
    found = []
    for path, tree in python_files():
        if path.startswith(PRIVATE_TORCH_PLACES):
            continue
        found += [f"{path}:{line}: uses {name}" for name, line in private_torch_names(tree)]
    assert_none(found)


def test_the_tree_names_no_registry_and_no_path_of_one_machine():
    assert_none(
        [
            f"{path}:{number}: {match.group(0)} in: {line.strip()[:80]}"
            for path, number, line in lines_of_text()
            if (match := FOREIGN_ADDRESSES.search(line)) and path != "tests/test_tidy.py"
        ]
    )


def test_every_decision_record_says_its_status_and_what_follows_from_it():
    records = sorted((ROOT / "docs" / "adr").glob("[0-9]*.md"))
    assert records, "docs/adr has no records"
    found = []
    for number, record in enumerate(records, start=1):
        text = record.read_text()
        if not record.name.startswith(f"{number:04d}-"):
            found.append(f"docs/adr/{record.name}:1: expected number {number:04d}")
        for heading in ("Status:", "## Context", "## Decision", "## Consequences"):
            if heading not in text:
                found.append(f"docs/adr/{record.name}:1: does not have '{heading}'")
    assert_none(found)


def test_every_relative_link_in_a_document_leads_somewhere():
    found = []
    for path, number, line in lines_of_text():
        if not path.endswith(".md"):
            continue
        for target in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)|(?:src|href)=\"([^\"#]+)\"", line):
            link = target[0] or target[1]
            if (
                "://" not in link
                and not link.startswith("mailto:")
                and not (ROOT / path).parent.joinpath(link).exists()
            ):
                found.append(f"{path}:{number}: {link} does not exist")
    assert_none(found)


def test_every_allow_list_entry_still_names_something_that_exists():
    entries = [*MAY_BE_LONG, *MAY_HAVE_LONG_FUNCTIONS, *MAY_TAKE_MANY_PARAMETERS, *MAY_SLEEP]
    gone = [entry for entry in entries if not (ROOT / entry.split(":")[0]).exists()]
    assert_none([f"{entry}: is allowed, but gone" for entry in gone])


def assert_none(found: list[str]) -> None:
    assert not found, "\n" + "\n".join(found)


@cache
def files() -> tuple[str, ...]:
    """Paths of all files of the tree, relative to its root, without what the tools make."""
    kept = []
    stack = [ROOT]
    while stack:
        for entry in stack.pop().iterdir():
            hidden = entry.name.startswith(".") and entry.name != ".ci"
            if entry.name in OUTSIDE_THE_TREE or hidden or entry.is_symlink():
                continue
            if entry.is_dir():
                stack.append(entry)
            else:
                kept.append(entry.relative_to(ROOT).as_posix())
    return tuple(sorted(kept))


@cache
def text_of(path: str) -> str:
    return (ROOT / path).read_text(encoding="utf-8")


@cache
def python_files() -> tuple[tuple[str, ast.Module], ...]:
    ours = (path for path in files() if path.endswith(".py") and path.split("/")[0] in (*PACKAGES, "tests"))
    return tuple((path, ast.parse(text_of(path), filename=path)) for path in ours)


def lines_of_text() -> Iterator[tuple[str, int, str]]:
    for path in files():
        if Path(path).suffix in TEXT_SUFFIXES:
            for number, line in enumerate(text_of(path).splitlines(), start=1):
                yield path, number, line


@cache
def declared_distributions(package: str) -> frozenset[str]:
    """Names of the distributions that `package` may count on; empty for what has no extra of its own."""
    extras = {"liver_core": ("core",), "agent": ("agent", "core"), "service": ("service",), "migrations": ("service",)}
    extras["deploy"] = ("service", "agent", "core")
    project = tomllib.loads(text_of("pyproject.toml"))["project"]
    wanted = [project["optional-dependencies"][extra] for extra in extras.get(package, ())]
    lists = [*wanted, project["dependencies"]] if wanted else []
    return frozenset(normalized(re.split(r"[\[<>=!~ ;]", each)[0]) for names in lists for each in names)


def normalized(distribution: str) -> str:
    return re.sub(r"[-_.]+", "-", distribution).lower()


def functions(tree: ast.Module) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    return (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))


def decorator_name(decorator: ast.expr) -> str:
    target = decorator.func if isinstance(decorator, ast.Call) else decorator
    return target.attr if isinstance(target, ast.Attribute) else target.id if isinstance(target, ast.Name) else ""


def imported_modules(tree: ast.Module) -> Iterator[tuple[str, int]]:
    """Absolute modules that a file imports anywhere in it, also by name through importlib."""
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=names):
                yield from ((alias.name, node.lineno) for alias in names)
            case ast.ImportFrom(module=str(module), level=0):
                yield module, node.lineno
            case ast.Call(func=ast.Attribute(attr="import_module"), args=[ast.Constant(value=str(module)), *_]):
                yield module, node.lineno
            case ast.Call(func=ast.Name(id="__import__" | "import_module"), args=[ast.Constant(value=str(module)), *_]):
                yield module, node.lineno


def module_of(path: str) -> str:
    return path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def modules_it_imports(tree: ast.Module) -> set[str]:
    """Modules that a file imports, whole or names of them. A package stands for its `__init__` only."""
    found = {module for module, _ in imported_modules(tree)}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def sleeping_lines(tree: ast.Module) -> Iterator[int]:
    for node in ast.walk(tree):
        match node:
            case ast.Call(func=ast.Attribute(value=ast.Name(id="time"), attr="sleep")):
                yield node.lineno
            case ast.ImportFrom(module="time", names=names) if any(alias.name == "sleep" for alias in names):
                yield node.lineno


def private_torch_names(tree: ast.Module) -> Iterator[tuple[str, int]]:
    """Names with one leading underscore that are imported from torch or reached as attributes of it."""
    aliases = {"torch"}
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=names):
                aliases |= {alias.asname for alias in names if alias.asname and alias.name.startswith("torch")}
            case ast.ImportFrom(module=str(module), level=0, names=names) if module.split(".")[0] == "torch":
                aliases |= {alias.asname or alias.name for alias in names if alias.name.islower()}
                yield from ((f"{module}.{alias.name}", node.lineno) for alias in names if is_private(alias.name))
                if any(is_private(part) for part in module.split(".")):
                    yield module, node.lineno
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and is_private(node.attr) and root_name(node) in aliases:
            yield ast.unparse(node), node.lineno


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def root_name(node: ast.expr) -> str:
    while isinstance(node, ast.Attribute):
        node = node.value
    return node.id if isinstance(node, ast.Name) else ""


def test_every_argument_about_a_mutant_names_code_that_stands_there() -> None:
    for each in tomllib.loads((ROOT / "tests/mutants/equivalent.toml").read_text())["mutant"]:
        assert set(each) == {"file", "function", "change", "argument"}, each
        changed = each["change"].split(" -> ")[0].strip()
        lines = " ".join(line.strip() for line in (ROOT / each["file"]).read_text().splitlines())
        assert changed in lines and each["argument"], each
