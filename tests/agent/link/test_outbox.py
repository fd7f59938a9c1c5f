"""Facts wait until they are acknowledged, and not for ever more of them."""

from datetime import UTC, datetime
from pathlib import Path

from agent.link.log_shipper import BYTES_PER_REPORT_MAX, LogFile, LogShipper
from agent.link.outbox import SHARE_LEAST, Outbox, Queue
from agent.protocol.sync import LOG_CHUNK_CHARS_MAX, NoticeFact, NoticeKind, StepRow


def step(number: int) -> StepRow:
    return StepRow(job_id="j", generation=1, step=number, seconds=1.0, finished_utc=datetime(2026, 1, 1, tzinfo=UTC))


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


def test_after_a_report_that_was_refused_whole_the_next_one_holds_half_and_nothing_is_lost() -> None:
    outbox = Outbox()
    for number in range(4):
        outbox.steps.put(number, step(number))
    assert len(outbox.steps.batch(1, outbox.share)) == 4
    outbox.take_back(1)
    assert outbox.share == 0.5
    for _ in range(20):
        outbox.take_back(2)
    assert outbox.share == SHARE_LEAST
    assert [row.step for row in outbox.steps.batch(3, outbox.share)] == [0]
    outbox.acknowledge(3)
    assert outbox.share == 2 * SHARE_LEAST
    assert [row.step for row in outbox.steps.batch(4)] == [1, 2, 3]


def test_orders_that_acknowledge_nothing_new_do_not_make_the_report_larger_that_was_too_large() -> None:
    outbox = Outbox()
    assert outbox.acknowledge(1)
    outbox.take_back(2)
    assert not outbox.acknowledge(1)
    assert outbox.share == 0.5
    assert outbox.acknowledge(3) and outbox.share == 1.0


def test_logs_are_cut_to_a_share_but_never_to_nothing(tmp_path: Path) -> None:
    log = tmp_path / "rank.log"
    log.write_text("x" * 400_000)
    shipper, files = LogShipper(tmp_path), [LogFile(str(log), "j", 1, 0)]
    whole, half, least = (sum(len(piece.text) for piece in shipper.pieces(files, 1, share)) for share in (1, 0.5, 0))
    assert (whole, half, least) == (400_000, BYTES_PER_REPORT_MAX // 2, LOG_CHUNK_CHARS_MAX)
