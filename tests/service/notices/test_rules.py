"""What the service makes of notices."""

from datetime import UTC, datetime, timedelta
from itertools import permutations

import pytest

from agent.protocol.notice_life import DRAIN, NoticePhase, is_open
from agent.protocol.sync import NoticeFact, NoticeKind, SourceHealth, SourceState
from service.notices.rules import (
    AWS_QUEUE,
    earliest_deadline,
    gives_way,
    horizon,
    is_urgent,
    phase_of_all,
    same_loss,
    takes_node,
    withdrawn_by,
)

NOW = datetime(2026, 1, 1, tzinfo=UTC)


def notice(deadline_s: float | None, kind: NoticeKind = NoticeKind.INTERRUPTION) -> NoticeFact:
    deadline = None if deadline_s is None else NOW + timedelta(seconds=deadline_s)
    return NoticeFact(node_id="a", kind=kind, source="aws-imds", deadline_utc=deadline, first_seen_utc=NOW)


def source(state: SourceState = SourceState.WATCHING, *announces: NoticeKind, name: str = "aws-imds") -> SourceHealth:
    return SourceHealth(source=name, state=state, since_utc=NOW, announces=announces)


def test_a_notice_is_open_until_well_after_its_deadline():
    assert is_open(notice(120), NOW + timedelta(seconds=299))
    assert not is_open(notice(120), NOW + timedelta(seconds=300))


def test_a_notice_without_a_deadline_lasts_ten_minutes():
    assert is_open(notice(None), NOW + timedelta(seconds=599))
    assert not is_open(notice(None), NOW + timedelta(seconds=600))


def test_what_is_behind_the_horizon_is_over():
    for fact in (notice(0), notice(None)):
        later = NOW + timedelta(seconds=600)
        assert fact.first_seen_utc <= horizon(later)
        assert not is_open(fact, later)


def test_the_earliest_deadline_of_all_channels_counts():
    assert earliest_deadline((notice(120), notice(60), notice(None))) == NOW + timedelta(seconds=60)
    assert earliest_deadline((notice(None),)) is None


def test_advice_takes_no_node_away():
    assert takes_node(NoticeKind.INTERRUPTION) and takes_node(NoticeKind.MAINTENANCE)
    assert not takes_node(NoticeKind.REBALANCE)


def test_a_source_that_is_read_and_does_not_announce_a_known_notice_withdraws_it():
    known, now = (notice(120), notice(None, NoticeKind.REBALANCE)), NOW + timedelta(seconds=30)
    withdrawn = withdrawn_by(source(SourceState.WATCHING, NoticeKind.REBALANCE), known, now)
    assert [(fact.kind, fact.withdrawn_utc) for fact in withdrawn] == [(NoticeKind.INTERRUPTION, now)]
    assert withdrawn_by(source(), withdrawn, now) == ()


def test_a_source_that_cannot_be_read_and_another_one_withdraw_nothing():
    assert withdrawn_by(source(SourceState.UNKNOWN), (notice(120),), NOW) == ()
    assert withdrawn_by(source(SourceState.STARTING), (notice(120),), NOW) == ()
    for name in ("drain", "aws-a", "aws-imd", "zzz"):
        assert withdrawn_by(source(name=name), (notice(120),), NOW) == ()


ADVICE = NoticeKind.REBALANCE


def heard(
    deadline_s: float | None = None,
    first_s: float = 0.0,
    *,
    kind: NoticeKind = NoticeKind.INTERRUPTION,
    source: str = "aws-imds",
    withdrawn: bool = False,
) -> NoticeFact:
    return NoticeFact(
        node_id="a",
        kind=kind,
        source=source,
        deadline_utc=None if deadline_s is None else NOW + timedelta(seconds=deadline_s),
        first_seen_utc=NOW + timedelta(seconds=first_s),
        withdrawn_utc=NOW + timedelta(seconds=first_s) if withdrawn else None,
    )


def many(*others: NoticeFact, count: int = 64) -> list[NoticeFact]:
    """So many notices in all, of which those that are not `others` have deadlines from 100 s on."""
    filled = [heard(100 + at, source=f"s{at}") for at in range(count - len(others))]
    return [*filled[:9], *others, *filled[9:]]


def test_what_is_behind_the_horizon_was_heard_ten_minutes_ago():
    assert horizon(NOW) == NOW - timedelta(seconds=600)


def test_of_64_notices_of_a_lease_the_one_that_is_due_last_makes_room_for_one_that_is_due_sooner():
    assert gives_way(many(count=63), heard(50), NOW) is None, "there is room"
    last = heard(163, source="s63")
    assert many()[-1] == last
    assert gives_way(many(), heard(50), NOW) == last
    assert gives_way(many(), heard(162.9), NOW) == last
    for deadline_s in (163, 200):
        assert gives_way(many(), heard(deadline_s), NOW) == heard(deadline_s)
    assert gives_way(many(), heard(999, source="s5"), NOW) is None, "it says more of one that is known"
    assert gives_way(many(), heard(999, source="s5", kind=NoticeKind.MAINTENANCE), NOW) is not None


