"""Checks a job file that a person wrote: each problem names the field, the rule, the value, a right one, a likely slip.

Pure. Values are not repeated where they may be secrets.
"""

import difflib
import re
from collections.abc import Iterator, Mapping
from typing import Any, get_args

from pydantic import BaseModel, TypeAdapter, ValidationError

from agent.protocol.errors import FieldProblem
from agent.protocol.jobfile import (
    ENTRYPOINT_PATTERN,
    EXAMPLE,
    LAYOUT_PATTERN,
    REFERENCE_TAG,
    TEXT_TAG,
    DdpRules,
    JobFile,
    ModelShape,
)
from agent.protocol.plain_rules import RULE_CHARS_MAX, rule_in_words
from liver_core import PACKAGES

SECRET_PLACES = ("environment", "args")
SHOWN_CHARS_MAX = 80
PROBLEMS_MAX = 256
_JSON: TypeAdapter[Any] = TypeAdapter(Any)
_AXIS = re.compile(r"(ETP|VPP|TP|PP|DP|CP|EP)\W*([1-9][0-9]{0,4})", re.IGNORECASE)
# Pydantic's own words for these say the rule, the value and what else counts.
_SAY_IT_ALL = {"value_error", "extra_forbidden", "missing"}


class JobFileError(ValueError):
    """What is wrong with a job file, field by field."""

    def __init__(self, problems: tuple[FieldProblem, ...]) -> None:
        super().__init__("; ".join(f"{problem.field}: {problem.rule}" for problem in problems))
        self.problems = problems


def check_job_file(content: object) -> JobFile:
    """The job file in `content`, as YAML or JSON gives it. Raises JobFileError with every problem found."""
    if not isinstance(content, Mapping):
        kind = {"list": "a list", "NoneType": "empty", "str": "text"}.get(type(content).__name__, "one value")
        raise JobFileError((FieldProblem(field="(whole)", rule=f"must be a mapping of fields, is {kind}"),))
    try:
        # As JSON, where a list is a tuple and a time is text, but "1" is not 1.
        found = JobFile.model_validate_json(_JSON.dump_json(content), strict=True)
    except ValidationError as error:
        raise JobFileError(tuple(_problem(item) for item in error.errors()[:PROBLEMS_MAX])) from None
    if (top := re.split(r"[.:]", found.entrypoint)[0]) in PACKAGES and top != "liver_core":
        rule = f"must not begin with {top}: it is the name of a package of LiveR, which ranks import in its place"
        raise JobFileError((FieldProblem(field="entrypoint", rule=f"{rule}; rename yours"),))
    if problems := tuple(_said_elsewhere(found)):
        raise JobFileError(problems)
    return found


def _said_elsewhere(job: JobFile) -> Iterator[FieldProblem]:
    """What `args` say of the model's shape or of DDP, which the planner reads in the sections of those alone."""
    places = {name: f"model.{name}" for name in ModelShape.model_fields}
    places |= {f"ddp_{name}" if name == "bucket_size" else name: f"ddp.{name}" for name in DdpRules.model_fields}
    said = job.model_dump(mode="json")
    for name in job.args.keys() & places.keys():
        section, _, field = places[name].partition(".")
        if (said[section] or {}).get(field) != job.args[name]:
            rule = f"belongs to {places[name]}, which the planner counts with and the entrypoint gets too; say it there"
            yield FieldProblem(field=f"args.{name}", rule=rule)


def _problem(item: Mapping[str, Any]) -> FieldProblem:
    location: tuple[int | str, ...] = tuple(part for part in item["loc"] if part not in (TEXT_TAG, REFERENCE_TAG))
    rule, kind = rule_in_words(item), item["type"]
    if kind == "extra_forbidden":
        rule += _known_fields(location)
    elif kind == "missing":
        rule += _example(location, with_name=True)
    elif kind not in _SAY_IT_ALL:
        rule += _example(location) + _given(location, item["input"]) + _slip(item)
    field = ".".join(str(part) for part in location) or "(whole)"
    return FieldProblem(field=field[:RULE_CHARS_MAX], rule=rule[:RULE_CHARS_MAX])


