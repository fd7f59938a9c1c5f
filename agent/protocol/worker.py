"""What a rank process is started with. Pure.

The agent writes it; `agent.worker.rank_process:run` gets it as a JSON object. The rank listens on `socket_path`, says
`hello` to whoever connects, and takes one agent at a time: the newest connection is the agent.
"""

from typing import Annotated
from uuid import UUID

from pydantic import Field

from agent.protocol.jobfile import JobFile
from agent.protocol.sync import GenerationSource
from agent.protocol.values import Generation, JobId, Message, NodeId, Rank, Roster, ShortText, StoreAddress, Utc

FilePath = Annotated[str, Field(min_length=1, max_length=4_096)]


class RankSpec(Message):
    """One rank process.

    `source` says how its first world comes to be. `init` and `checkpoint`: the rank builds `roster` at once, meets the
    others at `store` under the name `handoff_id` and permits itself; no `prepare` comes. `handoff`: it waits on
    the socket for the `prepare` of `handoff_id`, whose target is `roster`.
    """

    job_id: JobId
    node_id: NodeId
    slot: int = Field(ge=0, lt=1_024)
    generation: Generation
    rank: Rank
    roster: Roster
    source: GenerationSource
    handoff_id: UUID = Field(description="The handoff that makes the first world; for a start the id of its origin.")
    deadline_utc: Utc = Field(description="When the first world must stand; the rank gives up and exits after it.")
    store: StoreAddress
    spec: JobFile
    private_address: ShortText = Field(description="The address this node's ranks bind to.")
    socket_path: FilePath
    run_dir: FilePath = Field(description="A directory of this process alone, for what it must write.")
