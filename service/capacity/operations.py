"""Knows the machine of each node. Nothing here orders one."""

from dataclasses import dataclass
from datetime import datetime

from sqlalchemy import ColumnElement, Select, func, select, update
from sqlalchemy.orm import Session

from agent.protocol.sync import NodeInfo, Provider
from service.capacity.tables import InstanceRow, RequestRow
from service.nodes.tables import NodeRow, NodeState

LOCK_MACHINES = 0x11FE_0005
STARTED_BY_HAND = "whoever started the agent"


def machine_of(
    session: Session, *, node_id: str, provider: str, pool: str, now: datetime, provider_id: str | None = None
) -> InstanceRow:
    """The machine of a node whose agent reports. One that nobody ordered here was started by hand: it is stored with
    the request that a person made somewhere else. `provider_id`: what the node is, as far as that was accepted."""
    instance = session.scalars(_present(InstanceRow.node_id == node_id)).one_or_none()
    if instance is None and provider_id is not None:
        ordered = (InstanceRow.provider == provider) & (InstanceRow.provider_id == provider_id)
        instance = session.scalars(_present(ordered & InstanceRow.node_id.is_(None))).one_or_none()
        if instance is not None:
            instance.node_id = node_id
            session.flush()
    if instance is None:
        request = RequestRow(
            provider=provider, pool=pool, machines=1, asked_by=STARTED_BY_HAND, asked_at=now, ended_at=now,
            end_reason="the machine has come",
        )  # fmt: skip
        session.add(request)
        session.flush()
        instance = InstanceRow(
            request_id=request.request_id, provider=provider, node_id=node_id, pool=pool, known_since=now
        )
        session.add(instance)
        session.flush()
    return instance


def release_machine(session: Session, node_id: str, *, now: datetime) -> None:
    """Another machine has this node's name from now on."""
    session.execute(
        update(InstanceRow)
        .where(InstanceRow.node_id == node_id, InstanceRow.released_at.is_(None))
        .values(released_at=now)
        .execution_options(synchronize_session=False)
    )


@dataclass(frozen=True, slots=True)
class Claim:
    """What a node says of its machine. `refused`: why that is not taken; empty if it is. `is_another`: the node is on
    another machine than before, under the same name."""

    refused: str = ""
    is_another: bool = False


def judge_claim(session: Session, info: NodeInfo, *, now: datetime) -> Claim:
    """Whether the node may say that it is this machine of its provider. One that is known as another node, which is not
    gone, it may not be: it would get that one's notices. Until the end of the transaction nobody else claims it."""
    if info.provider_id is None:
        return Claim()
    if info.provider is Provider.NONE:
        return Claim(f"a node of no provider is no machine {info.provider_id}")
    name = f"{info.provider.value}/{info.provider_id}"
    session.execute(select(func.pg_advisory_xact_lock(LOCK_MACHINES, func.hashtext(name))))
    own = session.scalars(_present(InstanceRow.node_id == info.node_id)).one_or_none()
    holder = session.scalars(
        _present((InstanceRow.provider == info.provider.value) & (InstanceRow.provider_id == info.provider_id))
    ).one_or_none()
    if holder is not None and holder.node_id not in (None, info.node_id):
        state = session.scalars(select(NodeRow.state).where(NodeRow.node_id == holder.node_id)).one()
        if state != NodeState.GONE:
            return Claim(f"machine {info.provider_id} is node {holder.node_id}, which is not gone")
        holder.released_at = max(now, holder.known_since)
        session.flush()
        holder = None
    if own is None:
        return Claim()
    return Claim(is_another=own.provider_id not in (None, info.provider_id) or holder not in (None, own))


def store_claim(session: Session, machine: InstanceRow, info: NodeInfo) -> None:
    """The machine has this name at its provider."""
    machine.provider_id, machine.zone = info.provider_id, info.zone or machine.zone
    session.flush()


def _present(which: ColumnElement[bool]) -> Select[InstanceRow]:
    return select(InstanceRow).where(which, InstanceRow.released_at.is_(None))