def _known_fields(location: tuple[int | str, ...]) -> str:
    """For a field that nobody knows: the one that was meant, the section it belongs to, or what is known there."""
    name = str(location[-1])
    section = _model_at(location[:-1]) or JobFile
    elsewhere = [".".join(place) for place, model in _sections() if name in model.model_fields and model is not section]
    if elsewhere:
        return f" here; it belongs {'under ' + ' or '.join(elsewhere) if elsewhere != [''] else 'to the top level'}"
    near = difflib.get_close_matches(name.lower(), section.model_fields, n=1)
    if near:
        return f"; did you mean {near[0]}?"
    return f"; known here: {', '.join(section.model_fields)}"


def _sections() -> Iterator[tuple[tuple[str, ...], type[BaseModel]]]:
    """The whole file, then each of its parts, by where it stands."""
    yield ("",), JobFile
    for name, field in JobFile.model_fields.items():
        if model := _model_of(field.annotation):
            yield (name,), model


def _model_at(location: tuple[int | str, ...]) -> type[BaseModel] | None:
    model: type[BaseModel] | None = JobFile
    for part in location:
        if isinstance(part, str):
            field = model.model_fields.get(part) if model else None
            model = _model_of(field.annotation) if field else None
    return model


def _model_of(annotation: Any) -> type[BaseModel] | None:
    """The part of a job file in a type such as `Part`, `Part | None` or `tuple[Part, ...]`."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next(filter(None, map(_model_of, get_args(annotation))), None)


def _example(location: tuple[int | str, ...], *, with_name: bool = False) -> str:
    """A right value of the field, from the example of the schema; nothing where that leaves the field out."""
    found: Any = EXAMPLE
    for part in location:
        match found:
            case {**fields} if part in fields:
                found = fields[part]
            case [first, *_]:
                found = first
            case _:
                return ""
    text = f"{location[-1]}: {_flow(found)}" if with_name else _flow(found)
    return f", such as {text}"


def _given(location: tuple[int | str, ...], value: object) -> str:
    if location[0] in SECRET_PLACES:
        return ""
    if isinstance(value, Mapping | list | tuple):
        return f"; is {'a mapping' if isinstance(value, Mapping) else 'a list'}"
    text = "empty" if value is None else repr(value) if isinstance(value, str) else _flow(value)
    return f"; is {text if len(text) <= SHOWN_CHARS_MAX else text[:SHOWN_CHARS_MAX] + '...'}"


def _slip(item: Mapping[str, Any]) -> str:
    """What was probably meant by a text of the wrong form."""
    value = item["input"]
    if item["type"] != "string_pattern_mismatch" or not isinstance(value, str) or len(value) > RULE_CHARS_MAX:
        return ""
    meant, pattern = "", item["ctx"]["pattern"]
    if pattern == LAYOUT_PATTERN:
        meant = "x".join(f"{axis.upper()}{size}" for axis, size in _AXIS.findall(value))
    elif pattern == ENTRYPOINT_PATTERN:
        path = re.sub(r"\.py(?=:|$)", "", value.strip().removesuffix("()")).replace("/", ".").strip(".")
        module, _, name = path.partition(":") if ":" in path else path.rpartition(".")
        meant = f"{module.replace('-', '_')}:{name}"
    elif item["loc"] == ("name",):
        meant = re.sub(r"[^A-Za-z0-9._-]+", "-", value).strip("-._")
    return f"; did you mean {meant}?" if meant and re.match(pattern, meant) else ""


def _flow(value: object) -> str:
    """A value as YAML writes it on one line."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{name}: {_flow(part)}" for name, part in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_flow, value)) + "]"
    return str(value).lower() if isinstance(value, bool) else str(value)
