"""How long ago, and how long yet."""

from datetime import UTC, datetime, timedelta

import pytest

from service.elapsed import ago, departure, due, span

NOW = datetime(2026, 1, 1, 12, 0, 0, tzinfo=UTC)


def at(seconds: float) -> datetime:
    return NOW + timedelta(seconds=seconds)


@pytest.mark.parametrize(
    ("duration_s", "text"),
    [
        (0, "0 s"), (0.4, "0 s"), (95, "95 s"), (119, "119 s"), (120, "2 min"), (3_600, "60 min"), (7_200, "2 h"),
        (86_400, "24 h"), (172_800, "2 d"), (1e7, "116 d"),
    ],
)  # fmt: skip
def test_a_length_of_time_has_one_unit(duration_s: float, text: str):
    assert span(duration_s) == text


def test_a_past_time_never_reads_like_one_to_come():
    assert due(at(-120), NOW) == "2 min ago"
    assert due(at(120), NOW) == "in 2 min"
    assert due(NOW, NOW) == "0 s ago"
    assert ago(at(-30), NOW) == "30 s ago"
    assert ago(at(2), NOW) == "now", "clocks differ a little"
    assert (ago(None, NOW), due(None, NOW)) == ("-", "-")


def test_a_time_may_be_text_as_the_api_says_it():
    assert due("2026-01-01T12:01:35Z", NOW) == "in 95 s"
    assert ago("2026-01-01T13:00:00+02:00", NOW) == "60 min ago"


@pytest.mark.parametrize(
    ("deadline", "is_gone", "text"),
    [
        (at(95), False, "goes in 95 s"),
        (at(-95), False, "was due 95 s ago"),
        (at(-95), True, "went 95 s ago"),
        (at(95), True, "gone, was due in 95 s"),
        (None, False, "goes, time unknown"),
        (None, True, "gone"),
    ],
)
def test_a_node_that_was_announced_to_go_goes_is_due_or_went(deadline: datetime | None, is_gone: bool, text: str):
    assert departure(deadline, NOW, is_gone=is_gone) == text
