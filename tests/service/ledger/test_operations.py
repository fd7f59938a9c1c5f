"""What is written to the ledger, and what its sums come to."""

from decimal import Decimal

import pytest
from sqlalchemy import select
from sqlalchemy.orm import Session

from service.leases.operations import begin_lease
from service.leases.tables import LeaseRow, PoolPriceRow
from service.ledger.operations import account_all, charge_pause, close_lease, open_leases, recast, recast_slots
from service.ledger.queries import CauseSum, goodput, summary
from service.ledger.rules import Part, Spent
from service.ledger.tables import Cause, IntervalRow
from tests.service.ledger.conftest import START, at, leased

WORK = Spent(Cause.PRODUCTIVE, "j", 1)


def intervals(session: Session, slot: int = 0) -> list[tuple[str, str | None, int | None, float, float]]:
    """Cause, job, generation, first and last second of each interval of a slot. The chain is checked on the way."""
    session.flush()
    session.expire_all()
    rows = session.scalars(select(IntervalRow).where(IntervalRow.slot == slot).order_by(IntervalRow.starts_at)).all()
    assert [row.follows for row in rows] == [None, *(row.ends_at for row in rows)][: len(rows)]
    return [
        (row.cause, row.job_id, row.generation, (row.starts_at - START).total_seconds(),
         (row.ends_at - START).total_seconds())
        for row in rows
    ]  # fmt: skip


def test_a_slots_time_begins_with_its_lease_and_grows_while_the_cause_stays(session: Session, lease: LeaseRow) -> None:
    for until_s in (5, 9):
        account_all(session, lease=lease, until=at(until_s), spent=[WORK])
    assert intervals(session) == [("productive", "j", 1, 0, 9)]


@pytest.mark.parametrize("spent", [Spent(Cause.IDLE, "j", 1), Spent(Cause.PRODUCTIVE), Spent(Cause.PRODUCTIVE, "j", 2)])
def test_another_cause_job_or_generation_begins_an_interval_where_the_last_one_ends(
    session: Session, lease: LeaseRow, spent: Spent
) -> None:
    account_all(session, lease=lease, until=at(5), spent=[WORK])
    account_all(session, lease=lease, until=at(7), spent=[spent])
    assert intervals(session) == [("productive", "j", 1, 0, 5), (spent.cause, spent.job_id, spent.generation, 5, 7)]


@pytest.mark.parametrize("until_s", [-1, 3, 5])
def test_time_that_is_accounted_already_is_not_accounted_again(
    session: Session, lease: LeaseRow, until_s: float
) -> None:
    account_all(session, lease=lease, until=at(5), spent=[WORK])
    for spent in (WORK, Spent(Cause.LOST)):
        account_all(session, lease=lease, until=at(until_s), spent=[spent])
    assert intervals(session) == [("productive", "j", 1, 0, 5)]


def test_no_time_has_passed_at_the_very_begin_of_a_lease(session: Session, lease: LeaseRow) -> None:
    account_all(session, lease=lease, until=START, spent=[WORK])
    assert intervals(session) == []


def test_all_slots_of_a_lease_are_accounted_each_by_its_own_cause(session: Session, lease: LeaseRow) -> None:
    account_all(session, lease=lease, until=at(4), spent=[WORK, Spent(Cause.IDLE)])
    account_all(session, lease=lease, until=at(6), spent=[WORK, WORK])
    assert intervals(session, 0) == [("productive", "j", 1, 0, 6)]
    assert intervals(session, 1) == [("idle", None, None, 0, 4), ("productive", "j", 1, 4, 6)]


def test_a_slot_that_has_grown_already_is_not_accounted_twice(session: Session, lease: LeaseRow, monkeypatch) -> None:
    """Nearly all only grow, in one statement for all slots."""
    account_all(session, lease=lease, until=at(4), spent=[WORK, WORK])
    alone = []
    monkeypatch.setattr("service.ledger.operations._continue", lambda *_, slot, **__: alone.append(slot))
    account_all(session, lease=lease, until=at(6), spent=[WORK, Spent(Cause.IDLE)])
    assert alone == [1]


def test_a_pause_takes_the_end_of_the_productive_time(session: Session, lease: LeaseRow) -> None:
    account_all(session, lease=lease, until=at(10), spent=[WORK])
    assert charge_pause(session, lease=lease, slot=0, seconds=0.5, job_id="j") == 0.5
    assert intervals(session) == [("productive", "j", 1, 0, 9.5), ("pause", "j", 1, 9.5, 10)]


