"""What a report says of the orders that the agent has, and the whole of an answer that leaves out what it has.

Pure.
"""

from collections.abc import Iterable, Mapping
from datetime import datetime

from agent.protocol.sync import ANSWERED_AGO_S_MAX, NEIGHBOURS_KNOWN_MAX, JobOrder, PeerKeyKept, SyncOrders
from agent.protocol.wake_up import WakeOrders


def known_of(orders: SyncOrders | None) -> dict[str, object]:
    """What a report says of the orders that the agent has."""
    if orders is None:
        return {}
    neighbours = dict.fromkeys(order.neighbours for order in orders.jobs if order.neighbours)
    return {"orders_known": orders.orders_digest, "neighbours_known": tuple(neighbours)[:NEIGHBOURS_KNOWN_MAX]}


def answered_of(answered: tuple[datetime, float] | None, now: float) -> dict[str, object]:
    """What a report says of the last answer, by which the service knows this machine's clock. `answered`: when it was
    made, by the service, and when it came; that and `now` by time.monotonic."""
    if answered is None or not 0.0 <= now - answered[1] <= ANSWERED_AGO_S_MAX:
        return {}
    return {"answered_utc": answered[0], "answered_ago_s": now - answered[1]}


def peer_keys_of(orders: Iterable[JobOrder]) -> tuple[PeerKeyKept, ...]:
    """What a report says of keys that change. `orders`: as they are on disk."""
    return tuple(
        PeerKeyKept(job_id=order.job_id, number=order.peer_key_number)
        for order in orders
        if order.peer_key_before is not None
    )


def whole(orders: SyncOrders, had: SyncOrders | None) -> SyncOrders:
    """The orders with what the service left out, since the agent has it. Raises ValueError if it has not."""
    if orders.unchanged:
        if had is None or had.orders_digest != orders.orders_digest:
            raise ValueError(f"the service leaves out orders {orders.orders_digest}, which this agent does not have")
        return orders.model_copy(update={"jobs": had.jobs})
    known = {order.neighbours: order for order in had.jobs} if had is not None else {}
    return orders.model_copy(update={"jobs": tuple(_with_neighbours(order, known) for order in orders.jobs)})


def brought(orders: WakeOrders, had: SyncOrders | None) -> SyncOrders | None:
    """The orders that a wake-up brings, in the place of those that the agent has. None where those are as new, are of
    other jobs, or do not have what is left out: then only the answer to the next report says what counts."""
    if had is None or orders.orders_seq <= had.orders_seq or orders.issued_utc < had.issued_utc:
        return None
    if {order.job_id for order in orders.jobs} != {order.job_id for order in had.jobs}:
        return None
    said = {name: getattr(orders, name) for name in ("orders_seq", "issued_utc", "orders_digest", "jobs")}
    try:
        # What was refused was said with the answer.
        return whole(had.model_copy(update={**said, "unchanged": False, "refusals": ()}), had)
    except ValueError:
        return None


def _with_neighbours(order: JobOrder, known: Mapping[str, JobOrder]) -> JobOrder:
    if not order.neighbours or order.roster is not None:
        return order
    same = known.get(order.neighbours)
    if same is None:
        raise ValueError(f"the service leaves out the roster of job {order.job_id}, which this agent does not have")
    return order.model_copy(update={"roster": same.roster, "peers": same.peers})
