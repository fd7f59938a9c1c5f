"""REST of what channels told: the channels of accounts, messages as received, and numbers for Prometheus."""

import threading
from datetime import datetime
from typing import Annotated

from fastapi import APIRouter, Depends, Query, Response
from pydantic import BaseModel, Field
from sqlalchemy import select

from agent.protocol.sync import Provider
from liver_core.layout.limits import NodeId
from service.clouds.cloud_facts import Disposition
from service.clouds.hearing import look_at_all
from service.clouds.lacks import ChannelCheck
from service.clouds.queries import channels_of, is_troubled, list_channels, list_hearings, own_view
from service.clouds.rules import is_alive
from service.clouds.tables import HearingRow
from service.context import ADMIN_ONLY, PERSON_ONLY, ContextOf, SessionOf, takes_long
from service.edge.routes import PeoplesRoute
from service.nodes.tables import NodeRow, NodeState
from service.paging import PagesOf
from service.problems import conflict

router = APIRouter(prefix="/api/v1", tags=["notices"], route_class=PeoplesRoute, dependencies=[PERSON_ONLY])
numbers = APIRouter(dependencies=[PERSON_ONLY])
PROMETHEUS = "text/plain; version=0.0.4; charset=utf-8"
LIVING = ("ready", "silent")


class AccountChannelOut(BaseModel):
    """One way by which a cloud tells the service of the machines of an account."""

    channel: str
    provider: Provider
    alive: bool
    asked_at: datetime | None = Field(description="When it was last asked with success.")
    trouble: str = Field(description="Why it cannot be asked; empty while it can.")
    trouble_since: datetime | None
    counts: dict[str, int] = Field(description="Messages, by what was done with them.")


_CHECKING = threading.Lock()


@router.get(
    "/channels/check",
    operation_id="check_channels",
    summary="Look for what is missing",
    dependencies=[ADMIN_ONLY, Depends(takes_long)],
)
def check_channels(context: ContextOf) -> list[ChannelCheck]:
    """Asks each cloud that is configured, with the service's own credentials. Changes nothing there."""
    if not _CHECKING.acquire(blocking=False):
        raise conflict("the clouds are being looked at already; try again in a moment")
    try:
        with context.sessions() as session:
            own = own_view(session)
        return look_at_all(context.settings, context.clock(), own)
    finally:
        _CHECKING.release()


class HearingOut(BaseModel):
    """One message of one channel, as it was received, and what was done with it."""

    hearing_id: int
    channel: str
    message_id: str
    provider: Provider | None
    provider_id: str | None
    node_id: str | None
    notice_id: int | None = Field(description="The notice that followed.")
    kind: str
    said_at: datetime | None = Field(description="By the cloud; null if it did not say.")
    heard_at: datetime
    lag_s: float | None = Field(description="From said to heard.")
    deadline_at: datetime | None
    disposition: Disposition
    reason: str
    raw: str

    @classmethod
    def of(cls, row: HearingRow) -> "HearingOut":
        """From its row."""
        values = {name: getattr(row, name) for name in cls.model_fields if name not in ("notice_id", "lag_s")}
        lag_s = (row.heard_at - row.said_at).total_seconds() if row.said_at is not None else None
        return cls(**values, notice_id=row.occurrence_id, lag_s=lag_s)


@router.get("/channels", operation_id="list_channels", summary="List the channels of cloud accounts")
def list_of_accounts(context: ContextOf, session: SessionOf) -> list[AccountChannelOut]:
    """Those that a service has been configured to read. What a node hears itself is with the node."""
    now = context.clock()
    found = []
    for row, counts in list_channels(session):
        alive = is_alive(row.ok_at, now)
        found.append(
            AccountChannelOut(
                channel=row.channel,
                provider=Provider(row.provider),
                alive=alive,
                asked_at=row.ok_at,
                trouble=row.trouble if is_troubled(row) else "",
                trouble_since=row.trouble_since if is_troubled(row) else None,
                counts=counts,
            )
        )
    return found


@router.get("/hearings", operation_id="list_hearings", summary="List what channels told, newest first")
def list_heard(
    session: SessionOf,
    pages: PagesOf,
    node_id: Annotated[NodeId | None, Query(description="Only of this node.")] = None,
) -> list[HearingOut]:
    """Everything about nodes of this installation, and what nobody could read. What is foreign is only counted."""
    return [HearingOut.of(row) for row in list_hearings(session, pages, node_id=node_id)]


@numbers.get("/api/v1/metrics", include_in_schema=False)
def show_numbers(context: ContextOf, session: SessionOf) -> Response:
    """For Prometheus. No label grows with the number of machines or messages."""
    now = context.clock()
    lines = ["# TYPE liver_notice_messages_total counter"]
    accounts = list_channels(session)
    for row, counts in accounts:
        lines += [
            f'liver_notice_messages_total{{channel="{row.channel}",disposition="{name}"}} {heard}'
            for name, heard in sorted(counts.items())
        ]
    lines.append("# TYPE liver_notice_channel_alive gauge")
    lines += [
        f'liver_notice_channel_alive{{channel="{row.channel}"}} {int(is_alive(row.ok_at, now))}' for row, _ in accounts
    ]
    lines.append("# TYPE liver_notice_channel_asked_timestamp_seconds gauge")
    lines += [
        f'liver_notice_channel_asked_timestamp_seconds{{channel="{row.channel}"}} {row.ok_at.timestamp():.3f}'
        for row, _ in accounts
        if row.ok_at is not None
    ]
    nodes = session.scalars(select(NodeRow).where(NodeRow.state != NodeState.GONE)).all()
    channels = channels_of(session, nodes, now=now)
    deaf = sum(not any(channel.is_alive for channel in found) for found in channels.values())
    lines.append("# TYPE liver_nodes gauge")
    lines += [f'liver_nodes{{state="{state}"}} {sum(node.state == state for node in nodes)}' for state in LIVING]
    lines += ["# TYPE liver_nodes_deaf gauge", f"liver_nodes_deaf {deaf}"]
    return Response("\n".join(lines) + "\n", media_type=PROMETHEUS)
