"""Strict reading of JSON objects: every error names the field and the rule it breaks.

Pure. Small on purpose: the pure half of the package depends on nothing outside the standard library.
"""

from collections.abc import Callable, Mapping
from enum import StrEnum
from typing import Any, TypeVar

ChoiceT = TypeVar("ChoiceT", bound=StrEnum)
ItemT = TypeVar("ItemT")

TEXT_CHARS_MAX = 2_000
GENERATION_MAX = 2**31
RANKS_MAX = 16_384


class MessageError(ValueError):
    """A message that is not what it should be. `field` is its dotted path, `rule` what must hold."""

    def __init__(self, field: str, rule: str) -> None:
        super().__init__(f"{field}: {rule}")
        self.field = field
        self.rule = rule


class Fields:
    """One JSON object read field by field; `finish` refuses what nobody asked for."""

    def __init__(self, data: object, path: str = "") -> None:
        if not isinstance(data, Mapping):
            raise MessageError(path or "message", f"must be an object, not {type(data).__name__}")
        self._data: Mapping[str, Any] = data
        self._path = path
        self._read: set[str] = set()

    def path(self, name: str) -> str:
        """The dotted path of a field, for an error that the caller raises."""
        return f"{self._path}.{name}" if self._path else name

    def value(self, name: str) -> Any:
        """The raw value; the field must be there."""
        self._read.add(name)
        if name not in self._data:
            raise MessageError(self.path(name), "is required")
        return self._data[name]

    def text(self, name: str, *, empty: bool = False, chars_max: int = TEXT_CHARS_MAX) -> str:
        """A string, bounded in length."""
        value = self.value(name)
        if not isinstance(value, str):
            raise MessageError(self.path(name), f"must be a string, not {type(value).__name__}")
        if not value and not empty:
            raise MessageError(self.path(name), "must not be empty")
        if len(value) > chars_max:
            raise MessageError(self.path(name), f"must have at most {chars_max} characters, has {len(value)}")
        return value

    def integer(self, name: str, *, least: int = 0, most: int = 2**63 - 1) -> int:
        """An integer in `least..most`; booleans are not integers here."""
        value = self.value(name)
        if not isinstance(value, int) or isinstance(value, bool):
            raise MessageError(self.path(name), f"must be an integer, not {type(value).__name__}")
        if not least <= value <= most:
            raise MessageError(self.path(name), f"must be in {least}..{most}, is {value}")
        return value

    def seconds(self, name: str) -> float:
        """A finite number of seconds, not negative."""
        value = self.value(name)
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise MessageError(self.path(name), f"must be a number of seconds, not {type(value).__name__}")
        if not 0 <= value < float("inf"):
            raise MessageError(self.path(name), f"must be finite and not negative, is {value}")
        return float(value)

    def choice(self, name: str, kind: type[ChoiceT]) -> ChoiceT:
        """A member of a StrEnum, by its value."""
        value = self.value(name)
        try:
            return kind(value)
        except ValueError:
            raise MessageError(self.path(name), f"must be one of {', '.join(kind)}, is {value!r}") from None

    def optional(self, name: str, read: Callable[[object, str], ItemT]) -> ItemT | None:
        """`read(value, path)` unless the value is null."""
        value = self.value(name)
        return None if value is None else read(value, self.path(name))

    def items(self, name: str, read: Callable[[object, str], ItemT], *, most: int = RANKS_MAX) -> tuple[ItemT, ...]:
        """A list of at most `most` items, each read by `read(value, path)`."""
        value = self.value(name)
        if not isinstance(value, list):
            raise MessageError(self.path(name), f"must be a list, not {type(value).__name__}")
        if len(value) > most:
            raise MessageError(self.path(name), f"must have at most {most} items, has {len(value)}")
        return tuple(read(item, f"{self.path(name)}[{index}]") for index, item in enumerate(value))

    def finish(self) -> None:
        """Raise on a field that was not read: an unknown field is an error, not something to skip."""
        unknown = sorted(set(self._data) - self._read)
        if unknown:
            raise MessageError(self.path(str(unknown[0])), "is not a field of this message")
