"""The API description as what the page /docs shows: operations by tag, and the parts they are made of. Pure."""

from dataclasses import dataclass
from typing import Any

_BOUNDS = {
    "minimum": "at least",
    "maximum": "at most",
    "exclusiveMinimum": "above",
    "exclusiveMaximum": "below",
    "minLength": "characters at least:",
    "maxLength": "characters at most:",
    "maxItems": "items at most:",
    "pattern": "pattern",
    "default": "default",
}


@dataclass(frozen=True, slots=True)
class ValueType:
    """A type in words. `parts`: names of the components that it is made of, which the page links to."""

    text: str
    parts: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Field:
    """A parameter, or a field of a component. `place`: query, path or header; empty in a component."""

    name: str
    kind: ValueType
    rule: str
    about: str
    is_needed: bool
    place: str = ""


@dataclass(frozen=True, slots=True)
class DocumentedAnswer:
    """One status of an operation."""

    status: str
    kind: ValueType
    about: str


@dataclass(frozen=True, slots=True)
class Operation:
    """One method of one path. `body`: what is sent, if anything is."""

    name: str
    method: str
    path: str
    summary: str
    about: str
    fields: tuple[Field, ...]
    body: ValueType | None
    answers: tuple[DocumentedAnswer, ...]


@dataclass(frozen=True, slots=True)
class Component:
    """A part of bodies and answers. `kind`: of one that is no object."""

    name: str
    about: str
    fields: tuple[Field, ...]
    kind: ValueType


def operations_by_tag(described: dict[str, Any]) -> dict[str, list[Operation]]:
    """In the order of the description's tags, and there of the paths."""
    found: dict[str, list[Operation]] = {tag["name"]: [] for tag in described["tags"]}
    for path, methods in described["paths"].items():
        for method, operation in methods.items():
            found[operation["tags"][0]].append(_operation(described, path, method, operation))
    return found


def components(described: dict[str, Any]) -> list[Component]:
    """By name."""
    return [
        Component(name, schema.get("description", ""), _fields(schema), kind_of(schema))
        for name, schema in sorted(described["components"]["schemas"].items())
    ]


def kind_of(schema: dict[str, Any]) -> ValueType:
    """What a value may be, in words."""
    if reference := schema.get("$ref"):
        name = reference.rpartition("/")[2]
        return ValueType(name, (name,))
    if choices := schema.get("anyOf") or schema.get("oneOf") or schema.get("allOf"):
        kinds = [kind_of(choice) for choice in choices]
        return ValueType(" or ".join(kind.text for kind in kinds), tuple(part for kind in kinds for part in kind.parts))
    if "const" in schema:
        return ValueType(repr(schema["const"]))
    if "enum" in schema:
        return ValueType(" | ".join(map(str, schema["enum"])))
    match schema.get("type"):
        case "array":
            inner = kind_of(schema.get("items", {}))
            return ValueType(f"list of {inner.text}", inner.parts)
        case "object" if isinstance(schema.get("additionalProperties"), dict):
            inner = kind_of(schema["additionalProperties"])
            return ValueType(f"object of {inner.text} by name", inner.parts)
        case None:
            return ValueType("anything")
        case name:
            return ValueType(f"{name} ({schema['format']})" if "format" in schema else str(name))


def _operation(described: dict[str, Any], path: str, method: str, operation: dict[str, Any]) -> Operation:
    body = operation.get("requestBody")
    return Operation(
        name=operation["operationId"],
        method=method.upper(),
        path=path,
        summary=operation.get("summary", ""),
        about=operation.get("description", ""),
        fields=tuple(
            Field(
                each["name"],
                kind_of(each["schema"]),
                _rule(each["schema"]),
                each.get("description", ""),
                each.get("required", False),
                each["in"],
            )
            for each in operation.get("parameters", ())
        ),
        body=None if body is None else _content(body),
        answers=tuple(
            DocumentedAnswer(status, _content(whole), whole.get("description", ""))
            for status, answer in sorted(operation["responses"].items())
            for whole in [_resolved(described, answer)]
        ),
    )


def _resolved(described: dict[str, Any], answer: dict[str, Any]) -> dict[str, Any]:
    if "$ref" not in answer:
        return answer
    return described["components"]["responses"][answer["$ref"].rpartition("/")[2]]


def _content(part: dict[str, Any]) -> ValueType:
    for media, content in part.get("content", {}).items():
        kind = kind_of(content.get("schema", {}))
        return kind if kind.text != "anything" else ValueType(media)
    return ValueType("nothing")


def _fields(schema: dict[str, Any]) -> tuple[Field, ...]:
    needed = schema.get("required", ())
    return tuple(
        Field(name, kind_of(part), _rule(part), part.get("description", ""), name in needed)
        for name, part in schema.get("properties", {}).items()
    )


def _rule(schema: dict[str, Any]) -> str:
    """Bounds of the value itself, and of what it is where it may also be null or one of several."""
    inner = [choice for choice in schema.get("anyOf", ()) if choice.get("type") != "null"]
    found = [schema, *inner, *([schema["items"]] if isinstance(schema.get("items"), dict) else [])]
    words = [f"{word} {part[name]}" for part in found for name, word in _BOUNDS.items() if part.get(name) is not None]
    return ", ".join(dict.fromkeys(words))
