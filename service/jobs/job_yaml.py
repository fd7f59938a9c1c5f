"""The text of a job file as fields: what JSON can say, of a bounded size and depth, whatever the text is. Pure.

Values mean what YAML 1.2 says they do. What YAML 1.1 reads as another number or truth value is refused, since people
write for either. So is a name that stands twice in one mapping, of which one would be dropped.
"""

import json
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import yaml
from yaml.nodes import CollectionNode, MappingNode, Node, ScalarNode

from agent.protocol.errors import FieldProblem
from agent.protocol.jobfile_check import PROBLEMS_MAX, JobFileError

VALUES_MAX = 20_000
"""Values in one file, counting those that stand behind an alias wherever it is used."""
DEPTH_MAX = 32
PLAIN_CHARS_MAX = 4_096
INTEGER_LEAST, INTEGER_MOST = -(2**63), 2**64 - 1
_TEXT, _MERGE = "tag:yaml.org,2002:str", "tag:yaml.org,2002:merge"
_TAGS = (None, "!", _TEXT, *(f"tag:yaml.org,2002:{kind}" for kind in ("null", "map", "seq")))
"""What may be written before a value. Others are for kinds of values that are known without them."""
_DOUBTFUL, _TWICE = "!doubtful", "!twice"
_GUESSED = {*(f"tag:yaml.org,2002:{kind}" for kind in ("int", "float", "bool")), _DOUBTFUL}
_DOUBTFUL_FORMS = (
    (re.compile(r"(?:yes|Yes|YES|no|No|NO|on|On|ON|off|Off|OFF)$"), "true or false"),
    (re.compile(r"[-+]?0[0-9]+$"), "it without zeros in front"),
    (
        re.compile(
            r"(?=[^_]*_)[-+]?(?:0x[0-9a-fA-F_]+|0b[01_]+|[0-9][0-9_]*(?::[0-5]?[0-9])*(?:\.[0-9_]*)?(?:[eE][-+][0-9]+)?"
            r"|\.[0-9][0-9_]*(?:[eE][-+][0-9]+)?)$"
        ),
        "it without _",
    ),
    (re.compile(r"[-+]?0b[01]+$|[-+]0x[0-9a-fA-F]+$"), "a number to the base of ten"),
    (re.compile(r"[-+]?[0-9]+(?::[0-5]?[0-9])+(?:\.[0-9]*)?$"), "a number to the base of ten"),
)
"""What YAML 1.1 reads as another number or truth value than YAML 1.2, and what to write instead."""
_FORMS = (
    *((_DOUBTFUL, form) for form, _ in _DOUBTFUL_FORMS),
    ("tag:yaml.org,2002:null", re.compile(r"(?:~|null|Null|NULL|)$")),
    ("tag:yaml.org,2002:bool", re.compile(r"(?:true|True|TRUE|false|False|FALSE)$")),
    ("tag:yaml.org,2002:int", re.compile(r"[-+]?[0-9]+$|0o[0-7]+$|0x[0-9a-fA-F]+$")),
    (
        "tag:yaml.org,2002:float",
        re.compile(
            r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?$|[-+]?\.(?:inf|Inf|INF)$|\.(?:nan|NaN|NAN)$"
        ),
    ),
    (_MERGE, re.compile(r"<<$")),
)
"""What a value without quotes is, by the first form that it has: YAML 1.2's core schema, and merging."""


@dataclass(frozen=True, slots=True)
class _Refused:
    """Stands for a value that no job file may hold. `text`: as it is written, where a name may be written so."""

    rule: str
    text: str = ""


# The one in C is ten times as fast; where PyYAML was built without it, the other reads the same language.
_BASE: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


class _Loader(_BASE):
    """Reads values as `_FORMS` say."""

    yaml_implicit_resolvers = {None: [*_FORMS]}  # noqa: RUF012 - PyYAML's name and form


