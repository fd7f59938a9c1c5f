"""What the REST API returns about nodes."""

from collections.abc import Sequence
from datetime import datetime
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from agent.protocol.notice_life import DRAIN
from agent.protocol.sync import NoticeFact, NoticeKind, Provider, SourceHealth, SourceState
from service.clouds.rules import NodeChannel
from service.nodes.rules import announces_its_end, has_outlived_its_end
from service.nodes.tables import NodeRow, NodeState
from service.notices.rules import earliest_deadline

DRAIN_S_MAX = 7 * 86_400


class NoticeSourceOut(BaseModel):
    """How the node learns that it will go. While the state is unknown, notices may be missed."""

    source: str
    state: SourceState
    reason: str = Field(description="Why it is not watching; empty while it is.")
    since_at: datetime = Field(description="Since when it has been in this state.")
    announces: list[NoticeKind] = Field(description="What it announced when it was last read.")

    @classmethod
    def of(cls, stored: dict[str, Any]) -> "NoticeSourceOut":
        """From what the agent reported."""
        health = SourceHealth.model_validate(stored, strict=False)
        return cls(
            source=health.source,
            state=health.state,
            reason=health.reason,
            since_at=health.since_utc,
            announces=list(health.announces),
        )


class NodeChannelOut(BaseModel):
    """One way by which a notice about the node would be heard."""

    channel: str
    alive: bool
    reason: str = Field(description="Why nothing would be heard; empty while it is alive.")
    asked_at: datetime | None = Field(description="When it was last known to work.")
    heard_at: datetime | None = Field(description="When it last said anything about the node.")


class DrainIn(BaseModel):
    """When the node has to be empty."""

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)

    in_s: float = Field(ge=0, le=DRAIN_S_MAX, description="Seconds until jobs must have left the node.")


class NodeOut(BaseModel):
    """One node as its agent last reported it."""

    node_id: str
    provider: Provider
    pool: str
    slots: int
    device: str
    job_user: str | None = Field(
        description="The user that code of jobs runs as; null: the agent's own, who can read the node's token and key."
    )
    state: NodeState
    leaving: bool = Field(description="An open notice announces that the node will go.")
    deadline_at: datetime | None = Field(description="The earliest deadline of its open notices.")
    announced: bool = Field(
        description="No notice of it counts any more, but its notice source still announces, without a time, that it "
        "will go: it gets no ranks."
    )
    overdue: bool = Field(
        description="Its notice source still announces an end that is long past: jobs use the node after all others."
    )
    drained: bool = Field(description="A person asked for the node to be empty; it stays so until that is undone.")
    notice_source: NoticeSourceOut | None
    channels: list[NodeChannelOut] = Field(description="Ways by which a notice would be heard, alive or not.")
    deaf: bool = Field(description="No channel is alive: a notice about the node would not be heard.")
    provider_id: str | None = Field(description="The provider's own name of the machine; null if not known.")
    zone: str | None
    jobs: list[str]
    peer_url: str
    private_address: str
    agent_version: str
    first_seen_at: datetime
    last_seen_at: datetime
    excused_until: datetime | None = Field(
        description="It fell silent together with many others, which may be the service's fault: not lost before this."
    )
    clock_ahead_s: float | None = Field(
        description="Seconds by which its clock is ahead of the database's, negative if behind; null if not known."
    )
    ranks: list[dict[str, Any]]

    @classmethod
    def of(
        cls, row: NodeRow, *, jobs: list[str], notices: list[NoticeFact], channels: Sequence[NodeChannel] = ()
    ) -> "NodeOut":
        """From its row, its open notices that take it, and the channels that would tell of one."""
        is_here = row.state != NodeState.GONE
        return cls(
            node_id=row.node_id,
            provider=Provider(row.provider),
            pool=row.pool,
            slots=row.slots,
            device=row.device,
            job_user=row.job_user,
            state=NodeState(row.state),
            leaving=bool(notices),
            deadline_at=earliest_deadline(notices),
            announced=announces_its_end(row.notice_source) and not notices,
            overdue=has_outlived_its_end(row.notice_source) and not notices,
            drained=any(notice.source == DRAIN for notice in notices),
            notice_source=NoticeSourceOut.of(row.notice_source) if row.notice_source is not None else None,
            channels=[
                NodeChannelOut(
                    channel=item.name,
                    alive=item.is_alive,
                    reason=item.reason,
                    asked_at=item.asked_at,
                    heard_at=item.heard_at,
                )
                for item in channels
            ],
            deaf=is_here and not any(item.is_alive for item in channels),
            provider_id=row.provider_id,
            zone=row.zone,
            jobs=jobs,
            peer_url=row.peer_url,
            private_address=row.private_address,
            agent_version=row.agent_version,
            first_seen_at=row.first_seen_at,
            last_seen_at=row.last_seen_at,
            excused_until=row.excused_until,
            clock_ahead_s=row.clock_ahead_s,
            ranks=row.ranks,
        )
