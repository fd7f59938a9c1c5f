"""Logs stay bounded and are read in whole characters; the watchdog names a rank that hangs."""

from pathlib import Path

from agent.protocol.rank import LAST_SAID, Checkpointed, Finished, StepReport
from agent.supervisor.logs import (
    LAST_SAID_BYTES_MAX,
    LogPosition,
    cut_if_grown,
    read_chunk,
    read_last_line,
    read_last_said,
)
from agent.supervisor.watchdog import RankPulse


def read_all(path: Path, position: LogPosition, bytes_max: int = 7) -> tuple[str, LogPosition]:
    text = ""
    while chunk := read_chunk(path, position, bytes_max):
        start, piece, position = chunk
        assert start.char <= position.char
        text += piece
    return text, position


def test_pieces_put_together_are_the_log_also_across_wide_characters(tmp_path: Path) -> None:
    path = tmp_path / "rank.log"
    path.write_text("loss ↓ 1.25 — naïve 🙂 done\n" * 5)
    text, position = read_all(path, LogPosition())
    assert text == path.read_text()
    assert position == LogPosition(len(text.encode()), len(text))


def test_bytes_that_are_no_text_become_replacement_characters(tmp_path: Path) -> None:
    path = tmp_path / "rank.log"
    path.write_bytes(b"a\xff\xfe\x00b\n")
    assert read_all(path, LogPosition(), 64)[0] == "a\ufffd\ufffd\ufffdb\n"


def test_a_grown_log_is_cut_and_offsets_keep_their_meaning(tmp_path: Path) -> None:
    path = tmp_path / "rank.log"
    with path.open("ab", buffering=0) as writer:
        writer.write(b"x" * 100)
        _, position = read_all(path, LogPosition(), 64)
        assert not cut_if_grown(path, 100)
        writer.write(b"y" * 50)
        assert cut_if_grown(path, 100)
        writer.write(b"after\n")
    chunk = read_chunk(path, position, 1_000)
    assert chunk is not None
    start, text, _ = chunk
    assert start == LogPosition(150, 150)
    assert text.endswith("over its limit]\nafter\n")


def test_the_last_line_is_the_last_that_says_something(tmp_path: Path) -> None:
    path = tmp_path / "rank.log"
    assert read_last_line(path) == ""
    path.write_bytes(b"x" * 10_000 + b"\nTraceback\n  ValueError: \xff no\n\n \n")
    assert read_last_line(path) == "ValueError: \ufffd no"
    path.write_bytes(b"y" * 10_000)
    assert read_last_line(path) == "y" * 4_096


def test_the_facts_that_a_rank_ended_with_are_in_its_log(tmp_path: Path) -> None:
    path = tmp_path / "rank.log"
    assert read_last_said(path) == []
    facts = [Checkpointed(path="/checkpoints/7", step=7), Finished(step=8)]
    lines = [f"{LAST_SAID}{fact.model_dump_json()}" for fact in facts]
    forged = [
        f"{LAST_SAID}{{}}",
        f"{LAST_SAID}no json",
        f"{LAST_SAID}{StepReport(generation=1, step=9, seconds=1.0).model_dump_json()}",
    ]
    path.write_text("\n".join(["x" * LAST_SAID_BYTES_MAX, lines[0], *forged, f"said: {lines[1]}", lines[1], ""]))
    assert read_last_said(path) == facts


def test_a_log_that_is_not_there_yet_has_nothing_new(tmp_path: Path) -> None:
    assert read_chunk(tmp_path / "none.log", LogPosition(), 10) is None


def test_a_rank_without_a_step_for_many_median_steps_is_named_with_its_numbers() -> None:
    pulse = RankPulse(started_at=0.0)
    for step in range(1, 6):
        pulse.stepped(10.0 * step, step, 2.0)
    assert pulse.hang_reason(50.0 + 39.0) == ""
    assert pulse.hang_reason(50.0 + 41.0) == (
        "no step after step 5 and no report for 41 s; limit 40 s at a median step of 2.00 s"
    )


def test_a_rank_that_has_not_stepped_yet_gets_more_time() -> None:
    pulse = RankPulse(started_at=0.0)
    assert pulse.hang_reason(299.0) == ""
    assert "no first step" in pulse.hang_reason(301.0)
