"""What the service knows of the pools in which a job's nodes are: prices now, and how long they go without a loss."""

from collections import defaultdict
from collections.abc import Collection
from dataclasses import replace
from datetime import datetime, timedelta

from sqlalchemy import text
from sqlalchemy.orm import Session

from agent.protocol.jobfile import JobFile
from agent.protocol.notice_life import DRAIN
from service.capacity.wants import short_pools
from service.leases.queries import price_of
from service.planner.inputs import PoolMarket
from service.policy.pool_lives import LeaseSeen, PoolLife, life_of

LOOKS_BACK = timedelta(days=14)
LEASES_MAX = 5_000
POOLS_MAX = 256
DIGITS_MAX = 1
"""As much as an estimate means, and few enough that decisions of the same facts may be kept."""
COUNT_DIGITS_MAX = 2
"""Of nodes: in a large fleet one more or less changes no decision."""
_LEASES = text(
    f"""
    SELECT pool, started_at, ended_at, ended_at IS NOT NULL AND NOT EXISTS (
           SELECT FROM notices WHERE notices.lease_id = leases.lease_id AND notices.withdrawn_at IS NULL
              AND notices.source = '{DRAIN}') AS was_lost
      FROM leases
     WHERE (ended_at IS NULL OR ended_at > :since) AND pool = ANY(:pools)
     ORDER BY started_at DESC LIMIT {LEASES_MAX}
    """
)
_OURS = text("SELECT pool, count(*) AS nodes FROM leases WHERE ended_at IS NULL AND pool = ANY(:pools) GROUP BY pool")


def weighed_markets(
    session: Session, spec: JobFile, job_id: str, pools: Collection[str], *, now: datetime
) -> tuple[PoolMarket, ...]:
    """Of the pools of a job's nodes and of those that its file names, where it weighs prices. With a policy it may want
    as many nodes of each as it could hold, since nobody knows how many there are; no spot nodes where none came lately.
    """
    if spec.policy is None:
        return markets_of(session, pools, now=now) if spec.budget_usd is not None else ()
    most, names = spec.nodes.max + spec.policy.spares_max, {*pools, *spec.pools}
    short, ours = short_pools(session, job_id, names, now=now), _ours(session, names)
    return tuple(
        replace(
            each,
            offered=0 if each.pool in short else most,
            on_demand_offered=spec.nodes.max,
            ours=ours.get(each.pool, 0),
        )
        for each in markets_of(session, names, now=now)
    )


def markets_of(session: Session, pools: Collection[str], *, now: datetime) -> tuple[PoolMarket, ...]:
    """Of each pool. A lease that ended counts as a loss unless somebody had drained its node."""
    names, since = sorted(pools)[:POOLS_MAX], now - LOOKS_BACK
    seen: dict[str, list[LeaseSeen]] = defaultdict(list)
    for row in session.execute(_LEASES, {"since": since, "pools": names}):
        ended_s = (row.ended_at - since).total_seconds() if row.ended_at is not None else None
        seen[row.pool].append(LeaseSeen((row.started_at - since).total_seconds(), ended_s, row.was_lost))
    lives = {pool: life_of(each, since_s=0.0, now_s=LOOKS_BACK.total_seconds()) for pool, each in seen.items()}
    return tuple(_market(session, pool, lives.get(pool), now) for pool in names)


def _ours(session: Session, pools: Collection[str]) -> dict[str, int]:
    """Nodes of ours in each pool, whichever job uses them: lives and groups of losses are of all of them."""
    rows = session.execute(_OURS, {"pools": sorted(pools)})
    return {row.pool: int(_rounded(row.nodes, COUNT_DIGITS_MAX)) for row in rows}


def _market(session: Session, pool: str, life: PoolLife | None, now: datetime) -> PoolMarket:
    row = price_of(session, pool, now=now)
    usd = float(row.price_usd_per_hour) if row is not None else None
    on_demand = float(row.on_demand_usd_per_hour) if row is not None and row.on_demand_usd_per_hour else None
    egress = float(row.egress_usd_per_gb) if row is not None and row.egress_usd_per_gb is not None else None
    if life is None:
        return PoolMarket(pool, usd, on_demand, egress_usd_per_gb=egress)
    return PoolMarket(
        pool,
        usd,
        on_demand,
        life_s=_rounded(life.life_s),
        losses=life.losses,
        watched_h=_rounded(life.watched_h),
        volatility=_rounded(life.volatility),
        group_sizes=tuple((size, round(share, 2)) for size, share in life.group_sizes),
        egress_usd_per_gb=egress,
    )


def _rounded(value: float, digits: int = DIGITS_MAX) -> float:
    return float(f"{value:.{digits}g}")