@pytest.mark.parametrize("seconds", [10, 10.5])
def test_a_pause_as_long_as_the_interval_takes_all_of_it_and_no_more(
    session: Session, lease: LeaseRow, seconds: float
) -> None:
    account_all(session, lease=lease, until=at(10), spent=[WORK])
    assert charge_pause(session, lease=lease, slot=0, seconds=seconds, job_id="j") == 10
    assert intervals(session) == [("pause", "j", 1, 0, 10)]


def test_a_pause_goes_on_in_the_intervals_before_and_jumps_over_one_that_is_a_pause_already(
    session: Session, lease: LeaseRow
) -> None:
    for until_s, spent in ((4, WORK), (6, Spent(Cause.PAUSE, "j", 1)), (7, Spent(Cause.PRODUCTIVE, "j", 2))):
        account_all(session, lease=lease, until=at(until_s), spent=[spent])
    assert charge_pause(session, lease=lease, slot=0, seconds=1.5, job_id="j") == 1.5
    assert intervals(session) == [
        ("productive", "j", 1, 0, 3.5), ("pause", "j", 1, 3.5, 4), ("pause", "j", 1, 4, 6), ("pause", "j", 2, 6, 7),
    ]  # fmt: skip


def test_no_seconds_and_another_jobs_time_give_no_pause(session: Session, lease: LeaseRow) -> None:
    account_all(session, lease=lease, until=at(10), spent=[WORK])
    assert charge_pause(session, lease=lease, slot=0, seconds=0, job_id="j") == 0
    assert charge_pause(session, lease=lease, slot=0, seconds=1, job_id="another") == 0
    assert intervals(session) == [("productive", "j", 1, 0, 10)]


def test_a_pause_for_which_there_is_no_time_yet_is_charged_to_what_the_slot_does_next(
    session: Session, lease: LeaseRow
) -> None:
    """A newcomer may report later than the others, and a pause may be longer than what it has worked."""
    account_all(session, lease=lease, until=at(1), spent=[WORK])
    assert charge_pause(session, lease=lease, slot=0, seconds=2.5, job_id="j") == 1
    assert charge_pause(session, lease=lease, slot=0, seconds=1, job_id="j") == 0
    account_all(session, lease=lease, until=at(2), spent=[WORK])
    account_all(session, lease=lease, until=at(3), spent=[Spent(Cause.IDLE)])
    account_all(session, lease=lease, until=at(9), spent=[WORK])
    pauses = [(start, end) for cause, _, _, start, end in intervals(session) if cause == "pause"]
    assert pauses == [(0, 1), (1, 2), (7.5, 9)]
    account_all(session, lease=lease, until=at(20), spent=[WORK])
    assert intervals(session)[-1] == ("productive", "j", 1, 9, 20)


def test_a_pause_that_is_reported_when_the_slot_is_idle_again_is_charged_to_what_it_did(
    session: Session, lease: LeaseRow
) -> None:
    for until_s, spent in ((4, WORK), (6, Spent(Cause.IDLE))):
        account_all(session, lease=lease, until=at(until_s), spent=[spent])
    assert charge_pause(session, lease=lease, slot=0, seconds=1.5, job_id="j") == 1.5
    assert intervals(session) == [
        ("productive", "j", 1, 0, 2.5), ("pause", "j", 1, 2.5, 4), ("idle", None, None, 4, 6)
    ]  # fmt: skip


def test_only_time_in_which_ranks_worked_gives_a_pause(session: Session, lease: LeaseRow) -> None:
    account_all(session, lease=lease, until=at(10), spent=[Spent(cause, "j", 1) for cause in Cause])
    for slot, cause in enumerate(Cause):
        found = charge_pause(session, lease=lease, slot=slot, seconds=1, job_id="j")
        assert found == (cause in (Cause.PRODUCTIVE, Cause.RECOMPUTE, Cause.BOOTSTRAP)), cause


def test_slots_of_a_node_are_recast_each_by_what_it_did(session: Session) -> None:
    wide = begin_lease(session, node_id="b", provider="none", pool="q", slots=3, now=START)
    account_all(session, lease=wide, until=at(10), spent=[WORK, WORK, WORK])
    session.flush()
    again = [Part(at(2), at(6), Spent(Cause.RECOMPUTE, "j", 2))]
    lost = [Part(at(0), at(10), Spent(Cause.LOST, "j", 2))]
    recast_slots(session, node_id="b", by_slot={0: again, 1: lost, 2: again})
    sums = {item.cause: item.slot_seconds for item in summary(session)}
    assert sums == {Cause.PRODUCTIVE: 12, Cause.RECOMPUTE: 8, Cause.LOST: 10}


