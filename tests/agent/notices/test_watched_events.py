"""Planned events of one source, each with its id, and announcements that outlast the time they name."""

from datetime import timedelta

from agent.notices.source import Announced, Announcement, Nothing, Unknown
from agent.protocol.notice_life import GRACE_AFTER_DEADLINE, MOVED_LEAST
from agent.protocol.sync import NoticeKind
from tests.agent.notices.test_watcher import NOON, Watched, interruption

OVER_S = GRACE_AFTER_DEADLINE.total_seconds()


def planned(event_id: str, in_s: float, kind: NoticeKind = NoticeKind.MAINTENANCE) -> Announcement:
    return Announcement(kind, NOON + timedelta(seconds=in_s), "raw", event_id=event_id)


def test_of_two_events_each_is_told_and_the_end_of_one_takes_back_only_that() -> None:
    watched = Watched()
    told = watched.see(Announced((planned("a", 300), planned("b", 400))))
    assert [(fact.event_id, fact.withdrawn_utc) for fact in told] == [("a", None), ("b", None)]
    assert watched.see(Announced((planned("b", 400), planned("a", 300))), at_s=1) == []
    (fact,) = watched.see(Announced((planned("b", 400),)), at_s=2)
    assert fact.event_id == "a" and fact.withdrawn_utc is not None
    again = Watched(known=watched.facts[1:])
    assert [fact.event_id for fact in again.see(Nothing(), at_s=3)] == ["b"], "as its journal kept them"


def test_an_event_that_is_moved_is_told_with_its_new_time_and_a_later_end_of_a_warning_is_not() -> None:
    watched = Watched()
    watched.see(Announced((planned("a", 300), interruption(120))))
    jump_s = MOVED_LEAST.total_seconds()
    assert watched.see(Announced((planned("a", 300 + jump_s), interruption(120 + 2 * jump_s))), at_s=1) == []
    for at_s, in_s in ((2, 301 + jump_s), (3, 250)):
        (fact,) = watched.see(Announced((planned("a", in_s), interruption(120))), at_s=at_s)
        assert (fact.event_id, fact.deadline_utc) == ("a", NOON + timedelta(seconds=in_s))


def test_what_is_still_announced_long_after_the_time_that_it_names_is_overdue() -> None:
    watched = Watched()
    for at_s, announces, overdue in ((0, 1, 0), (119 + OVER_S, 1, 0), (120 + OVER_S, 0, 1)):
        watched.see(Announced((interruption(120),)), at_s=at_s)
        assert (len(watched.watcher.health.announces), len(watched.watcher.health.overdue)) == (announces, overdue)
    watched.see(Unknown("answered 500"), at_s=500)
    assert watched.watcher.health.overdue == (NoticeKind.INTERRUPTION,)
    watched.see(Announced((interruption(120), planned("a", 900))), at_s=600)
    assert watched.watcher.health.announces == (NoticeKind.MAINTENANCE,)
    watched.see(Nothing(), at_s=601)
    assert watched.watcher.health.announces == watched.watcher.health.overdue == ()


def test_an_old_time_that_a_new_agent_finds_is_overdue_at_once_and_no_time_never() -> None:
    watched = Watched()
    watched.see(Announced((interruption(-7_200), Announcement(NoticeKind.MAINTENANCE, None, "raw"))))
    assert watched.watcher.health.overdue == (NoticeKind.INTERRUPTION,)
    watched.see(Announced((interruption(-7_200), Announcement(NoticeKind.MAINTENANCE, None, "raw"))), at_s=7_200)
    assert watched.watcher.health.announces == (NoticeKind.MAINTENANCE,)
