"""The text of a job file as fields: what JSON can say, of a bounded size and depth, whatever the text is. Pure."""

import math
from collections.abc import Iterator
from datetime import date

import yaml
from pydantic import TypeAdapter
from yaml.nodes import MappingNode, ScalarNode

from agent.protocol.errors import FieldProblem
from agent.protocol.jobfile_check import PROBLEMS_MAX, JobFileError

VALUES_MAX = 20_000
"""Values in one file, counting those that stand behind an alias wherever it is used."""
DEPTH_MAX = 32
PLAIN_CHARS_MAX = 4_096
INTEGER_LEAST, INTEGER_MOST = -(2**63), 2**64 - 1
_JSON: TypeAdapter[object] = TypeAdapter(object)
_TEXT = "tag:yaml.org,2002:str"
_GUESSED = {f"tag:yaml.org,2002:{kind}" for kind in ("int", "float", "bool", "timestamp")}
# The one in C is ten times as fast; where PyYAML was built without it, the other reads the same language.
_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


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
            return _JSON.validate_json(text)
        except ValueError:
            pass  # A mapping of YAML may begin so too; where it is neither, YAML says better where.
    _check_size(text)
    loader = _LOADER(text)
    try:
        node = loader.get_single_node()
        _keep_environment_as_written(node)
        return loader.construct_document(node) if node is not None else None
    finally:
        loader.dispose()


def _check_size(text: str) -> None:
    """Raises ValueError for more values or levels than a job file may have. Events are counted before anything is made
    of them: an alias counts as much as what it stands for, also where mappings are merged."""
    sizes: dict[str, int] = {}
    opened: list[tuple[str | None, int]] = []
    values = 0
    for event in yaml.parse(text, Loader=_LOADER):
        anchor = getattr(event, "anchor", None)
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


def _keep_environment_as_written(root: object) -> None:
    """An environment holds text: `010`, `1.10`, `12:30` and `yes` reach the ranks as they stand in the file, not as the
    number or the truth value that YAML makes of them."""
    for name, part in root.value if isinstance(root, MappingNode) else ():
        if isinstance(name, ScalarNode) and name.value == "environment" and isinstance(part, MappingNode):
            for _, value in part.value:
                if isinstance(value, ScalarNode) and value.tag in _GUESSED:
                    value.tag = _TEXT


def _plain(value: object, place: tuple[str, ...], problems: list[FieldProblem]) -> object:
    """The value as JSON has it: times become text. What JSON, or the database, cannot hold becomes a problem."""
    if isinstance(value, date):
        return value.isoformat()
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
            field = ".".join((*place, ascii(name)[:80]))[:500]
            problems.append(FieldProblem(field=field, rule="the name must be text, perhaps in quotes"))


def _rule(value: object) -> str:
    """The rule that a value breaks; empty if none."""
    match value:
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
