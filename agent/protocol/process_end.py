"""How a rank's process ended, as its agent knows it: a value of reports; and the sentence that is made of it.

Where an end only stands in the reason of a handoff, which is text, the service reads it there. Pure.
"""

import re
from dataclasses import dataclass
from typing import Annotated

from liver_core.layout.limits import STRICT, Bound, Count, Revision, ShortText, Text, fitting

_SENTENCE = re.compile(
    r"rank process \(pid (?P<pid>\d+)\) "
    r"(?:was killed by (?P<signal>\S+)|ended with exit code (?P<exit_code>\d+)|ended with an unknown exit code)"
    r"(?: after step (?P<step>\d+))?"
)
ExitCode = Annotated[int, Bound(ge=0, le=255)]
_REPORTED = "; it reported: "
_LOGGED = "; its log ends: "


@dataclass(frozen=True, slots=True)
class ProcessEnd:
    """`reported`: the last reason that the rank gave itself; `logged`: the last line of its log, where it gave none."""

    __pydantic_config__ = STRICT

    pid: Revision
    signal: ShortText | None = None
    exit_code: ExitCode | None = None
    step: Count | None = None
    reported: Text = ""
    logged: Text = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "reported", fitting(self.reported))
        object.__setattr__(self, "logged", fitting(self.logged))

    def __str__(self) -> str:
        how = "ended with an unknown exit code"
        if self.signal is not None:
            how = f"was killed by {self.signal}"
        elif self.exit_code is not None:
            how = f"ended with exit code {self.exit_code}"
        after = "" if self.step is None else f" after step {self.step}"
        said = f"{_REPORTED}{self.reported}" if self.reported else f"{_LOGGED}{self.logged}" if self.logged else ""
        return f"rank process (pid {self.pid}) {how}{after}{said}"

    @classmethod
    def read(cls, text: str) -> "ProcessEnd | None":
        """From a text with this sentence in it, None without one."""
        found = _SENTENCE.search(text)
        if found is None:
            return None
        rest, code, step = text[found.end() :], found["exit_code"], found["step"]
        return cls(
            pid=int(found["pid"]),
            signal=found["signal"],
            exit_code=None if code is None else int(code),
            step=None if step is None else int(step),
            reported=rest.removeprefix(_REPORTED) if rest.startswith(_REPORTED) else "",
            logged=rest.removeprefix(_LOGGED) if rest.startswith(_LOGGED) else "",
        )
