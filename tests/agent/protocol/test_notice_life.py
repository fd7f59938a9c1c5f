"""The life of a notice: what holds for everyone who has seen the same facts, in whatever order."""

from datetime import UTC, datetime, timedelta

from hypothesis import given
from hypothesis import strategies as st

from agent.protocol.notice_life import (
    DEADLINE_DRIFT,
    DRAIN,
    GOES_LATE,
    GRACE_AFTER_DEADLINE,
    WITHOUT_DEADLINE_LASTS,
    NoticePhase,
    Notices,
    bars_ranks,
    ends_utc,
    hear,
    is_open,
    merge,
    moves_jobs,
    phase,
    withdraw,
)
from agent.protocol.sync import NoticeFact, NoticeKind

NOON = datetime(2026, 11, 20, 12, 0, tzinfo=UTC)
AN_HOUR_S = 3_600


def at(seconds: float) -> datetime:
    return NOON + timedelta(seconds=seconds)


def notice(deadline_s: float | None = 120, *, seen_s: float = 0, withdrawn_s: float | None = None) -> NoticeFact:
    return NoticeFact(
        node_id="a",
        kind=NoticeKind.INTERRUPTION,
        source="aws-imds",
        deadline_utc=None if deadline_s is None else at(deadline_s),
        first_seen_utc=at(seen_s),
        withdrawn_utc=None if withdrawn_s is None else at(withdrawn_s),
    )


seconds = st.integers(0, AN_HOUR_S)
maybe_seconds = st.none() | seconds
facts = st.builds(
    lambda node, source, deadline_s, seen_s, withdrawn_s: notice(
        deadline_s, seen_s=seen_s, withdrawn_s=withdrawn_s
    ).model_copy(update={"node_id": node, "source": source}),
    st.sampled_from("ab"),
    st.sampled_from(("aws-imds", "drain")),
    maybe_seconds,
    st.sampled_from((0, 60, 600)),
    maybe_seconds,
)


@given(st.lists(facts, max_size=8), st.lists(seconds, min_size=1, max_size=4), st.randoms())
def test_whoever_has_seen_the_same_facts_agrees_at_every_moment(seen, moments, random) -> None:
    """In another order, with repetitions, and whenever each of them forgets what is over."""
    shuffled = [*seen, *random.choices(seen, k=len(seen))] if seen else []
    random.shuffle(shuffled)
    one, other = Notices(seen), Notices()
    for number, fact in enumerate(shuffled):
        other.take(fact)
        if number % 2:
            other.drop_ended(NOON)
    for moment in sorted(moments):
        now = at(moment)
        assert set(one.moving(now)) == set(other.moving(now))
        assert one.barred(now) == other.barred(now)
        one.drop_ended(now)
        for fact in shuffled:
            one.take(fact)  # What arrives late brings nothing back.


@given(facts, facts, facts)
def test_facts_merge_in_any_order_with_one_result(a, b, c) -> None:
    a, b, c = (item.model_copy(update={"node_id": "a", "source": "x"}) for item in (a, b, c))
    assert merge(merge(a, b), c) == merge(a, merge(b, c)) == merge(c, merge(b, a))
    assert merge(a, a) == a


@given(facts, facts, seconds)
def test_a_withdrawn_or_past_notice_never_moves_a_job(fact, more, moment) -> None:
    now = at(moment)
    known = Notices([fact, more])
    moving = set(known.moving(now))
    assert not any(item.withdrawn_utc is not None or now >= ends_utc(item) for item in moving)
    assert {item.node_id for item in moving} <= known.barred(now)


@given(st.lists(st.tuples(st.sampled_from(("announce", "nothing")), st.integers(1, 900)), max_size=12))
def test_a_notice_heard_anew_moves_jobs_again_whatever_came_before(reads) -> None:
    """A source that announces two minutes ahead, or nothing, is read at odd times; then once more after nothing."""
    known, now = None, NOON
    told = Notices()
    for said, later_s in [*reads, ("nothing", 1), ("announce", 1)]:
        now += timedelta(seconds=later_s)
        if said == "nothing":
            fact = withdraw(known, now) if known is not None else None
        else:
            fresh = notice().model_copy(update={"first_seen_utc": now, "deadline_utc": now + timedelta(seconds=120)})
            fact = hear(known, fresh)
        if fact is not None:
            known = fact
            told.take(fact)
    assert [item.first_seen_utc for item in told.moving(now)] == [now]


def test_a_notice_moves_jobs_until_shortly_after_its_deadline_bars_ranks_for_a_while_and_is_then_over() -> None:
    late_s, grace_s = GOES_LATE.total_seconds(), GRACE_AFTER_DEADLINE.total_seconds()
    steps = [(0, NoticePhase.HEARD), (120 + late_s - 1, NoticePhase.HEARD), (120 + late_s, NoticePhase.DUE)]
    steps += [(120 + grace_s - 1, NoticePhase.DUE), (120 + grace_s, NoticePhase.OVER)]
    assert [phase(notice(), at(moment)) for moment, _ in steps] == [expected for _, expected in steps]
    assert [moves_jobs(notice(), at(moment)) for moment, _ in steps] == [True, True, False, False, False]
    assert [bars_ranks(notice(), at(moment)) for moment, _ in steps] == [True, True, True, True, False]


