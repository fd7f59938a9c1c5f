"""Mutations that cosmic-ray lacks and that people make: a statement is forgotten, or the wrong end is taken."""

from collections.abc import Iterator
from typing import Any

from cosmic_ray.operators.operator import Example, Operator
from parso.python.tree import Keyword, Name

OTHER_END = {"min": "max", "max": "min", "any": "all", "all": "any"}
REMOVABLE = {"raise_stmt", "return_stmt", "del_stmt"}


class RemoveStatement(Operator):
    """A call, a return, a raise, a deletion, or an assignment to an attribute or an element becomes `pass`."""

    def mutation_positions(self, node: Any) -> Iterator[Any]:  # pyright: ignore[reportIncompatibleMethodOverride]
        if node.type == "simple_stmt" and _is_removable(node.children[0]):
            yield node.children[0].start_pos, node.children[0].end_pos

    def mutate(self, node: Any, index: int) -> Any:
        statement = node.children[0]
        node.children[0] = Keyword("pass", statement.start_pos, prefix=statement.get_first_leaf().prefix)
        return node

    @classmethod
    def examples(cls) -> tuple[Example, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return (
            Example("save(x)\n", "pass\n"),
            Example("await save(x)\n", "pass\n"),
            Example("self.x = 1\n", "pass\n"),
            Example("x += 1\n", "pass\n"),
            Example("def f():\n    return\n", "def f():\n    pass\n"),
            Example("raise E(x)\n", "pass\n"),
        )


class TakeOtherEnd(Operator):
    """`min` for `max`, `any` for `all`, and the other way round, where they are called."""

    def mutation_positions(self, node: Any) -> Iterator[Any]:  # pyright: ignore[reportIncompatibleMethodOverride]
        if isinstance(node, Name) and node.value in OTHER_END and _is_called(node):
            yield node.start_pos, node.end_pos

    def mutate(self, node: Any, index: int) -> Any:
        node.value = OTHER_END[node.value]
        return node

    @classmethod
    def examples(cls) -> tuple[Example, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return (Example("min(x, y)", "max(x, y)"), Example("all(x)", "any(x)"))


class Operators(dict[str, type[Operator]]):
    """What cosmic-ray asks for: the operators by name."""

    def __init__(self) -> None:
        super().__init__({operator.__name__: operator for operator in (RemoveStatement, TakeOtherEnd)})


def _is_removable(statement: Any) -> bool:
    if statement.type == "keyword":
        return statement.value == "return"
    if statement.type == "atom_expr":
        return statement.children[-1].type == "trailer" and statement.children[-1].children[0].value == "("
    if statement.type == "expr_stmt":
        # The name that a plain assignment makes is used further down: its loss is found by any test that gets there.
        changes = statement.children[1].type == "operator" and statement.children[1].value != "="
        return changes or statement.children[0].type == "atom_expr"
    return statement.type in REMOVABLE


def _is_called(name: Any) -> bool:
    following = name.get_next_leaf()
    before = name.get_previous_leaf()
    is_attribute = before is not None and before.value in (".", "def")
    return following is not None and following.value == "(" and not is_attribute
