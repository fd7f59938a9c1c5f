"""The bounds of what travels and of what is kept: each text, number and list has one, which the codec checks. Pure.

Types only, to be used in the fields of frozen dataclasses and of pydantic models. Nothing here imports pydantic: a
bound is asked for its schema only when the codec, or a model, first meets it.
"""

import re
from collections.abc import Callable, Iterable
from typing import Annotated, Any

RANKS_MAX = 131_072
NODES_MAX = 10_000
SLOTS_MAX = 1_024
REASON_CHARS_MAX = 2_000
NAME_CHARS_MAX = 256
NAMED_MAX = 8
"""Of many names in a sentence."""
COUNT_MAX = 2**53 - 1
"""Above it a JSON number is not the same integer for every reader."""
GENERATION_MAX = COUNT_MAX
LONG_S_MAX = 1e9
UTC_LEAST, UTC_MOST = 946_684_800.0, 4_102_444_800.0
"""The years 2000 to 2099, in seconds since 1970."""

STRICT = {"strict": True, "extra": "forbid", "allow_inf_nan": False}
"""`__pydantic_config__` of a dataclass that travels: nothing is coerced, unknown fields and infinities are refused."""


class Bound:
    """Rules of pydantic-core by name: `ge`, `le`, `gt`, `min_length`, `max_length`, `pattern`."""

    def __init__(self, **rules: Any) -> None:
        self._rules = rules

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> Any:
        return handler(source) | self._rules


class Checked:
    """A rule that is a function: it returns the value, or raises ValueError with the rule."""

    def __init__(self, check: Callable[[Any], Any]) -> None:
        self._check = check

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> Any:
        from pydantic import AfterValidator

        return AfterValidator(self._check).__get_pydantic_core_schema__(source, handler)


_UNWRITABLE = re.compile("[\0\ud800-\udfff]")
"""NUL, and halves of surrogate pairs, which UTF-8 cannot write."""


def fitting(text: str, chars_max: int = REASON_CHARS_MAX) -> str:
    """The text as a bounded field takes it: cut, and without what no database column of text takes."""
    return _UNWRITABLE.sub("\N{REPLACEMENT CHARACTER}", text[:chars_max])


def listed(names: Iterable[str], most: int = NAMED_MAX) -> str:
    """Names for people, in their order: so many of them, and how many more there are."""
    found = list(names)
    more = f" and {len(found) - most} more" if len(found) > most else ""
    return f"{', '.join(found[:most])}{more}"


NO_NUL_PATTERN = r"^[^\x00]*$"
NO_NUL = Bound(pattern=NO_NUL_PATTERN)
"""No database column of text takes a NUL, and no terminal shows it."""

IDENTIFIER_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9._-]*$"
METRIC_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9._/-]*$"
METRIC_CHARS_MAX = 64
METRICS_PER_STEP_MAX = 64
"""Of a job's own; those that LiveR reports by itself come on top."""
BUILT_IN_METRICS = ("loss", "learning_rate", "gradient_norm")
Identifier = Annotated[str, Bound(pattern=IDENTIFIER_PATTERN, min_length=1, max_length=63)]
JobId = Identifier
NodeId = Identifier
Text = Annotated[str, Bound(max_length=REASON_CHARS_MAX), NO_NUL]
ShortText = Annotated[str, Bound(max_length=NAME_CHARS_MAX), NO_NUL]
ExitCode = Annotated[int, Bound(ge=0, le=255)]
Name = Annotated[str, Bound(min_length=1, max_length=NAME_CHARS_MAX), NO_NUL]
FilePath = Annotated[str, Bound(min_length=1, max_length=4_096), NO_NUL]
Digest = Annotated[str, Bound(pattern=r"^[A-Za-z0-9:+/=_-]*$", max_length=128)]
MetricName = Annotated[str, Bound(pattern=METRIC_PATTERN, min_length=1, max_length=METRIC_CHARS_MAX)]
Slot = Annotated[int, Bound(ge=0, lt=SLOTS_MAX)]
Port = Annotated[int, Bound(ge=1, le=65_535)]
Rank = Annotated[int, Bound(ge=0, lt=RANKS_MAX)]
Generation = Annotated[int, Bound(ge=1, le=GENERATION_MAX)]
Revision = Annotated[int, Bound(ge=1, le=COUNT_MAX)]
Count = Annotated[int, Bound(ge=0, le=COUNT_MAX)]
Seconds = Annotated[float, Bound(ge=0.0, le=LONG_S_MAX)]
UtcSeconds = Annotated[float, Bound(ge=UTC_LEAST, le=UTC_MOST)]
