"""How one rank process stands, as its agent reports it. Pure."""

from uuid import UUID

from pydantic import Field

from agent.protocol.process_end import ProcessEnd
from agent.protocol.values import Message, Step
from liver_core.handoff import RankStage, Reason
from liver_core.layout.limits import Generation, JobId, Rank, Revision, Seconds, ShortText, Slot


class Whereabouts(Message):
    """Where a rank is that has made no step for a while, as another thread of its process says."""

    hook: ShortText = Field(default="", description="What of the job runs between two steps; empty: nothing.")
    hook_s: Seconds = Field(default=0.0, description="For how long it has run.")
    at: ShortText = Field(default="", description="Where its main thread is: function, file and line.")
    waits: bool = Field(default=False, description="That function waits for other ranks.")


class RankStatus(Message):
    """One rank process on the reporting node, as it stands now."""

    job_id: JobId
    generation: Generation
    rank: Rank
    slot: Slot
    pid: Revision
    stage: RankStage
    step: Step = 0
    loss: float | None = None
    seconds: Seconds | None = Field(default=None, description="Seconds of the last step.")
    layout: ShortText = Field(default="", description="Of the world of that generation, once the rank is in it.")
    handoff_id: UUID | None = None
    reason: Reason | None = None
    ended: ProcessEnd | None = Field(default=None, description="How its process ended, once its agent knows.")
    whereabouts: Whereabouts | None = Field(default=None, description="Null while it makes steps, or says nothing.")
