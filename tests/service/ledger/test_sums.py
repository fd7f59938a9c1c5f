"""The sums of the ledger come to what its intervals come to, whatever is learnt later."""

from datetime import timedelta
from decimal import Decimal

import pytest
from sqlalchemy import func, select, text
from sqlalchemy.orm import Session

from service.leases.operations import set_price
from service.leases.tables import LeaseRow, PoolPriceRow
from service.ledger import sums
from service.ledger.operations import account_all, charge_pause, recast
from service.ledger.queries import CauseSum, by_generation, saved_usd, summary
from service.ledger.repricing import move_to_price
from service.ledger.rules import Part, Spent
from service.ledger.sums import Unsplittable, forget, merge, roll
from service.ledger.tables import Cause, IntervalRow, KeptRow, SumRow
from tests.service.ledger.conftest import START, at, leased
from tests.tiers import sample

WORK, AGAIN, REST = Spent(Cause.PRODUCTIVE, "j", 1), Spent(Cause.RECOMPUTE, "j", 2), Spent(Cause.IDLE)
SPANS = [
    (None, None), (0, 9_000), (3_600, 7_200), (3_599.5, 7_200.000001), (100, 200), (None, 4_000), (5_000, None),
    (3_600, 3_600), (7_300, 7_200), (-9_000, 99_000),
]  # fmt: skip


def test_what_was_saved_is_known_as_soon_as_any_time_has_both_prices():
    nothing = CauseSum(Cause.PRODUCTIVE, 3.0, 1.0, saved=0.0, uncompared=3.0)
    half_a_second = CauseSum(Cause.PAUSE, 0.5, 0.1, saved=0.25)
    assert saved_usd([nothing]) is None
    assert saved_usd([nothing, half_a_second]) == 0.25


@pytest.fixture
def history(session: Session, lease: LeaseRow) -> LeaseRow:
    """Three hours of two nodes with two slots each."""
    other = leased(session, "b", "q")
    for until_s, spent in ((1_000, WORK), (4_000.000001, REST), (4_010, AGAIN), (9_000, WORK), (9_500, REST)):
        for each in (lease, other):
            account_all(session, lease=each, until=at(until_s), spent=[spent, REST])
    return lease


def summed(session: Session, *, merged: bool = True, before_s: float = 99_000) -> int:
    session.flush()
    count = roll(session, before=at(before_s))
    if merged:
        assert merge(session) > 0 or count == 0
    return count


def answers(session: Session) -> list:
    """All that can be asked."""
    found: list = [by_generation(session, "j", [1, 2, 3])]
    for since, until in SPANS:
        for job_id in (None, "j", "nobody"):
            span = {"since": None if since is None else at(since), "until": None if until is None else at(until)}
            found.append((since, until, job_id, list(summary(session, job_id=job_id, **span))))
    return found


def plain(session: Session) -> list:
    """The same, from the intervals alone."""
    session.flush()
    with session.begin_nested() as savepoint:
        session.execute(text("DELETE FROM ledger_sums"))
        session.execute(text("UPDATE ledger SET rolled = false"))
        found = answers(session)
        savepoint.rollback()
    session.expire_all()
    return found


def set_a_price(session: Session, at_s: float, usd: float, pool: str = "p") -> None:
    """As the API does."""
    session.flush()
    move_to_price(session, pool, at(at_s))
    set_price(session, pool=pool, price_usd_per_hour=usd, effective_from=at(at_s))


@pytest.mark.parametrize("merged", [True, False])
def test_intervals_that_have_ended_are_summed_once_and_those_that_grow_are_not(session, history, merged):
    before = plain(session)
    assert summed(session, merged=merged) == 2 * 4, "slot 1 has rested all the time, and slot 0 rests now"
    assert summed(session, merged=False) == 0
    assert answers(session) == before == plain(session)
    account_all(session, lease=history, until=at(9_600), spent=[REST, REST])
    assert answers(session) == plain(session)


def test_what_has_ended_lately_waits(session, history):
    assert summed(session, before_s=4_000) == 2


def test_the_sums_of_a_key_become_one_row(session, history):
    for before_s in (1_500, 4_005, 99_000):
        assert summed(session, before_s=before_s)
    key = (SumRow.job_id, SumRow.generation, SumRow.pool, SumRow.cause, SumRow.hour, SumRow.price_from)
    assert (
        session.execute(select(func.count(SumRow.sum_id)).group_by(*key).order_by(func.count(SumRow.sum_id).desc()))
        .scalars()
        .first()
        == 1
    )
    assert session.scalars(select(SumRow.merged).distinct()).all() == [True]
    assert merge(session) == 0


@pytest.mark.parametrize("merged", [True, False])
def test_a_late_report_corrects_the_sums_at_once(session, history, merged):
    summed(session, merged=merged)
    before = answers(session)
    recast(session, node_id="a", slots=[0], parts=[Part(at(900), at(3_700.5), AGAIN)])
    session.flush()
    assert answers(session) == plain(session) != before
    summed(session, merged=merged)
    assert answers(session) == plain(session)


def test_a_late_report_that_says_nothing_new_leaves_the_sums_alone(session, history):
    summed(session)
    recast(session, node_id="a", slots=[0], parts=[Part(at(4_010), at(8_000), WORK)])
    assert summed(session, merged=False) == 0


