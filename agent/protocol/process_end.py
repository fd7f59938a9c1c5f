"""How a rank's process stands or ended, as its agent knows it: a value, its sentence for people, its cause. Pure."""

from dataclasses import dataclass, replace

from liver_core.handoff.messages import FailedPart, FailureCause
from liver_core.layout.limits import STRICT, Count, ExitCode, Revision, ShortText, Text, fitting

STOPPED = "stopped"
"""The phase in the reason that an agent gives of a rank whose process is stopped, by a signal or a debugger."""
OWN_ABORT = "SIGABRT"
"""With it a process ends itself, often because it has lost a peer."""


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
        said = f"; it reported: {self.reported}" if self.reported else ""
        said = f"; its log ends: {self.logged}" if self.logged and not said else said
        return f"rank process (pid {self.pid}) {how}{after}{said}"

    @property
    def is_killed(self) -> bool:
        """Whether something else ended it: it knows nothing of why. One that aborts itself has often lost a peer."""
        return self.signal is not None and self.signal != OWN_ABORT

    def cause(self, reported: FailureCause | None) -> FailureCause:
        """What failed, given the cause that the rank itself has reported last."""
        if reported is None or reported.what is FailedPart.RANK or self.is_killed:
            return FailureCause(FailedPart.RANK, self.signal, self.exit_code, self.step)
        return replace(reported, step=self.step)
