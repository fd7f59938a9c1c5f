"""What is summed already, when another price of a pool is set."""

from datetime import datetime

from sqlalchemy.orm import Session

from service.ledger.egress import leave_sums
from service.ledger.prices import span_of_new
from service.ledger.sums import cut_at_price


def move_to_price(session: Session, pool: str, effective_from: datetime) -> None:
    """Make all sums right for a price that is about to be stored.

    Raises Unsplittable where it begins within an hour of which only the sum is left.
    """
    span = span_of_new(session, pool, effective_from)
    if span is not None:
        cut_at_price(session, pool, span)
        leave_sums(session, pool, span)
