"""What a rank process is started with. Pure.

The agent writes it; `agent.worker.rank_process:run` gets it as a JSON object, with a socket that listens at
`socket_path`. The rank says `hello` to whoever connects, and takes one agent at a time: the newest connection.
"""

from pydantic import Field

from agent.protocol.jobfile import JobFile
from agent.protocol.values import Amount, Message
from liver_core.handoff import Order
from liver_core.layout import Member
from liver_core.layout.limits import FilePath, NodeId, ShortText, Slot


class RankSpec(Message):
    """One rank process, and the order that makes its first world.

    An order without a source is a start: the rank builds the target at once, loads the order's checkpoint where it
    names one, and permits itself; no `prepare` comes. Otherwise it waits on the socket for the `prepare` of that
    handoff. It gives up and exits after the order's deadline.
    """

    node_id: NodeId
    slot: Slot
    order: Order
    clock_zero: Amount = Field(description="UTC by the agent's clock at the zero of the machine's monotonic clock.")
    spec: JobFile
    private_address: ShortText = Field(description="The address this node's ranks bind to.")
    socket_path: FilePath

    @property
    def rank(self) -> int:
        """In the first world."""
        return self.order.rank_of(Member(self.node_id, self.slot))
