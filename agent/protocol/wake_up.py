"""Events of the wake stream, which tells agents at once that their orders have changed. Pure."""

from pydantic import Field

from agent.protocol.sync import JobOrder
from agent.protocol.values import Message, Utc
from liver_core.layout.limits import Count, Digest


class WakeOrders(Message):
    """The whole orders of a node, as the answer to its next report has them."""

    orders_seq: Count
    issued_utc: Utc
    orders_digest: Digest = Field(description="Of everything that `jobs` says.")
    jobs: tuple[JobOrder, ...] = Field(max_length=1_000)


class WakeEvent(Message):
    """One event of the wake stream: another sync is worth making."""

    number: Count = Field(description="How many events of this stream came before it.")
    orders: WakeOrders | None = Field(
        default=None, description="What that sync will be told, so that the agent need not wait for it."
    )
