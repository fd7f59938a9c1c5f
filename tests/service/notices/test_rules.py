"""When a notice counts."""

from datetime import UTC, datetime, timedelta

from agent.protocol.sync import NoticeKind
from service.notices.rules import Notice, earliest_deadline, is_open, takes_node

NOW = datetime(2026, 1, 1, tzinfo=UTC)


def notice(deadline_s: float | None, kind: NoticeKind = NoticeKind.INTERRUPTION) -> Notice:
    return Notice("a", kind, None if deadline_s is None else NOW + timedelta(seconds=deadline_s), NOW)


def test_a_notice_is_open_until_well_after_its_deadline():
    assert is_open(notice(120), now=NOW + timedelta(seconds=299), lease_open=True)
    assert not is_open(notice(120), now=NOW + timedelta(seconds=300), lease_open=True)


def test_a_notice_without_a_deadline_lasts_ten_minutes():
    assert is_open(notice(None), now=NOW + timedelta(seconds=599), lease_open=True)
    assert not is_open(notice(None), now=NOW + timedelta(seconds=600), lease_open=True)


def test_a_notice_says_nothing_about_the_nodes_next_life():
    assert not is_open(notice(120), now=NOW, lease_open=False)


def test_the_earliest_deadline_of_all_channels_counts():
    assert earliest_deadline((notice(120), notice(60), notice(None))) == NOW + timedelta(seconds=60)
    assert earliest_deadline((notice(None),)) is None


def test_advice_takes_no_node_away():
    assert takes_node(notice(1)) and takes_node(notice(1, NoticeKind.MAINTENANCE))
    assert not takes_node(notice(1, NoticeKind.REBALANCE))