def test_what_the_service_itself_was_told_takes_no_room_and_never_goes():
    for source in (DRAIN, AWS_QUEUE):
        told = heard(9_999, source=source)
        assert gives_way(many(told), heard(50), NOW) is None
        assert gives_way([told, *many()], heard(50), NOW) == heard(163, source="s63")


@pytest.mark.parametrize(
    "weaker",
    [
        # Advice, however near; what is due and only keeps new ranks away; what does not count any more.
        heard(1, kind=ADVICE),
        heard(-20, -100),
        heard(50, withdrawn=True),
        heard(-999, -1_200),
        # Without a time it lasts ten minutes.
        heard(None),
    ],
)
def test_what_matters_less_goes_first_however_near_it_is(weaker):
    assert gives_way(many(weaker), heard(500, source="new"), NOW) == weaker
    assert gives_way(many(), weaker, NOW) == weaker


def test_what_keeps_ranks_away_matters_more_than_advice_and_that_more_than_what_is_over():
    due, advice, over = heard(-20, -100, source="x"), heard(1, kind=ADVICE, source="y"), heard(1, withdrawn=True)
    assert gives_way(many(due, advice, over), heard(50, source="new"), NOW) == over
    assert gives_way(many(due, advice), heard(50, source="new"), NOW) == advice
    assert gives_way(many(due, advice), over, NOW) == over
    assert gives_way(many(due, over), advice, NOW) == over


DRAINED = heard(None, source=DRAIN)


@pytest.mark.parametrize(
    ("one", "other", "are_same"),
    [
        (heard(120), heard(120, source="other"), True),
        # Deadlines that differ by no more than three minutes.
        (heard(120), heard(300, source="other"), True),
        (heard(120), heard(300.1, source="other"), False),
        (heard(120), heard(120, kind=NoticeKind.MAINTENANCE), True),
        (heard(120), heard(120, kind=ADVICE), False),
        (heard(120, kind=ADVICE), heard(120, kind=ADVICE, source="other"), True),
        (heard(120), heard(120, source="other", withdrawn=True), False),
        (heard(120, withdrawn=True), heard(120, source="other", withdrawn=True), False),
        # What a person asks for is apart from what a cloud says.
        (DRAINED, heard(120), False),
        (DRAINED, heard(None, 5, source=DRAIN), True),
        # One of them says no time: it was heard before the other was over, ten minutes after it was first seen at
        # least, or three minutes after its deadline.
        (heard(None), heard(None, 599, source="other"), True),
        (heard(None), heard(None, 600, source="other"), False),
        (heard(None), heard(900, 599, source="other"), True),
        (heard(None), heard(900, 600, source="other"), False),
        (heard(10), heard(None, 599, source="other"), True),
        (heard(10), heard(None, 600, source="other"), False),
        (heard(1_000), heard(None, 1_179, source="other"), True),
        (heard(1_000), heard(None, 1_180, source="other"), False),
    ],
)
def test_which_notices_of_a_lease_announce_one_loss(one, other, are_same):
    assert same_loss(one, other) is same_loss(other, one) is are_same


@pytest.mark.parametrize(
    ("before", "after", "is_so"),
    [
        ((), (), False),
        ((), (heard(120),), True),
        ((heard(120),), (), True),
        ((heard(120),), (heard(120, withdrawn=True),), True),
        ((), (heard(120, kind=ADVICE),), False),
        ((heard(120),), (heard(120), heard(60, kind=ADVICE)), False),
        ((heard(120),), (heard(120), heard(120, source="other")), False),
        # Sooner by more than a second.
        ((heard(120),), (heard(119),), False),
        ((heard(120),), (heard(118.9),), True),
        ((heard(120),), (heard(300),), False),
        ((heard(120), heard(60, source="other")), (heard(120), heard(58, source="other")), True),
        # Without a time, ten minutes after it was first seen.
        ((heard(None),), (heard(599),), False),
        ((heard(None),), (heard(598.9),), True),
        ((heard(602, source="other"),), (heard(602, source="other"), heard(None)), True),
        ((heard(600.5, source="other"),), (heard(600.5, source="other"), heard(None)), False),
    ],
)
def test_agents_hear_at_once_of_what_has_jobs_leave_sooner_or_not_any_more(before, after, is_so):
    assert is_urgent(before, after, NOW) is is_so


def test_an_occurrence_stands_where_that_of_its_notices_does_that_counts_most():
    stands = {
        NoticePhase.HEARD: heard(60),
        NoticePhase.DUE: heard(-20, -100),
        NoticePhase.OVER: heard(-999, -1_200),
        NoticePhase.WITHDRAWN: heard(60, withdrawn=True),
    }
    order = list(stands)
    for at, expected in enumerate(order):
        for notices in permutations([stands[phase] for phase in order[at:]]):
            assert phase_of_all(notices, NOW) is expected