def test_a_slot_is_recast_from_the_first_to_the_last_of_what_is_known(session: Session, lease: LeaseRow) -> None:
    account_all(session, lease=lease, until=at(7), spent=[WORK, Spent(Cause.IDLE)])
    account_all(session, lease=lease, until=at(10), spent=[Spent(Cause.BOOTSTRAP, "j", 1), Spent(Cause.IDLE)])
    session.flush()
    parts = [Part(at(2), at(6), Spent(Cause.RECOMPUTE, "j", 2)), Part(at(8), at(9), Spent(Cause.LOST, "j", 2))]
    recast(session, node_id="a", slots=[0], parts=parts)
    assert [(cause, begin, end) for cause, _, _, begin, end in intervals(session)] == [
        ("productive", 0, 2), ("recompute", 2, 6), ("productive", 6, 7),
        ("bootstrap", 7, 8), ("lost", 8, 9), ("bootstrap", 9, 10),
    ]  # fmt: skip


def test_the_open_leases_of_nodes_come_by_node_and_those_that_ended_do_not(session: Session, lease: LeaseRow) -> None:
    other = leased(session, "b", "q")
    account_all(session, lease=lease, until=at(5), spent=[WORK, Spent(Cause.IDLE)])
    session.flush()
    found = open_leases(session, ["a", "b", "c"])
    assert {name: (each.pool, each.slots, each.owes) for name, each in found.items()} == {
        "a": ("p", 2, False), "b": ("q", 2, False),
    }  # fmt: skip
    assert [(tail.starts_at, tail.ends_at, tail.spent) for tail in found["a"].tails] == [
        (at(0), at(5), WORK), (at(0), at(5), Spent(Cause.IDLE)),
    ]  # fmt: skip
    close_lease(session, lease=other, at=at(5), spent=[WORK, WORK], reason="gone")
    session.flush()
    assert open_leases(session, ["a", "b"]).keys() == {"a"}


def test_sums_are_by_cause_with_the_price_that_held_when_an_interval_began(session: Session, lease: LeaseRow) -> None:
    """Two slots share the price of their node; a pool without a price costs nothing. Without a price on demand nothing
    says what was saved."""
    for since_s, price in ((0, 3.6), (10, 36.0)):
        session.add(PoolPriceRow(pool="p", effective_from=at(since_s), price_usd_per_hour=price))
    other = leased(session, "b", "q")
    account_all(session, lease=lease, until=at(10), spent=[WORK])
    account_all(session, lease=lease, until=at(14), spent=[Spent(Cause.IDLE)])
    account_all(session, lease=other, until=at(5), spent=[WORK])
    session.flush()
    idle = CauseSum(Cause.IDLE, 4, 4 * 0.01 / 2, uncompared=4)
    assert list(summary(session)) == [CauseSum(Cause.PRODUCTIVE, 15, 10 * 0.001 / 2, unpriced=5, uncompared=15), idle]
    assert [item.slot_seconds for item in summary(session, job_id="j")] == [15]
    assert [item.slot_seconds for item in summary(session, since=at(8), until=at(13))] == [2, 3]


def test_an_interval_is_priced_slice_by_slice_where_the_price_changes(session: Session, lease: LeaseRow) -> None:
    """One that grows for days had the price of its begin for all of them."""
    for since_s, price in ((-50, "7.2"), (4, "0"), (7, "1.1"), (100, "9")):
        session.add(PoolPriceRow(pool="p", effective_from=at(since_s), price_usd_per_hour=Decimal(price)))
    account_all(session, lease=lease, until=at(10), spent=[WORK, WORK])
    whole = (4 * 7.2 + 3 * 0 + 3 * 1.1) / 3600
    assert [item.dollars for item in summary(session)] == [pytest.approx(whole, rel=1e-12)]
    part = (1 * 7.2 + 3 * 0 + 1 * 1.1) / 3600
    assert [item.dollars for item in summary(session, since=at(3), until=at(8))] == [pytest.approx(part, rel=1e-12)]


def test_the_first_price_of_a_pool_also_counts_for_the_time_before_it(session: Session, lease: LeaseRow) -> None:
    session.add(PoolPriceRow(pool="p", effective_from=at(8), price_usd_per_hour=Decimal(36)))
    account_all(session, lease=lease, until=at(10), spent=[WORK, WORK])
    assert [(item.dollars, item.unpriced) for item in summary(session)] == [(pytest.approx(0.1), 0.0)]


def test_goodput_is_the_productive_share_of_all_time() -> None:
    sums = [CauseSum(Cause.PRODUCTIVE, 30.0, 1.0), CauseSum(Cause.PAUSE, 6.0, 1.0), CauseSum(Cause.LOST, 4.0, 1.0)]
    assert goodput(sums) == 0.75
    assert goodput(sums[1:]) == 0.0
    assert goodput([]) is None
    assert goodput([CauseSum(Cause.PRODUCTIVE, 0.5, 1.0)]) == 1.0
