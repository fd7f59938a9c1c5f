"""What rank, agent and service agree on are members of an enum: no program compares with the word for one.

The rule looks at the source: a comparison or a pattern with a text that is the value of a shared enum, and, where ranks
and agents meet, any text that only such an enum could mean.
"""

import ast
from collections.abc import Iterator
from enum import StrEnum
from pathlib import Path

import pytest

from agent.protocol import values
from liver_core.handoff import messages

ROOT = Path(__file__).resolve().parent.parent
COMPARED = ("agent", "liver_core")
WHERE_RANK_AND_AGENT_MEET = ("agent/driver", "agent/supervisor", "agent/worker", "liver_core/rank")


def shared_words() -> dict[str, str]:
    """Each value of the enums that several packages share, with a member that has it."""
    found: dict[str, str] = {}
    for module in (messages, values):
        for kind in vars(module).values():
            if isinstance(kind, type) and issubclass(kind, StrEnum) and kind is not StrEnum:
                found |= {str(member): f"{kind.__name__}.{member.name}" for member in kind}
    return found


WORDS = shared_words()


def compared_words(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Texts that something is compared with: `x == "a"`, `x in ("a", "b")`, `case "a"`, `case Reason(phase="a")`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.MatchValue):
            yield from texts_in(node.value)
        elif isinstance(node, ast.Compare):
            for operator, operand in zip(node.ops, node.comparators, strict=True):
                yield from texts_in(operand)
                if isinstance(operator, ast.Eq | ast.NotEq):
                    yield from texts_in(node.left)


def texts_in(node: ast.expr) -> Iterator[tuple[int, str]]:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield node.lineno, node.value
    elif isinstance(node, ast.Tuple | ast.List | ast.Set):
        for item in node.elts:
            yield from texts_in(item)


def several_words(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Texts of several words, such as "cutting_over": nobody writes one by chance. Docstrings are longer than that."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and "_" in node.value:
            yield node.lineno, node.value


def sources(folders: tuple[str, ...]) -> Iterator[Path]:
    for folder in folders:
        yield from sorted((ROOT / folder).rglob("*.py"))


def told(path: Path, found: Iterator[tuple[int, str]]) -> list[str]:
    where = path.relative_to(ROOT)
    return [f"{where}:{line}: {text!r} is {WORDS[text]}" for line, text in found if text in WORDS]


def test_nothing_is_compared_with_the_word_for_a_member_of_a_shared_enum() -> None:
    found = [line for path in sources(COMPARED) for line in told(path, compared_words(ast.parse(path.read_text())))]
    assert not found, "\n" + "\n".join(found)


def test_where_rank_and_agent_meet_no_member_of_a_shared_enum_is_spelled_out() -> None:
    paths = sources(WHERE_RANK_AND_AGENT_MEET)
    found = [line for path in paths for line in told(path, several_words(ast.parse(path.read_text())))]
    assert not found, "\n" + "\n".join(found)


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ('if stage == "streaming": pass', ["streaming"]),
        ('if "prepared" != stage: pass', ["prepared"]),
        ('if stage in ("aborted", BROKEN, "left"): pass', ["aborted", "left"]),
        ('match why:\n    case Reason(phase="replay", text=text): pass', ["replay"]),
        ('match stage:\n    case "ready" | "active": pass', ["ready", "active"]),
        ('if "active" in marks: pass', []),
        ('say(stage, "streaming")', []),
    ],
)
def test_the_rule_finds_what_it_looks_for(source: str, words: list[str]) -> None:
    assert [text for _, text in compared_words(ast.parse(source)) if text in WORDS] == words


def test_the_rule_finds_a_phase_that_is_spelled_out() -> None:
    assert [text for _, text in several_words(ast.parse('Reason(text, "estimate_memory")'))] == ["estimate_memory"]
    assert {"estimate_memory", "cutting_over", "streaming", "go_redo", "drop_step"} <= WORDS.keys()
