"""The notices of one lease, as they are told."""

from datetime import UTC, datetime, timedelta

from agent.protocol.sync import NoticeFact, NoticeKind
from service.notices.operations import LeaseNotices
from service.notices.rules import PEERS_SPEAK_AGAIN, PEERS_WORD_LASTS

NOW = datetime(2026, 1, 1, tzinfo=UTC)


def test_what_peers_say_anew_in_whatever_name_counts_no_longer_than_what_they_said_first() -> None:
    def tell(
        after: timedelta, source: str = "aws", kind: NoticeKind = NoticeKind.INTERRUPTION, told_in: str | None = "j"
    ) -> bool:
        at = NOW + after
        fact = NoticeFact(node_id="a", kind=kind, source=source, deadline_utc=None, first_seen_utc=at)
        notices.add(fact, lease_id=1, now=at, told_in=told_in)
        return fact in notices.known(at)

    notices = LeaseNotices()
    soon, late = PEERS_WORD_LASTS - timedelta(seconds=20), PEERS_WORD_LASTS + timedelta(seconds=20)
    assert tell(timedelta(0)) and tell(soon)
    assert not tell(late) and not tell(late, "other") and not tell(late, "third", kind=NoticeKind.MAINTENANCE)
    assert tell(late, kind=NoticeKind.REBALANCE), "advice takes no node"
    assert tell(late, "own", told_in=None), "the node itself is believed"
    assert tell(PEERS_SPEAK_AGAIN)
