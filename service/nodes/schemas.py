"""What the REST API returns about nodes."""

from datetime import datetime
from typing import Any

from pydantic import BaseModel, Field

from agent.protocol.sync import Provider
from service.nodes.tables import NodeRow, NodeState


class NodeOut(BaseModel):
    """One node as its agent last reported it."""

    node_id: str
    provider: Provider
    pool: str
    slots: int
    device: str
    state: NodeState
    leaving: bool = Field(description="An open notice announces that the node will go.")
    deadline_at: datetime | None = Field(description="The earliest deadline of its open notices.")
    jobs: list[str]
    peer_url: str
    private_address: str
    agent_version: str
    first_seen_at: datetime
    last_seen_at: datetime
    ranks: list[dict[str, Any]]

    @classmethod
    def of(cls, row: NodeRow, *, jobs: list[str], leaving: bool, deadline_at: datetime | None) -> "NodeOut":
        """From its row and its open notices."""
        return cls(
            node_id=row.node_id,
            provider=Provider(row.provider),
            pool=row.pool,
            slots=row.slots,
            device=row.device,
            state=NodeState(row.state),
            leaving=leaving,
            deadline_at=deadline_at,
            jobs=jobs,
            peer_url=row.peer_url,
            private_address=row.private_address,
            agent_version=row.agent_version,
            first_seen_at=row.first_seen_at,
            last_seen_at=row.last_seen_at,
            ranks=row.ranks,
        )
