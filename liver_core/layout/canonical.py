"""Canonical JSON and digests of it. Pure.

Two parties that hold equal values get equal bytes, whatever wrote them: keys sorted, no spaces, ASCII only.
"""

import hashlib
import json
from collections.abc import Mapping
from typing import Any


def canonical_json(value: Any) -> str:
    """The one text of a JSON value. Floats are refused: their text differs between writers."""
    _refuse_floats(value)
    return json.dumps(value, sort_keys=True, separators=(",", ":"))


def digest_of(value: Any) -> str:
    """sha256 of the canonical JSON, as 64 lower-case hex digits."""
    return hashlib.sha256(canonical_json(value).encode("ascii")).hexdigest()


def _refuse_floats(value: Any) -> None:
    if value is None or isinstance(value, str | int):
        return
    if isinstance(value, float):
        raise TypeError(f"canonical JSON holds no floats, got {value!r}")
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, list | tuple):
        for item in value:
            _refuse_floats(item)
