"""Which places of the decisive modules are mutated, which of them a seed picks, and what the results come to. Pure."""

import ast
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from pathlib import PurePath

KILLED_LEAST = 0.85
"""Of the mutants of one package that are not argued to be equivalent."""
Position = tuple[int, int]


class Fate(StrEnum):
    """What became of a mutant. Argued: no test found it, and its argument says that none can."""

    KILLED = "killed"
    SURVIVED = "survived"
    ARGUED = "equivalent"


@dataclass(frozen=True, slots=True)
class Mutation:
    """One change at one place: what `operator` does at its `occurrence` in `file`. `start`: line, from 1, and column,
    from 0. `function`: the innermost one that it stands in, with its class."""

    package: str
    file: str
    function: str
    start: Position
    operator: str
    occurrence: int


@dataclass(frozen=True, slots=True)
class Mutant:
    """A mutation that was carried out; `change` says which text became which."""

    mutation: Mutation
    change: str


def nearest_first(file: str, tests: Mapping[str, str]) -> list[str]:
    """The paths of `tests`, whose values are their texts. First come those that most likely find a mistake in `file`:
    named after it, then speaking of it. So most mutants are found early."""
    stem = PurePath(file).stem

    def distance(path: str) -> int:
        name = PurePath(path).stem
        return 0 if name == f"test_{stem}" else 1 if stem in name else 2 if stem in tests[path] else 3

    return sorted(tests, key=lambda path: (distance(path), path))


@cache
def functions_at(source: str) -> tuple[tuple[str, Position, Position], ...]:
    """Name, begin and end of every function's body; an inner one comes after the one that it stands in."""

    def walk(node: ast.AST, name: str) -> Iterator[tuple[str, Position, Position]]:
        for child in ast.iter_child_nodes(node):
            inner = name
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                inner = f"{name}.{child.name}".lstrip(".")
                if not isinstance(child, ast.ClassDef):
                    first, last = child.body[0], child.body[-1]
                    yield inner, (first.lineno, first.col_offset), _end(last)
            yield from walk(child, inner)

    return tuple(walk(ast.parse(source), ""))


@cache
def indifferent(source: str) -> tuple[tuple[Position, Position], ...]:
    """Begin and end of what decides nothing: types, decorators, defaults, log lines, wording, and assertions (that of a
    `zip` too: `strict`), which say what was proved elsewhere."""
    found: list[ast.expr | ast.stmt | None] = []
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                arguments = node.args
                every = (
                    *arguments.posonlyargs,
                    *arguments.args,
                    *arguments.kwonlyargs,
                    arguments.vararg,
                    arguments.kwarg,
                )
                found += [node.returns, *node.decorator_list, *arguments.defaults, *arguments.kw_defaults]
                found += [argument.annotation for argument in every if argument is not None]
            case ast.AnnAssign():
                found.append(node.annotation)
            case ast.Assert() | ast.JoinedStr():
                found.append(node)
            case ast.Call(func=ast.Name(id="zip"), keywords=[ast.keyword(arg="strict", value=value)]):
                found.append(value)
            case ast.Expr(value=ast.Call(func=ast.Attribute(value=ast.Name(id="_log")) | ast.Name(id="assert_never"))):
                found.append(node)
    return tuple(((item.lineno, item.col_offset), _end(item)) for item in found if item is not None)


def function_of(start: Position, source: str) -> str | None:
    """The function whose behaviour a change at `start` may alter; None outside of functions and where nothing is
    decided. Constants and tables are left out: a test that knows the figure would only repeat it."""
    if any(begin <= start < end for begin, end in indifferent(source)):
        return None
    return next((name for name, begin, end in reversed(functions_at(source)) if begin <= start < end), None)


def shares(available: Mapping[str, int], count: int) -> dict[str, int]:
    """How many of `count` mutants each package gets: all the same, and what a small one cannot use goes to others."""
    given = dict.fromkeys(available, 0)
    while sum(given.values()) < min(count, sum(available.values())):
        least = min((name for name in given if given[name] < available[name]), key=lambda name: given[name])
        given[least] += 1
    return given


def in_seeded_order(mutations: Sequence[Mutation], seed: int) -> Iterator[Mutation]:
    """One mutation for each place, in the order of the seed, so that a place with many operators is not drawn more
    often than others. The same seed and sources give the same order."""
    places: dict[tuple[str, Position], list[Mutation]] = {}
    for mutation in sorted(mutations, key=lambda item: (item.file, item.start, item.operator, item.occurrence)):
        places.setdefault((mutation.file, mutation.start), []).append(mutation)
    chance = random.Random(seed)
    order = list(places.values())
    chance.shuffle(order)
    return (chance.choice(choices) for choices in order)


def change_between(before: str, after: str) -> str:
    """The lines that differ, without those around them; what was taken away is nothing."""
    old, new = before.splitlines(), after.splitlines()
    while old and new and old[0] == new[0]:
        del old[0], new[0]
    while old and new and old[-1] == new[-1]:
        del old[-1], new[-1]
    return " -> ".join(" ".join(line.strip() for line in lines) for lines in (old, new))


def is_argued(mutant: Mutant, arguments: Sequence[Mapping[str, str]]) -> bool:
    """Whether an argument names exactly this change in this function."""
    where = {"file": mutant.mutation.file, "function": mutant.mutation.function, "change": mutant.change}
    return any(where.items() <= argument.items() for argument in arguments)


def report(results: Sequence[tuple[Mutant, Fate]]) -> dict[str, object]:
    """What is written to `mutants.json`."""
    packages: dict[str, dict[str, int]] = {}
    for mutant, fate in results:
        counts = packages.setdefault(mutant.mutation.package, {"tried": 0, "killed": 0, "equivalent_argued": 0})
        counts["tried"] += 1
        counts["killed"] += fate is Fate.KILLED
        counts["equivalent_argued"] += fate is Fate.ARGUED
    survivors = [
        {"file": mutant.mutation.file, "line": mutant.mutation.start[0], "change": mutant.change}
        for mutant, fate in results
        if fate is Fate.SURVIVED
    ]
    return {"packages": packages, "survivors": survivors}


def share_killed(counts: Mapping[str, int]) -> float:
    """Of those that a test could find."""
    findable = counts["tried"] - counts["equivalent_argued"]
    return counts["killed"] / findable if findable else 1.0


def _end(node: ast.expr | ast.stmt) -> Position:
    return node.end_lineno or node.lineno, node.end_col_offset or node.col_offset
