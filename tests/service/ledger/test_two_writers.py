"""Two transactions write to the ledger of one slot: the second waits, and goes on from what the first stored."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
from sqlalchemy.orm import Session

from service.db.engine import Database
from service.leases.tables import LeaseRow
from service.ledger.operations import account_all, charge_pause
from service.ledger.rules import Spent
from service.ledger.tables import Cause
from tests.service.ledger.conftest import at
from tests.service.ledger.test_operations import WORK, intervals
from tests.service.reconcilers.test_lock_order import await_a_wait

IDLE = Spent(Cause.IDLE)
WITHIN_S = 12.0
Work = Callable[[Session, LeaseRow], object]


def one_after_the_other(database: Database, lease_id: int, first: Work, second: Work) -> None:
    """The second begins before the first commits."""

    def follow() -> None:
        with database.sessions.begin() as session:
            second(session, session.get_one(LeaseRow, lease_id))

    with ThreadPoolExecutor(1) as pool:
        with database.sessions.begin() as session:
            first(session, session.get_one(LeaseRow, lease_id))
            session.flush()
            follower = pool.submit(follow)
            await_a_wait(database.sessions)
        follower.result(timeout=WITHIN_S)


@pytest.mark.parametrize(
    ("spent", "until_s", "found"),
    [
        (WORK, 7, [("productive", "j", 1, 0, 9)]),
        (WORK, 11, [("productive", "j", 1, 0, 11)]),
        (IDLE, 7, [("productive", "j", 1, 0, 9)]),
        (IDLE, 11, [("productive", "j", 1, 0, 9), ("idle", None, None, 9, 11)]),
    ],
)
def test_who_accounts_second_goes_on_where_the_first_ended(database, session, lease, spent, until_s, found):
    account_all(session, lease=lease, until=at(5), spent=[WORK])
    session.commit()
    one_after_the_other(
        database,
        lease.lease_id,
        lambda first, its: account_all(first, lease=its, until=at(9), spent=[WORK]),
        lambda second, its: account_all(second, lease=its, until=at(until_s), spent=[spent]),
    )
    assert intervals(session) == found


def test_two_pauses_that_are_charged_at_a_time_are_both_charged(database, session, lease):
    account_all(session, lease=lease, until=at(10), spent=[WORK])
    session.commit()

    def charge(session: Session, lease: LeaseRow) -> None:
        charge_pause(session, lease=lease, slot=0, seconds=0.5, job_id="j")

    one_after_the_other(database, lease.lease_id, charge, charge)
    # What the second found taken is due from the time that comes next.
    session.refresh(lease)
    account_all(session, lease=lease, until=at(12), spent=[WORK])
    pauses = [(starts_s, ends_s) for cause, _, _, starts_s, ends_s in intervals(session) if cause == "pause"]
    assert sum(ends_s - starts_s for starts_s, ends_s in pauses) == 1.0
