"""The one codec: a frozen dataclass to JSON and back, strictly and within the bounds of its fields. Pure.

It reads only what the type says: nothing is coerced, unknown fields are refused, and every error names field and rule.
"""

import json
from functools import cache
from typing import TYPE_CHECKING, Any, TypeVar, cast

from liver_core.layout.limits import NO_NUL_PATTERN

if TYPE_CHECKING:
    from pydantic import TypeAdapter, ValidationError

T = TypeVar("T")
_INPUT_CHARS_MAX = 80


class MessageError(ValueError):
    """A message that is not what it should be. `field` is its dotted path, `rule` what must hold."""

    def __init__(self, field: str, rule: str) -> None:
        super().__init__(f"{field}: {rule}")
        self.field = field
        self.rule = rule


def to_json(value: object) -> Any:
    """What `json.dumps` takes, field by field."""
    return _adapter(type(value)).dump_python(value, mode="json", warnings=False)


def from_json(kind: type[T], data: object) -> T:
    """The inverse, of what `json.loads` gave. Raises MessageError naming field and rule."""
    return decode(kind, json.dumps(data))


def decode(kind: type[T], text: str | bytes) -> T:
    """The same of JSON text."""
    from pydantic import ValidationError

    try:
        return cast(T, _adapter(kind).validate_json(text))
    except ValidationError as error:
        raise _first(error) from None


@cache
def _adapter(kind: type[Any]) -> "TypeAdapter[Any]":
    # Made when it is first needed: building one takes milliseconds, and importing pydantic tens of them.
    from pydantic import TypeAdapter

    return TypeAdapter(kind)


def _first(error: "ValidationError") -> MessageError:
    found = error.errors(include_url=False)[0]
    path = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in found["loc"])
    cause = found.get("ctx", {}).get("error")
    if inner := getattr(cause, "field", ""):
        return MessageError(f"{path}.{inner}".removeprefix("."), getattr(cause, "rule", str(cause)))
    return MessageError(path.removeprefix(".") or "message", _rule(found))


def _rule(found: Any) -> str:
    """pydantic's finding as a plain rule, with what was there instead where that is short."""
    match found["type"]:
        case "missing":
            return "is required"
        case "unexpected_keyword_argument" | "extra_forbidden":
            return "is not a field of this message"
        case "string_too_short" if found["ctx"]["min_length"] == 1:
            return "must not be empty"
        case "string_too_short" | "string_too_long" | "too_short" | "too_long":
            most = found["ctx"].get("max_length", found["ctx"].get("min_length"))
            bound = "at most" if found["type"].endswith("long") else "at least"
            return f"must have {bound} {most} {_units(found)}, has {len(found['input'])}"
        case "value_error":
            return found["msg"].removeprefix("Value error, ")
        case "string_pattern_mismatch" if found["ctx"]["pattern"] == NO_NUL_PATTERN:
            return "must not contain a NUL character"
        case _:
            rule = found["msg"].removeprefix("Input ").replace("should", "must")
            rule = rule.replace("greater than or equal to", "at least").replace("less than or equal to", "at most")
            return f"{rule}, is {_shown(found['input'])}"


def _units(found: Any) -> str:
    return "characters" if found["type"].startswith("string") else "items"


def _shown(value: object) -> str:
    if isinstance(value, str | int | float) or value is None:
        return repr(value)[:_INPUT_CHARS_MAX]
    return "a list" if isinstance(value, list) else "an object"
