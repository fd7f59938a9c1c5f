"""Facts wait until they are acknowledged, and not for ever more of them."""

from datetime import UTC, datetime
from pathlib import Path

from agent.link.log_shipper import LogFile, LogShipper
from agent.link.outbox import Outbox, Queue
from agent.protocol.sync import NoticeFact, NoticeKind


def test_a_fact_is_sent_again_until_its_report_is_acknowledged() -> None:
    queue: Queue[str] = Queue("facts", 10, 10)
    queue.put("a", "one")
    assert queue.batch(1) == ("one",)
    assert queue.batch(2) == ("one",)
    queue.acknowledge(2)
    assert queue.batch(3) == ()


def test_an_acknowledged_fact_that_changed_meanwhile_is_sent_again() -> None:
    queue: Queue[str] = Queue("facts", 10, 10)
    queue.put("a", "one")
    queue.batch(1)
    queue.put("a", "two")
    queue.acknowledge(1)
    assert queue.batch(2) == ("two",)


def test_a_report_holds_only_so_many_and_the_rest_follows() -> None:
    queue: Queue[int] = Queue("facts", 10, 2)
    for number in range(5):
        queue.put(number, number)
    assert queue.batch(1) == (0, 1)
    queue.acknowledge(1)
    assert queue.batch(2) == (2, 3)


def test_the_oldest_facts_go_when_too_many_wait_and_it_is_counted() -> None:
    queue: Queue[int] = Queue("facts", 3, 10)
    for number in range(5):
        queue.put(number, number)
    assert queue.batch(1) == (2, 3, 4)
    assert queue.dropped == 2


def test_a_notice_with_an_earlier_deadline_replaces_the_later_one() -> None:
    outbox = Outbox()
    for minute in (5, 3):
        moment = datetime(2026, 11, 20, 12, minute, tzinfo=UTC)
        outbox.put_notice(
            NoticeFact(
                node_id="a", kind=NoticeKind.INTERRUPTION, source="x", deadline_utc=moment, first_seen_utc=moment
            )
        )
    assert [fact.deadline_utc for fact in outbox.notices.batch(1)] == [datetime(2026, 11, 20, 12, 3, tzinfo=UTC)]


def test_log_pieces_go_on_where_the_service_acknowledged_also_in_the_next_agent(tmp_path: Path) -> None:
    log = tmp_path / "rank.log"
    log.write_text("first\n")
    file = LogFile(str(log), "job", 1, 0)
    shipper = LogShipper(tmp_path)
    assert [chunk.text for chunk in shipper.pieces([file], 1)] == ["first\n"]
    assert [chunk.text for chunk in shipper.pieces([file], 2)] == ["first\n"]
    shipper.acknowledge(2)
    with log.open("a") as writer:
        writer.write("second\n")
    (chunk,) = LogShipper(tmp_path).pieces([file], 1)
    assert (chunk.offset, chunk.text) == (6, "second\n")
