"""What a trial reports: one finding a check, as a JSON line, as soon as it is known. Pure but for the writing."""

from __future__ import annotations

import json
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any


class FindingResult(StrEnum):
    """`missing`: the job cannot run, or would train wrongly, before this is changed."""

    OK = "ok"
    WARNING = "warning"
    MISSING = "missing"


@dataclass(frozen=True, slots=True)
class Finding:
    """`text`: what was found, and for what is missing the rule and what to change. `details`: a whole traceback.
    `values`: numbers for programs."""

    result: FindingResult
    text: str
    details: str = ""
    values: dict[str, Any] = field(default_factory=dict)


def ok(text: str, **values: Any) -> Finding:
    """As it should be."""
    return Finding(FindingResult.OK, text, values=values)


def warning(text: str, **values: Any) -> Finding:
    """The job runs, but not as well as it could."""
    return Finding(FindingResult.WARNING, text, values=values)


def missing(text: str, **values: Any) -> Finding:
    """Must be changed."""
    return Finding(FindingResult.MISSING, text, values=values)


class Findings:
    """Makes checks one after the other and writes what they found; `write` takes one line."""

    def __init__(self, write: Callable[[str], Any]) -> None:
        self._write = write
        self.any_missing = False

    def check(self, name: str, look: Callable[[], Finding], *, others_rest_on_it: bool) -> bool:
        """Say that `name` is looked at, look, say what was found. Returns whether the next check can be made: not where
        `look` raised, nor where something is missing that others rest on."""
        self.say({"started": name})
        try:
            found = look()
        except Exception as error:
            # The user's code may raise anything.
            self.add(name, raised(error))
            return False
        self.add(name, found)
        return not (others_rest_on_it and found.result is FindingResult.MISSING)

    def add(self, name: str, found: Finding) -> None:
        """Write one finding."""
        self.any_missing |= found.result is FindingResult.MISSING
        self.say({"check": name, **asdict(found)})

    def say(self, line: dict[str, Any]) -> None:
        """Write one line for the parent process."""
        self._write(json.dumps(line, default=str) + "\n")


def raised(error: Exception) -> Finding:
    """Our own refusals say it all, and their cause, if any, is the user's; of what else is raised all is shown."""
    ours = type(error).__module__.startswith("liver_core.")
    text = str(error) if ours else f"{type(error).__name__}: {error}"
    shown = error.__cause__ if ours else error
    return Finding(FindingResult.MISSING, text, "" if shown is None else "".join(traceback.format_exception(shown)))
