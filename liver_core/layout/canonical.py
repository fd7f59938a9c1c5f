"""Canonical JSON, digests of it, and strict reading of JSON objects. Pure.

Two parties that hold equal values get equal bytes, whatever wrote them: keys sorted, no spaces, ASCII only.
"""

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from liver_core.layout.errors import LayoutError


def canonical_json(value: Any) -> str:
    """The one text of a JSON value. Floats are refused: their text differs between writers."""
    _refuse_floats(value)
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)


def digest_of(value: Any) -> str:
    """sha256 of the canonical JSON, as 64 lower-case hex digits."""
    return hashlib.sha256(canonical_json(value).encode("ascii")).hexdigest()


def _refuse_floats(value: Any) -> None:
    if isinstance(value, float):
        raise TypeError(f"canonical JSON holds no floats, got {value!r}")
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, list | tuple):
        for item in value:
            _refuse_floats(item)


class JsonReader:
    """One JSON object read field by field; `finish` refuses what nobody asked for. Errors are LayoutError."""

    def __init__(self, data: object, path: str) -> None:
        if not isinstance(data, Mapping):
            raise LayoutError(path, f"must be an object, is {type(data).__name__}")
        self._data: Mapping[str, Any] = data
        self._path = path
        self._read: set[str] = set()

    def has(self, name: str) -> bool:
        """Whether the field is there; optional fields are asked for before they are read."""
        return name in self._data

    def value(self, name: str) -> Any:
        """The raw value of a required field."""
        self._read.add(name)
        if name not in self._data:
            raise LayoutError(f"{self._path}.{name}", "is required")
        return self._data[name]

    def integer(self, name: str, default: int | None = None) -> int:
        """An integer; booleans are not integers here. With a default the field may be missing."""
        if default is not None and not self.has(name):
            return default
        return _integer(self.value(name), f"{self._path}.{name}")

    def optional_integer(self, name: str) -> int | None:
        """An integer or null; missing means null."""
        return None if not self.has(name) or self.value(name) is None else self.integer(name)

    def boolean(self, name: str, *, default: bool) -> bool:
        """true or false; missing means the default."""
        if not self.has(name):
            return default
        value = self.value(name)
        if not isinstance(value, bool):
            raise LayoutError(f"{self._path}.{name}", f"must be true or false, is {type(value).__name__}")
        return value

    def text(self, name: str, default: str | None = None) -> str:
        """A string. With a default the field may be missing."""
        if default is not None and not self.has(name):
            return default
        value = self.value(name)
        if not isinstance(value, str):
            raise LayoutError(f"{self._path}.{name}", f"must be a string, is {type(value).__name__}")
        return value

    def items(self, name: str) -> list[tuple[Any, str]]:
        """The elements of a list, each with its own path for errors."""
        value = self.value(name)
        if not isinstance(value, list | tuple):
            raise LayoutError(f"{self._path}.{name}", f"must be a list, is {type(value).__name__}")
        return [(item, f"{self._path}.{name}[{index}]") for index, item in enumerate(value)]

    def integers(self, name: str) -> tuple[int, ...]:
        """A list of integers."""
        return tuple(_integer(item, path) for item, path in self.items(name))

    def finish(self) -> None:
        """Refuse fields that were not read: a misspelt optional field must not pass in silence."""
        unknown = sorted(set(self._data) - self._read)
        if unknown:
            raise LayoutError(self._path, f"has unknown fields {', '.join(unknown)}")


def _integer(value: object, path: str) -> int:
    if not isinstance(value, int) or isinstance(value, bool):
        raise LayoutError(path, f"must be an integer, is {type(value).__name__}")
    return value