def _doubtful(_: object, node: ScalarNode) -> _Refused:
    instead = next((instead for form, instead in _DOUBTFUL_FORMS if form.match(node.value)), "it in quotes")
    rule = f"{node.value} means different things in YAML 1.1 and 1.2; write {instead}, or '{node.value}' for the text"
    return _Refused(rule[:500], node.value)


_Loader.add_constructor(_DOUBTFUL, _doubtful)
_Loader.add_constructor(_TWICE, lambda *_: _STANDS_TWICE)
_Loader.add_constructor(_MERGE, lambda _, node: node.value)  # Only as a name do the two arrows merge.
_STANDS_TWICE = _Refused("stands here twice; leave one out")


def read_fields(text: bytes) -> object:
    """What the text holds. Raises JobFileError where it is no YAML, with the place, or holds what no job file needs."""
    try:
        found = _read(text.decode())
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        raise JobFileError((FieldProblem(field="(whole)", rule=f"must be YAML or JSON: {error}"[:500]),)) from error
    problems: list[FieldProblem] = []
    fields = _plain(found, (), problems)
    if problems:
        raise JobFileError(tuple(problems[:PROBLEMS_MAX]))
    return fields


def _read(text: str) -> object:
    if text.lstrip().startswith("{"):
        try:
            found = json.loads(text, object_pairs_hook=_each_once)
        except (ValueError, RecursionError):
            pass  # A mapping of YAML may begin so too; where it is neither, YAML says better where.
        else:
            _check_count(found)
            _keep_numbers_as_written(found, text)
            return found
    _check_size(text)
    loader = _Loader(text)
    try:
        node = loader.get_single_node()
        _keep_environment_as_written(node)
        _mark_names_that_stand_twice(node, set())
        return loader.construct_document(node) if node is not None else None
    finally:
        loader.dispose()


def _each_once(pairs: list[tuple[str, object]]) -> dict[str, object]:
    found: dict[str, object] = {}
    for name, value in pairs:
        found[name] = _STANDS_TWICE if name in found else value
    return found


def _keep_numbers_as_written(found: dict[str, object], text: str) -> None:
    """For JSON what `_keep_environment_as_written` is for YAML."""
    part = found.get("environment")
    if not isinstance(part, dict):
        return
    numbers = [name for name, value in part.items() if isinstance(value, int | float) and not isinstance(value, bool)]
    if numbers:
        written = json.loads(text, object_pairs_hook=_each_once, parse_int=str, parse_float=str)["environment"]
        part |= {name: written[name] for name in numbers}


def _check_count(found: object) -> None:
    """Raises ValueError for more values than a job file may have; names count too, as in YAML."""
    values, left = 0, [found]
    while left:
        part = left.pop()
        values += 1
        if isinstance(part, dict):
            values += len(part)
            left.extend(part.values())
        elif isinstance(part, list):
            left.extend(part)
        if values + len(left) > VALUES_MAX:
            raise ValueError(f"more than {VALUES_MAX} values")


def _check_size(text: str) -> None:
    """Raises ValueError for more values or levels than a job file may have. Events are counted before anything is made
    of them: an alias counts as much as what it stands for, also where mappings are merged."""
    sizes: dict[str, int] = {}
    opened: list[tuple[str | None, int]] = []
    values = 0
    for event in yaml.parse(text, Loader=_Loader):
        anchor, tag = getattr(event, "anchor", None), getattr(event, "tag", None)
        if tag not in _TAGS:
            tag = tag.replace("tag:yaml.org,2002:", "!!")[:60]
            raise ValueError(f"a value with the tag {tag}; write it without a tag{event.start_mark}")
        if isinstance(event, yaml.AliasEvent):
            if anchor not in sizes:
                raise ValueError(f"alias *{anchor} stands for nothing before it, or for what it is part of")
            values += sizes[anchor]
        elif isinstance(event, yaml.CollectionStartEvent):
            opened.append((anchor, values))
            values += 1
        elif isinstance(event, yaml.CollectionEndEvent):
            name, before = opened.pop()
            if name is not None:
                sizes[name] = values - before
        elif isinstance(event, yaml.ScalarEvent):
            values += 1
            if anchor is not None:
                sizes[anchor] = 1
            if event.implicit[0] and len(event.value) > PLAIN_CHARS_MAX:
                raise ValueError(f"more than {PLAIN_CHARS_MAX} characters without quotes{event.start_mark}")
        if values > VALUES_MAX:
            raise ValueError(f"more than {VALUES_MAX} values, with what aliases stand for")
        if len(opened) > DEPTH_MAX:
            raise ValueError(f"more than {DEPTH_MAX} levels{event.start_mark}")


