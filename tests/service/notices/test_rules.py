"""What the service makes of notices."""

from datetime import UTC, datetime, timedelta

from agent.protocol.notice_life import is_open
from agent.protocol.sync import NoticeFact, NoticeKind, SourceHealth, SourceState
from service.notices.rules import earliest_deadline, horizon, takes_node, withdrawn_by

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
    assert withdrawn_by(source(name="drain"), (notice(120),), NOW) == ()
