"""What handoffs moved over the network, for the ledger: one row a handoff, and the sums of those that are not new.

As with intervals (`service.ledger.sums`), what reads adds sums up with the rows that are not in them yet, and a row is
taken out of the sums before it, or the price that counts for it, changes. Rows are kept; nobody reads them all.
"""

from datetime import datetime

from sqlalchemy import select, text
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.orm import Session

from agent.protocol.sync import HandoffMirror
from service.handoffs.tables import HandoffRow
from service.ledger.prices import PRICES, PriceSpan, share_prices
from service.ledger.tables import EgressRow
from service.nodes.tables import NodeRow

ROLLED_MAX = 10_000
# What is of a job counts for all jobs together too, and what is of an hour also for all time. In one order, so that two
# who add to the same sums do not wait for each other in a circle.
_ADD = f"""
    {PRICES}
    INSERT INTO ledger_egress_sums AS known (job_id, hour, pool, price_from, bytes)
    SELECT counts_for.job_id, counts_at.hour, coalesce(chosen.pool, ''), coalesce(prices.since, '-infinity'),
           :sign * sum(chosen.bytes)
      FROM chosen
      LEFT JOIN prices ON prices.pool = chosen.pool AND prices.since <= chosen.at AND chosen.at < prices.until
     CROSS JOIN LATERAL (VALUES (chosen.job_id), ('')) AS counts_for (job_id)
     CROSS JOIN LATERAL (VALUES (date_trunc('hour', chosen.at, 'UTC')), (CAST('-infinity' AS timestamptz)))
                     AS counts_at (hour)
     GROUP BY 1, 2, 3, 4 ORDER BY 1, 2, 3, 4
    ON CONFLICT (job_id, hour, pool, price_from) DO UPDATE SET bytes = known.bytes + excluded.bytes
"""
_ROLL = text(
    f"""
    WITH chosen AS (
         UPDATE ledger_egress SET rolled = true
           FROM (SELECT handoff_id FROM ledger_egress WHERE NOT rolled AND at < :before
                  LIMIT :most FOR NO KEY UPDATE SKIP LOCKED) AS picked
          WHERE ledger_egress.handoff_id = picked.handoff_id
         RETURNING ledger_egress.*),
    {_ADD}
    """
)
_TAKE_BACK = text(
    f"""
    WITH chosen AS (
         UPDATE ledger_egress SET rolled = false
          WHERE rolled AND handoff_id = :handoff_id
         RETURNING *),
    {_ADD}
    """
)
_TAKE_BACK_OF_POOL = text(
    f"""
    WITH chosen AS (
         UPDATE ledger_egress SET rolled = false
          WHERE rolled AND pool = :pool AND at >= :begins AND at < coalesce(CAST(:ends AS timestamptz), 'infinity')
         RETURNING *),
    {_ADD}
    """
)
_LEFT = text(
    "SELECT count(*) FROM (SELECT FROM ledger_egress WHERE NOT rolled AND at < :before LIMIT :most) AS waiting"
)


def note_egress(session: Session, row: HandoffRow, mirror: HandoffMirror) -> None:
    """Store the bytes that the ranks measured, once they are known. A later report replaces an earlier one."""
    moved = mirror.measures.bytes_moved
    if moved is None or mirror.source is None:
        return
    pools = set(session.scalars(select(NodeRow.pool).where(NodeRow.node_id.in_(mirror.source.node_ids()))))
    pool = pools.pop() if len(pools) == 1 else None
    found = EgressRow(handoff_id=row.handoff_id, job_id=row.job_id, pool=pool, bytes=moved, at=row.changed_at)
    store_egress(session, found)


def store_egress(session: Session, found: EgressRow) -> None:
    """Store a row, or what is new of one that is known: its bytes. Of which pool the nodes were when it moved does not
    change when a node changes its pool."""
    names = ("handoff_id", "job_id", "pool", "bytes", "at")
    values = {name: getattr(found, name) for name in names} | {"rolled": False}
    added = insert(EgressRow).values(values).on_conflict_do_nothing().returning(EgressRow.handoff_id)
    if session.scalars(added).first() is not None:
        return
    same = select(EgressRow).where(EgressRow.handoff_id == found.handoff_id)
    row = session.scalars(same.with_for_update(key_share=True).execution_options(populate_existing=True)).one()
    if row.bytes == found.bytes:
        return
    if row.rolled:
        share_prices(session)
        session.execute(_TAKE_BACK, {"handoff_id": row.handoff_id, "sign": -1})
        session.refresh(row)
    row.bytes = found.bytes


def roll_egress(session: Session, *, before: datetime, most: int = ROLLED_MAX) -> int:
    """Sum up to `most` rows of handoffs from before. Returns how many there were."""
    values = {"before": before, "most": most}
    found = session.execute(_LEFT, values).scalar_one()
    if found:
        share_prices(session)
        session.execute(_ROLL, values | {"sign": 1})
    return found


def leave_sums(session: Session, pool: str, span: PriceSpan) -> None:
    """Take out of the sums what a price that is about to be stored will count for."""
    values = {"pool": pool, "begins": span.begins, "ends": span.ends, "sign": -1}
    session.execute(_TAKE_BACK_OF_POOL, values)