def _keep_environment_as_written(root: Node | None) -> None:
    """An environment holds text: `010`, `1.10`, `12:30` and `yes` reach the ranks as they stand in the file, not as the
    number or the truth value that YAML makes of them."""
    if not isinstance(root, MappingNode):
        return
    for place, (name, part) in enumerate(root.value):
        if isinstance(name, ScalarNode) and name.value == "environment" and isinstance(part, MappingNode):
            # Made anew: an alias shares its node with the place of its anchor, where values stay what they are.
            variables = [(variable, _as_written(value)) for variable, value in part.value]
            root.value[place] = (name, MappingNode(part.tag, variables, part.start_mark, part.end_mark))


def _as_written(node: Node) -> Node:
    return ScalarNode(_TEXT, node.value) if isinstance(node, ScalarNode) and node.tag in _GUESSED else node


def _mark_names_that_stand_twice(node: Node | None, seen: set[int]) -> None:
    """Before mappings are merged, where a name may well stand over another one."""
    if not isinstance(node, CollectionNode) or id(node) in seen:
        return
    seen.add(id(node))
    if not isinstance(node, MappingNode):
        for part in node.value:
            _mark_names_that_stand_twice(part, seen)
        return
    places: dict[tuple[str, str], int] = {}
    for place, (name, part) in enumerate(node.value):
        _mark_names_that_stand_twice(part, seen)
        if not isinstance(name, ScalarNode) or name.tag == _MERGE:
            continue
        if places.setdefault((name.tag, name.value), place) != place:
            node.value[place] = (name, ScalarNode(_TWICE, ""))


def _plain(value: object, place: tuple[str, ...], problems: list[FieldProblem]) -> object:
    """The value as JSON has it. What JSON, or the database, cannot hold becomes a problem."""
    rule = _rule(value) if len(place) <= DEPTH_MAX else f"lies more than {DEPTH_MAX} levels deep"
    if rule:
        problems.append(FieldProblem(field=(".".join(place) or "(whole)")[:500], rule=rule))
        return None
    if isinstance(value, dict):
        return {name: _plain(part, (*place, name), problems) for name, part in _named(value, place, problems)}
    if isinstance(value, list):
        return [_plain(part, (*place, str(index)), problems) for index, part in enumerate(value)]
    return value


def _named(value: dict, place: tuple[str, ...], problems: list[FieldProblem]) -> Iterator[tuple[str, object]]:
    for name, part in value.items():
        if isinstance(name, str) and not _rule(name):
            yield name, part
        else:
            written = name.text if isinstance(name, _Refused) else ascii(name)
            field = ".".join((*place, written[:80]))[:500]
            problems.append(FieldProblem(field=field, rule="the name must be text, perhaps in quotes"))


def _rule(value: object) -> str:
    """The rule that a value breaks; empty if none."""
    match value:
        case _Refused(rule=rule):
            return rule
        case None | bool() | dict() | list():
            return ""
        case str() if "\0" in value:
            return "must not contain a NUL character"
        case str():
            return "" if value.isascii() or _is_text(value) else "must be text that UTF-8 can write"
        case int():
            is_small = INTEGER_LEAST <= value <= INTEGER_MOST
            return "" if is_small else "must be a whole number that fits into 64 bits"
        case float():
            return "" if math.isfinite(value) else "must be a finite number"
    return "must be text, a number, true, false, a list or a mapping"


def _is_text(value: str) -> bool:
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True
