"""What errors of torch, Megatron and gloo say to a person who wants to know why a checkpoint was not written."""

from torch.distributed.checkpoint.api import CheckpointException


def error_text(error: BaseException) -> str:
    """Type and text of an error. Torch's CheckpointException (not an Exception) wraps the errors of the ranks."""
    if isinstance(error, CheckpointException):
        return "; ".join(f"rank {rank}: {error_text(wrapped[0])}" for rank, wrapped in error.failures.items())
    return f"{type(error).__name__}: {error}"


def told_by_system(error: Exception) -> Exception:
    """The error of the system, as of a disk that is full, where torch raised another one while it closed the file."""
    before = error.__context__
    return before if isinstance(before, OSError) and not isinstance(error, OSError) else error
