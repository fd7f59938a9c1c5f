"""What pydantic finds wrong with one field, as a rule in words: never a regular expression, never a name of a type.

Pure. The value itself is not repeated here, since it may be a secret.
"""

from collections.abc import Mapping
from typing import Any

from agent.protocol.jobfile import (
    ENTRYPOINT_PATTERN,
    ENVIRONMENT_NAME,
    LAYOUT_PATTERN,
    START_PATTERN,
    WHOLE_PATH_PATTERN,
)
from agent.protocol.values import URL_PATTERN
from liver_core.layout.limits import IDENTIFIER_PATTERN, NO_NUL_PATTERN

RULE_CHARS_MAX = 500
_OF_PATTERNS = {
    IDENTIFIER_PATTERN: "must be letters, digits, dots, dashes and underscores, and begin with a letter or a digit",
    URL_PATTERN: "must begin with http:// or https:// and have no spaces",
    NO_NUL_PATTERN: "must not contain a NUL character",
    ENTRYPOINT_PATTERN: "must name a class as package.module:Class, such as my_package.training:MyJob",
    ENVIRONMENT_NAME: "the name must be letters, digits and underscores, and not begin with a digit",
    START_PATTERN: (
        "must be the whole path of a checkpoint, such as /data/checkpoints/first/step-000000500 or, of Megatron's "
        "training, /data/gpt/iter_0000500 (latest_checkpointed_iteration.txt beside it says which)"
    ),
    WHOLE_PATH_PATTERN: "must be the whole path of a file, such as /run/secrets/wandb",
    LAYOUT_PATTERN: "must be axes with their sizes, joined by x",
}
_OF_TYPES = {
    "extra_forbidden": "is not a known field",
    "missing": "is required",
    "int": "must be a whole number",
    "float": "must be a number",
    "bool": "must be true or false",
    "string_type": "must be text (in quotes, where YAML takes it for something else)",
    "tuple": "must be a list",
    "list": "must be a list",
    "dict": "must be a mapping of fields",
    "model": "must be a mapping of fields",
    "datetime": "must be a time with its time zone, such as 2030-01-31T12:00:00Z",
    "timezone_aware": "must have a time zone, such as the Z of 2030-01-31T12:00:00Z",
    "finite_number": "must be a finite number",
}


def rule_in_words(item: Mapping[str, Any]) -> str:
    """One of `ValidationError.errors()` as the rule that was broken."""
    kind, context = item["type"], item.get("ctx") or {}
    if kind == "string_pattern_mismatch":
        rule = _OF_PATTERNS.get(context["pattern"], "has characters that are not allowed there")
    elif kind == "string_too_short" and context["min_length"] == 1:
        rule = "must not be empty"
    elif kind in ("string_too_long", "string_too_short"):
        bound, length = ("at most", "max_length") if kind == "string_too_long" else ("at least", "min_length")
        rule = f"must have {bound} {context[length]} characters"
    elif kind in ("too_long", "too_short"):
        bound, length = ("at most", "max_length") if kind == "too_long" else ("at least", "min_length")
        rule = f"must have {bound} {context[length]} entries"
    else:
        # Kinds of one family share their first word: int_type, int_parsing, int_from_float.
        known = _OF_TYPES.get(kind) or _OF_TYPES.get(kind.split("_")[0])
        rule = known or item["msg"].removeprefix("Value error, ").replace("Input should be ", "must be ")
    return rule[:RULE_CHARS_MAX]
