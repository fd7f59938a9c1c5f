"""What errors of torch, Megatron and gloo say to a person who wants to know why a checkpoint was not written."""

import re

from torch.distributed.checkpoint.api import CheckpointException

_TIMED_OUT = re.compile(r"Timed out waiting (\d+)ms|Application timeout caused pair closure")
"""In texts of gloo, which has no type for it: this rank waited for another one for as long as their group allows."""


def error_text(error: BaseException) -> str:
    """Type and text of an error. Torch's CheckpointException (not an Exception) wraps the errors of the ranks."""
    if isinstance(error, CheckpointException):
        return "; ".join(f"rank {rank}: {error_text(wrapped[0])}" for rank, wrapped in error.failures.items())
    return f"{type(error).__name__}: {error}"


def told_by_system(error: Exception) -> Exception:
    """The error of the system, as of a disk that is full, where torch raised another one while it closed the file."""
    before = error.__context__
    return before if isinstance(before, OSError) and not isinstance(error, OSError) else error


def not_in_time(path: str, error: BaseException) -> TimeoutError | None:
    """What to say of the checkpoint where `error` is that of gloo about a rank that was not done in time; else None."""
    if not (found := _TIMED_OUT.search(str(error))):
        return None
    limit = f"within {int(found[1]) / 1000:.0f} s" if found[1] else "in time"
    return TimeoutError(f"checkpoint {path}: not written, another rank was not done with its part {limit}")
