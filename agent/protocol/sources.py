"""Where a generation comes from, as the service's orders say it. Pure."""

from typing import Annotated, Literal
from uuid import UUID

from pydantic import Field

from agent.protocol.values import Message, Step
from liver_core.layout.limits import FilePath


class SourceInit(Message):
    """The generation starts from the job's own initialisation."""

    kind: Literal["init"] = "init"


class SourceCheckpoint(Message):
    """The generation starts from a checkpoint that is complete on storage every member can read."""

    kind: Literal["checkpoint"] = "checkpoint"
    path: FilePath
    step: Step


class SourceHandoff(Message):
    """The generation was made by a handoff: never start it afresh, re-adopt it or say that it is lost."""

    kind: Literal["handoff"] = "handoff"
    handoff_id: UUID


GenerationSource = Annotated[SourceInit | SourceCheckpoint | SourceHandoff, Field(discriminator="kind")]
