"""Reads of what channels told, and of which channels of a node are alive."""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from functools import cache

from sqlalchemy import Select, func, select
from sqlalchemy.orm import Session

from agent.protocol.sync import Provider, SourceState
from service.capacity.tables import InstanceRow
from service.clouds.lacks import OwnView
from service.clouds.rules import NodeChannel, is_alive
from service.clouds.tables import ChannelRow, HearingCountRow, HearingRow
from service.db.base import among
from service.nodes.tables import NodeRow, NodeState
from service.paging import Pages

MACHINES_SEEN = 200
"""So many machines, the newest, are looked at for what their groups lack."""


def channels_of(session: Session, nodes: Sequence[NodeRow], *, now: datetime) -> dict[str, tuple[NodeChannel, ...]]:
    """By which channels a notice about each of these nodes would be heard. None of one that is gone."""
    here = [node for node in nodes if node.state != NodeState.GONE]
    if not here:
        return {}
    heard: dict[str, dict[str, datetime]] = defaultdict(dict)
    for node_id, channel, at in session.execute(_last_heard(), {"node_ids": [node.node_id for node in here]}):
        heard[str(node_id)][channel] = at
    of_accounts = session.scalars(select(ChannelRow).order_by(ChannelRow.channel)).all()
    return {node.node_id: tuple(_channels(node, of_accounts, heard[node.node_id], now)) for node in here}


@cache
def _last_heard() -> Select[str | None, str, datetime]:
    return (
        select(HearingRow.node_id, HearingRow.channel, func.max(HearingRow.heard_at))
        .where(among(HearingRow.node_id, "node_ids"))
        .group_by(HearingRow.node_id, HearingRow.channel)
    )


def _channels(
    node: NodeRow, of_accounts: Iterable[ChannelRow], heard: Mapping[str, datetime], now: datetime
) -> Iterable[NodeChannel]:
    source = node.notice_source
    if source is not None:
        reason = "" if source["state"] == SourceState.WATCHING else source["reason"] or "it is not read yet"
        reason = reason if node.state == NodeState.READY else "the agent of the node is not heard"
        name = source["source"]
        yield NodeChannel(name, not reason, reason, asked_at=node.last_seen_at, heard_at=heard.get(name))
    for row in of_accounts:
        if row.provider == node.provider:
            reason = _why_not(row, now) if node.provider_id else "the agent has not said which machine the node is"
            yield NodeChannel(row.channel, not reason, reason, asked_at=row.ok_at, heard_at=heard.get(row.channel))


def _why_not(row: ChannelRow, now: datetime) -> str:
    if is_alive(row.ok_at, now):
        return ""
    return row.trouble or "nobody asks it"


def list_channels(session: Session) -> list[tuple[ChannelRow, dict[str, int]]]:
    """The channels of accounts, each with how much it told, by what was done with that."""
    counts: dict[str, dict[str, int]] = defaultdict(dict)
    for row in session.scalars(select(HearingCountRow)):
        counts[row.channel][row.disposition] = row.heard
    rows = session.scalars(select(ChannelRow).order_by(ChannelRow.channel)).all()
    return [(row, counts[row.channel]) for row in rows]


def is_troubled(row: ChannelRow) -> bool:
    """Whether the channel could not be asked when that was last tried."""
    return row.trouble_at is not None and (row.ok_at is None or row.trouble_at > row.ok_at)


def own_view(session: Session) -> OwnView:
    """What the service knows itself of its channels and machines, before it asks the clouds."""
    rows = session.scalars(select(ChannelRow)).all()
    known = select(InstanceRow.provider, InstanceRow.provider_id).order_by(InstanceRow.instance_id.desc())
    known = known.where(InstanceRow.released_at.is_(None), InstanceRow.provider_id.is_not(None)).limit(MACHINES_SEEN)
    machines: dict[Provider, tuple[str, ...]] = defaultdict(tuple)
    for provider, provider_id in session.execute(known):
        machines[Provider(provider)] += (str(provider_id),)
    return OwnView({row.channel: row.trouble for row in rows if is_troubled(row)}, machines)


def list_hearings(session: Session, pages: Pages, *, node_id: str | None = None) -> Sequence[HearingRow]:
    """What was heard, of all or of a node, newest first."""
    statement = select(HearingRow)
    if node_id is not None:
        statement = statement.where(HearingRow.node_id == node_id)
    return pages.newest(session, statement, HearingRow.hearing_id)
