"""How the nodes of a job reach each other's state: what two agents say to measure it, and what they found. Pure."""

from enum import StrEnum
from typing import Annotated

from pydantic import Field

from agent.protocol.values import Amount, Message, Utc
from liver_core.handoff import StoreAddress
from liver_core.layout.limits import NO_NUL, Bound, JobId, NodeId, Seconds, Text

ADDRESS_CHARS_MAX = 64 * 1024
REFUSED_MAX = 8


class WireKind(StrEnum):
    """NIXL: one-sided, inside a machine or over RDMA, and over EFA. Relay: one-sided, over TCP. Gloo: TCP, and only in
    the pause."""

    NIXL = "nixl"
    EFA = "efa"
    RELAY = "relay"
    GLOO = "gloo"

    @property
    def is_live(self) -> bool:
        """Whether state streams over it while the job trains."""
        return self is not WireKind.GLOO


class WireOffer(Message):
    """Where the end that is read can be reached: its store, and the endpoint's own address."""

    store: StoreAddress
    address: Annotated[str, Bound(min_length=1, max_length=ADDRESS_CHARS_MAX), NO_NUL]


class WireSpeed(Message):
    """What one reader made of one source in host memory, while the job trained."""

    wire: WireKind
    bytes_per_s: Amount = Field(description="Bytes per second.")
    latency_s: Seconds = Field(description="Of a read of 64 bytes; the median of 16.")
    refused: tuple[Text, ...] = Field(
        default=(), max_length=REFUSED_MAX, description="Why no better wire is taken, the best one first."
    )


class WireFact(Message):
    """What the agent of `target` found when it last read from `source`."""

    job_id: JobId
    source: NodeId
    target: NodeId
    speed: WireSpeed | None = Field(description="Null: nothing could be read.")
    failed: Text = Field(default="", description="Why nothing could be read.")
    measured_utc: Utc
