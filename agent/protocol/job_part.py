"""What all sections of a job file are. Pure."""

from pydantic import ConfigDict

from agent.protocol.values import Message


class JobPart(Message):
    """Base of the job file's sections. Strict about names; `jobfile_check` is also strict about values."""

    model_config = ConfigDict(strict=False, extra="forbid", frozen=True)
