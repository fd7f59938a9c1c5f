"""The job file that a person names with --job, for commands without a service."""

from pathlib import Path
from typing import TYPE_CHECKING

from service.cli.client import fail

if TYPE_CHECKING:
    from agent.protocol.jobfile import JobFile

JOB_FILE_BYTES_MAX = 1024 * 1024


def read_job_file(path: Path) -> "JobFile":
    """Ends the command with every problem, each with its field and rule."""
    from agent.protocol.jobfile_check import JobFileError, check_job_file
    from service.jobs.job_yaml import read_fields

    try:
        with path.open("rb") as file:
            content = file.read(JOB_FILE_BYTES_MAX + 1)
    except OSError as error:
        fail(f"--job: {path}: {error.strerror}")
    if len(content) > JOB_FILE_BYTES_MAX:
        fail(f"--job: {path} has more than {JOB_FILE_BYTES_MAX} bytes")
    try:
        return check_job_file(read_fields(content))
    except JobFileError as error:
        fail("\n".join(f"{problem.field}: {problem.rule}" for problem in error.problems))
