"""Begins and ends leases, appends prices."""

from datetime import datetime
from decimal import Decimal

from sqlalchemy import func, select
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.orm import Session

from service.capacity.operations import machine_of
from service.leases.queries import price_of
from service.leases.tables import LeaseRow, PoolPriceRow

LOCK_POOLS = 0x11FE_0003


def begin_lease(
    session: Session,
    *,
    node_id: str,
    provider: str,
    pool: str,
    slots: int,
    now: datetime,
    was_away: bool = False,
    provider_id: str | None = None,
) -> LeaseRow:
    """Begin a lease of a node that has none.

    `was_away`: the node counted as gone, but its agent has lived on, and so has the machine: the lease begins where the
    one before it ended. The first lease of a machine begins when the machine is paid, as far as that is known.
    `provider_id`: the provider's name of the machine, if that is known.
    """
    machine = machine_of(session, node_id=node_id, provider=provider, pool=pool, now=now, provider_id=provider_id)
    ended_at = session.scalars(
        select(func.max(LeaseRow.ended_at)).where(LeaseRow.instance_id == machine.instance_id)
    ).one()
    if ended_at is None:
        started_at = min(now, machine.paid_from or now)
    else:
        started_at = ended_at if was_away else max(now, ended_at)
    lease = LeaseRow(node_id=node_id, instance_id=machine.instance_id, pool=pool, slots=slots, started_at=started_at)
    session.add(lease)
    session.flush()
    return lease


def end_lease(lease: LeaseRow, *, now: datetime, reason: str) -> None:
    """End the lease; a second call changes nothing."""
    if lease.ended_at is None:
        lease.ended_at = max(now, lease.started_at)
        lease.end_reason = reason


def lock_pool(session: Session, pool: str) -> None:
    """Until the end of the transaction nobody else sets a price of this pool: each knows the one before."""
    session.execute(select(func.pg_advisory_xact_lock(LOCK_POOLS, func.hashtext(pool))))


def set_price(
    session: Session,
    *,
    pool: str,
    price_usd_per_hour: float,
    effective_from: datetime,
    egress_usd_per_gb: float | None = None,
    on_demand_usd_per_hour: float | None = None,
) -> PoolPriceRow:
    """Append a price; a second price for the same moment replaces the first. Without a price of what leaves the pool,
    or of a node on demand, that one stays."""
    before = price_of(session, pool, now=effective_from)
    # As it was written: 0.1 is a tenth of a dollar, and not the binary fraction next to it.
    values: dict[str, Decimal | None] = {"price_usd_per_hour": Decimal(str(price_usd_per_hour))}
    for name, given in (
        ("egress_usd_per_gb", egress_usd_per_gb),
        ("on_demand_usd_per_hour", on_demand_usd_per_hour),
    ):
        values[name] = getattr(before, name, None) if given is None else Decimal(str(given))
    statement = insert(PoolPriceRow).values(pool=pool, effective_from=effective_from, **values)
    session.execute(statement.on_conflict_do_update(index_elements=["pool", "effective_from"], set_=values))
    return session.get_one(PoolPriceRow, (pool, effective_from), populate_existing=True)