def test_a_pause_that_is_charged_to_time_in_sums_is_taken_out_of_them(session, history):
    summed(session)
    assert charge_pause(session, lease=history, slot=0, seconds=5_500, job_id="j") == 5_500
    session.flush()
    assert answers(session) == plain(session)
    summed(session)
    assert answers(session) == plain(session)


@pytest.mark.parametrize(
    "at_s",
    sample([-500, 0, 1_800, 3_600, 3_600.000001, 4_005, 5_000, 7_200, 8_999, 20_000], 0, 3_600, 3_600.000001, 4_005),
)
@pytest.mark.parametrize(
    "known", sample([[], [2_000], [-3_600, 3_600], [500, 4_500, 4_600, 7_200]], [], [500, 4_500, 4_600, 7_200])
)
def test_a_price_that_is_set_afterwards_counts_from_its_very_moment(session, history, at_s, known):
    for number, known_s in enumerate(known):
        usd = Decimal(number + 1)
        session.add(PoolPriceRow(pool="p", effective_from=at(known_s), price_usd_per_hour=usd))
    summed(session)
    set_a_price(session, at_s, 7.5)
    assert answers(session) == plain(session)
    merge(session)
    set_a_price(session, at_s, 9.5)
    set_a_price(session, 4_007, 3)
    assert answers(session) == plain(session)
    recast(session, node_id="a", slots=[0], parts=[Part(at(900), at(4_100), AGAIN)])
    session.flush()
    assert answers(session) == plain(session)


def test_sums_outlive_their_intervals_and_the_chain_goes_on(session, history, monkeypatch):
    set_a_price(session, 0, 1)
    summed(session)
    whole = [
        (since, until) for since, until in SPANS if all(each is None or each % 3_600 == 0 for each in (since, until))
    ]
    monkeypatch.setattr("tests.service.ledger.test_sums.SPANS", whole)
    before, count = answers(session), session.scalar(select(func.count()).select_from(IntervalRow))
    assert forget(session, before=at(4_005), most=3) == 2, "those of the first hour, which is whole"
    assert forget(session, before=at(4_005), most=3) == 0
    assert session.scalars(select(KeptRow.kept_from)).one() == at(3_600)
    assert forget(session, before=at(99_000), most=3) == 3
    assert forget(session, before=at(99_000), most=99) == 1, "up to the hour in which the first ends that is no sum"
    session.execute(text("SET CONSTRAINTS ALL IMMEDIATE"))
    session.expire_all()
    assert session.scalar(select(func.count()).select_from(IntervalRow)) == count - 6
    assert answers(session) == before
    recast(session, node_id="a", slots=[0], parts=[Part(at(100), at(3_000), AGAIN)])
    assert answers(session) == before, "of what is known no more nothing is learnt"
    account_all(session, lease=history, until=at(9_700), spent=[WORK, REST])
    session.execute(text("SET CONSTRAINTS ALL IMMEDIATE"))


def test_an_hour_of_which_only_the_sum_is_left_is_not_cut(session, history):
    set_a_price(session, -7_200, 1)
    summed(session)
    assert forget(session, before=at(7_200), most=99)
    with pytest.raises(Unsplittable, match="must be a full hour, or not before 2026-01-01 02:00 UTC"):
        summary(session, since=at(3_601))
    with pytest.raises(Unsplittable):
        move_to_price(session, "p", at(1))
    assert [
        item.slot_seconds for item in summary(session, since=at(3_600), until=at(7_201)) if item.cause == "recompute"
    ]
    set_a_price(session, 3_600, 2)
    by_hour = [sum(item.dollars for item in summary(session, job_id="j", since=at(since), until=at(since + 3_600)))
               for since in (0, 3_600)]  # fmt: skip
    assert by_hour == [pytest.approx(1_000 / 3_600 / 2), pytest.approx(2 * 3_199.999999 / 3_600 / 2)]


def test_few_long_intervals_are_as_much_as_many_short_ones(session, lease):
    for number in range(1, 7):
        account_all(session, lease=lease, until=at(number * 100 * 3_600), spent=[WORK if number % 2 else AGAIN, REST])
    session.flush()
    wanted = plain(session)
    assert [roll(session, before=at(1e7), hours_max=250) for _ in range(3)] == [3, 2, 0]
    assert merge(session) > 0 and answers(session) == wanted
    for lone in session.scalars(select(IntervalRow).where(IntervalRow.rolled)):
        sums.take_back(session, lone.interval_id)
        lone.rolled = False
    session.flush()
    assert roll(session, before=at(1e7), hours_max=1) == 1, "one, however long it is"


def test_intervals_that_somebody_changes_now_are_summed_later(session, history, database):
    session.commit()
    row = session.scalars(select(IntervalRow).where(IntervalRow.cause == Cause.RECOMPUTE).with_for_update()).first()
    assert row is not None
    with database.sessions.begin() as other:
        assert roll(other, before=at(99_000)) == 2 * 4 - 2
    session.rollback()
    with database.sessions.begin() as other:
        assert roll(other, before=at(99_000)) == 2


def test_hours_begin_where_they_should():
    assert sums.hour_of(START) == sums.hour_from(START) == START
    micro = timedelta(microseconds=1)
    assert sums.hour_of(START + micro) == START and sums.hour_from(START + micro) == START + sums.HOUR
    assert sums.hour_of(START - micro) == START - sums.HOUR and sums.hour_from(START - micro) == START
