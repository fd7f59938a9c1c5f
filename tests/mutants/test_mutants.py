"""The pure part of `make mutants`: where it mutates, what a seed draws, what is reported; and its own operators."""

from dataclasses import replace

import pytest
from cosmic_ray.mutating import mutate_code
from cosmic_ray.operators.operator import Example

from tests.mutants import sampling
from tests.mutants.operators import Operators
from tests.mutants.packages import PACKAGES
from tests.mutants.run import ROOT
from tests.mutants.sampling import Fate, Mutant, Mutation

SOURCE = '''"""Of a module."""
LIMIT = 3


class Box:
    size: int | None = 1

    def grow(self, by: int | None = 2) -> int | None:
        assert by > 0, "proved"
        _log.info("grows by %d", by + 1)
        text = f"{by + 1} more"
        many: int | None = by + 4
        pairs = zip(text, text, strict=True)

        def inner(x: int = 5) -> int:
            return x + 6

        return inner(7) + many
'''


def place(text: str) -> sampling.Position:
    """Where this text begins."""
    before = SOURCE[: SOURCE.index(text)]
    return before.count("\n") + 1, len(before) - before.rfind("\n") - 1


@pytest.mark.parametrize(
    ("text", "function"),
    [
        ("+ 4", "Box.grow"), ("+ 6", "Box.grow.inner"), ("7) +", "Box.grow"), ("3\n", None), ("| None = 1", None),
        ("2) ->", None), ("> 0", None), ("by + 1)", None), ("+ 1} more", None), ("| None = by", None), ("5) ->", None),
        ("True)", None), ("text, strict", "Box.grow"),
    ],
)  # fmt: skip
def test_only_what_a_function_decides_is_mutated(text: str, function: str | None) -> None:
    assert sampling.function_of(place(text), SOURCE) == function


def mutations(count: int, operators: int = 3) -> list[Mutation]:
    return [
        Mutation("layout", "a.py", "f", (line, 0), f"core/{operator}", 0)
        for line in range(count)
        for operator in range(operators)
    ]


def test_a_seed_draws_the_same_mutants_however_they_were_found_and_another_seed_draws_others() -> None:
    drawn = list(sampling.in_seeded_order(mutations(50), 1))
    assert drawn == list(sampling.in_seeded_order(mutations(50)[::-1], 1))
    assert drawn != list(sampling.in_seeded_order(mutations(50), 2))


def test_each_place_is_drawn_once_whatever_can_be_done_to_it() -> None:
    drawn = list(sampling.in_seeded_order([*mutations(20), *mutations(1, operators=90)], 1))
    assert sorted(mutation.start[0] for mutation in drawn) == list(range(20))


def test_packages_share_alike_and_what_a_small_one_lacks_goes_to_others() -> None:
    assert sampling.shares({"a": 100, "b": 2, "c": 100}, 11) == {"a": 5, "b": 2, "c": 4}
    assert sampling.shares({"a": 1, "b": 2}, 50) == {"a": 1, "b": 2}


def test_a_change_is_told_by_the_lines_that_differ() -> None:
    before = "def f(x):\n    if x > 1:\n        save(x)\n    return x\n"
    assert sampling.change_between(before, before.replace(">", "<")) == "if x > 1: -> if x < 1:"
    assert sampling.change_between(before, before.replace("save(x)", "pass")) == "save(x) -> pass"
    assert sampling.change_between("@cache\ndef f(): ...\n", "def f(): ...\n") == "@cache -> "


def test_tests_named_after_a_file_come_first_then_those_that_speak_of_it() -> None:
    order = ["t/test_rules.py", "t/b/test_more_rules.py", "t/test_near.py", "t/test_far.py"]
    texts = dict.fromkeys(order[::-1], "") | {"t/test_near.py": "from a import rules"}
    assert sampling.nearest_first("a/rules.py", texts) == order


def mutant(package: str, change: str, line: int = 1) -> Mutant:
    return Mutant(Mutation(package, f"{package}.py", "f", (line, 0), "core/x", 0), change)


def test_an_argument_counts_only_where_file_function_and_change_are_as_it_says() -> None:
    argued = [{"file": "a.py", "function": "f", "change": "x -> y", "argument": "because"}]
    one = mutant("a", "x -> y")
    assert sampling.is_argued(one, argued)
    for other in (
        mutant("b", "x -> y"), mutant("a", "x -> z"), replace(one, mutation=replace(one.mutation, function="g"))
    ):  # fmt: skip
        assert not sampling.is_argued(other, argued)


def test_the_report_counts_by_package_and_names_every_survivor() -> None:
    fates = [Fate.KILLED] * 5 + [Fate.ARGUED] * 2 + [Fate.SURVIVED]
    results = [(mutant("a", f"change {line}", line), fate) for line, fate in enumerate(fates)]
    results.append((mutant("b", "c"), Fate.KILLED))
    assert sampling.report(results) == {
        "packages": {
            "a": {"tried": 8, "killed": 5, "equivalent_argued": 2},
            "b": {"tried": 1, "killed": 1, "equivalent_argued": 0},
        },
        "survivors": [{"file": "a.py", "line": 7, "change": "change 7"}],
    }


def test_what_is_argued_to_be_equivalent_neither_helps_nor_harms() -> None:
    assert sampling.share_killed({"tried": 8, "killed": 5, "equivalent_argued": 2}) == 5 / 6
    assert sampling.share_killed({"tried": 2, "killed": 0, "equivalent_argued": 2}) == 1.0
    assert sampling.share_killed({"tried": 2, "killed": 0, "equivalent_argued": 0}) == 0.0


@pytest.mark.parametrize(
    ("name", "example"), [(name, each) for name, operator in Operators().items() for each in operator.examples() or ()]
)
def test_each_own_operator_does_what_its_examples_say(name: str, example: Example) -> None:
    changed = mutate_code(example.pre_mutation_code, Operators()[name](), example.occurrence)
    assert changed == example.post_mutation_code


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("TakeOtherEnd", "x = min\n"), ("TakeOtherEnd", "x.min(1)\n"), ("TakeOtherEnd", "def min(x): ...\n"),
        ("RemoveStatement", "x = 1\n"), ("RemoveStatement", "x: int = 1\n"), ("RemoveStatement", "assert x\n"),
        ("RemoveStatement", "pass\n"), ("RemoveStatement", '"""Text."""\n'),
    ],
)  # fmt: skip
def test_own_operators_leave_alone_what_is_no_mistake_or_is_found_by_any_test(name: str, text: str) -> None:
    assert mutate_code(text, Operators()[name](), 0) is None


def test_every_package_has_sources_and_tests_that_exist() -> None:
    for package in PACKAGES.values():
        assert package.sources and package.tests
        assert all((ROOT / path).exists() for path in (*package.sources, *package.tests)), package
