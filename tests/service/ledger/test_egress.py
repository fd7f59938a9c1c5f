"""The sums of what handoffs moved come to what the rows come to, in whatever order these, their corrections and prices
become known."""

from uuid import UUID

from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from sqlalchemy import text
from sqlalchemy.orm import Session

from service.leases.operations import set_price
from service.ledger.egress import roll_egress, store_egress
from service.ledger.queries import egress
from service.ledger.repricing import move_to_price
from service.ledger.tables import EgressRow
from tests.service.ledger.conftest import at

SPANS = [(None, None), (0, 9_000), (3_600, 7_200), (3_599.5, 7_200.000001), (100, 200), (None, 4_000), (5_000, None)]
JOBS = (None, "j", "k", "nobody")
# Of each row: the newest price from before, or else the first one.
PLAIN = text(
    """
    SELECT coalesce(sum(bytes), 0) AS bytes, sum(bytes * price.usd) / 1000000000 AS dollars,
           count(*) FILTER (WHERE price.usd IS NULL AND bytes > 0) AS unpriced
      FROM ledger_egress
      LEFT JOIN LATERAL (
           SELECT egress_usd_per_gb AS usd FROM pool_prices
            WHERE pool_prices.pool = ledger_egress.pool
            ORDER BY (effective_from <= ledger_egress.at) DESC,
                     CASE WHEN effective_from <= ledger_egress.at THEN effective_from END DESC, effective_from
            LIMIT 1) AS price ON true
     WHERE (CAST(:job_id AS text) IS NULL OR job_id = CAST(:job_id AS text))
       AND at >= coalesce(CAST(:since AS timestamptz), at) AND at < coalesce(CAST(:until AS timestamptz), 'infinity')
    """
)
seconds = st.integers(0, 10_000) | st.sampled_from([0, 3_600, 7_200])
pools = st.sampled_from(["p", "q"])
events = st.one_of(
    st.tuples(st.just("moved"), st.integers(1, 6), st.integers(0, 10**12), seconds, pools | st.none()),
    st.tuples(st.just("priced"), pools, seconds, st.integers(0, 100) | st.none()),
    st.tuples(st.just("summed"), seconds, st.integers(1, 9)),
)
SUMMED = [
    ("priced", "p", 3_000, 1), ("moved", 1, 10**9, 1_000, "p"), ("moved", 2, 10**9, 3_500, "p"),
    ("moved", 3, 10**9, 8_000, "p"), ("summed", 9_999, 9),
]  # fmt: skip


def moved(session: Session, number: int, count: int, at_s: int, pool: str | None) -> None:
    """As each report of the handoff says it: the first one tells when and from where."""
    job_id = "j" if number % 2 else "k"
    store_egress(session, EgressRow(handoff_id=UUID(int=number), job_id=job_id, pool=pool, bytes=count, at=at(at_s)))
    session.flush()


def priced(session: Session, pool: str, at_s: int, mills: int | None) -> None:
    """As the API does."""
    move_to_price(session, pool, at(at_s))
    usd = None if mills is None else mills / 1_000
    set_price(session, pool=pool, price_usd_per_hour=1.0, effective_from=at(at_s), egress_usd_per_gb=usd)
    session.flush()


def summed(session: Session, before_s: int, most: int) -> None:
    while roll_egress(session, before=at(before_s), most=most):
        pass


def check(session: Session, spans=SPANS, jobs=JOBS) -> None:
    for since, until in spans:
        for job_id in jobs:
            span = {"since": None if since is None else at(since), "until": None if until is None else at(until)}
            plain = session.execute(PLAIN, {"job_id": job_id, **span}).one()
            found = egress(session, job_id=job_id, **span)
            wanted = None if plain.unpriced else float(plain.dollars or 0)
            assert (found.bytes, found.dollars) == (plain.bytes, wanted), (since, until, job_id)


@settings(
    max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
@given(history=st.lists(events, min_size=1, max_size=12))
# What is summed gets another price from its middle on, one before the first, and is measured anew.
@example([*SUMMED, ("priced", "p", 4_000, 7)])
@example([*SUMMED, ("priced", "p", 0, 7), ("summed", 9_999, 9), ("priced", "p", 2_000, 9)])
@example([*SUMMED, ("moved", 1, 5 * 10**9, 9_000, "q")])
def test_sums_come_to_what_the_rows_come_to(session, history):
    with session.begin_nested() as savepoint:
        for name, *what in history:
            {"moved": moved, "priced": priced, "summed": summed}[name](session, *what)
            if name != "moved":
                check(session, SPANS[:1], JOBS[:1])
        summed(session, 99_000, 100)
        check(session)
        savepoint.rollback()
    session.expire_all()


def test_all_time_is_read_from_sums_and_no_row(session):
    for number in range(1, 7):
        moved(session, number, 10**9, 600 * number, "p")
    summed(session, 99_000, 100)
    assert egress(session).bytes == 6 * 10**9
    session.execute(text("DELETE FROM ledger_egress"))
    assert egress(session).bytes == 6 * 10**9
    assert egress(session, job_id="k", since=at(0), until=at(3_600)).bytes == 2 * 10**9