def test_a_notice_that_is_first_seen_at_its_deadline_or_after_it_still_moves_jobs_for_a_moment() -> None:
    hibernation = notice(100, seen_s=100)
    assert phase(hibernation, at(100)) is NoticePhase.HEARD
    seen_late, late_s = notice(100, seen_s=150), GOES_LATE.total_seconds()
    assert phase(seen_late, at(150 + late_s - 1)) is NoticePhase.HEARD
    assert phase(seen_late, at(150 + late_s)) is NoticePhase.DUE
    assert phase(notice(100, seen_s=100 + 2 * AN_HOUR_S), at(100 + 2 * AN_HOUR_S)) is NoticePhase.OVER


def test_a_notice_without_a_deadline_lasts_ten_minutes() -> None:
    lasts_s = WITHOUT_DEADLINE_LASTS.total_seconds()
    assert is_open(notice(None), at(lasts_s - 1)) and not is_open(notice(None), at(lasts_s))


def test_a_drained_node_is_barred_until_that_is_withdrawn_but_jobs_are_moved_only_until_its_time() -> None:
    drain = notice(120).model_copy(update={"source": DRAIN})
    a_year = at(365 * 24 * AN_HOUR_S)
    assert (phase(drain, at(60)), phase(drain, a_year)) == (NoticePhase.HEARD, NoticePhase.DUE)
    assert bars_ranks(drain, a_year) and not moves_jobs(drain, a_year)
    known = Notices([drain])
    known.drop_ended(a_year)
    assert known.all() == (drain,)
    undone = withdraw(drain, a_year)
    known.take(undone)
    assert ends_utc(undone) == a_year + GRACE_AFTER_DEADLINE, "so that every agent hears of it"
    known.drop_ended(a_year)
    assert known.all() == (undone,)
    known.drop_ended(ends_utc(undone))
    assert known.all() == ()


def test_advice_moves_nobody_and_bars_nothing() -> None:
    advice = notice().model_copy(update={"kind": NoticeKind.REBALANCE})
    assert is_open(advice, NOON)
    assert not moves_jobs(advice, NOON) and not bars_ranks(advice, NOON)


def test_a_nearer_deadline_is_news_and_a_later_one_or_one_that_drifts_is_none() -> None:
    drift_s = DEADLINE_DRIFT.total_seconds()
    assert hear(notice(120), notice(120 - drift_s, seen_s=5)) is None
    assert hear(notice(120), notice(300, seen_s=5)) is None
    assert hear(notice(120), notice(None, seen_s=5)) is None
    assert hear(notice(120), notice(60, seen_s=5)) == notice(60)
    assert hear(notice(None), notice(60, seen_s=5)) == notice(60)


def test_a_deadline_to_come_after_one_that_has_passed_is_another_notice() -> None:
    assert hear(notice(120), notice(300, seen_s=119)) is None
    assert hear(notice(120), notice(300, seen_s=120)) == notice(300, seen_s=120)
    assert hear(notice(120), notice(200, seen_s=250)) is None, "this one has passed too"


def test_another_notice_has_another_name_also_where_the_clock_was_set_back() -> None:
    withdrawn = withdraw(notice(120, seen_s=50), at(60))
    again = hear(withdrawn, notice(120, seen_s=10))
    assert again is not None and again.first_seen_utc > withdrawn.first_seen_utc
    known = Notices([withdrawn, again])
    assert known.moving(at(61)) == (again,)


def test_what_is_over_is_forgotten_and_a_late_copy_does_not_bring_it_back() -> None:
    known = Notices([notice(3_000), notice(120)])
    known.drop_ended(at(299))
    assert known.all() == (notice(120),)
    known.drop_ended(at(300))
    assert known.all() == ()
    assert known.take(notice(3_000)) is None
    assert known.take(notice(3_000, seen_s=1)) == notice(3_000, seen_s=1)
    assert known.all() == (notice(3_000, seen_s=1),)


def test_of_two_withdrawals_of_one_notice_the_first_counts() -> None:
    """The service withdraws it as soon as it hears that nothing is announced, and the agent says so too."""
    early, late = notice(withdrawn_s=20), notice(withdrawn_s=30)
    assert merge(early, late) == merge(late, early) == early


def test_of_too_many_notices_the_oldest_go() -> None:
    many = [notice().model_copy(update={"node_id": f"n{number}"}) for number in range(5)]
    assert Notices(many, most=3).all() == tuple(many[2:])
