"""What a person reads while the demo runs."""

import re
from datetime import UTC, datetime

import pytest

pytest.importorskip("rich")

from deploy.demo import summary
from deploy.demo.display import PlainDisplay, handoff_text, short
from deploy.demo.summary import print_summary

HANDOFF = {
    "from": "TP2xPP2xDP1",
    "to": "TP1xPP3xDP1",
    "state": "preparing",
    "bytes_moved": None,
    "deadline_at": "2026-01-01T00:02:00+00:00",
}


def test_axes_of_one_are_left_out_of_a_layout():
    assert short("TP2xPP2xDP1") == "TP2xPP2"
    assert short("TP1xPP3xDP1") == "PP3"
    assert short("TP1xPP1xDP1") == "TP1xPP1xDP1"
    assert short("TP10xPP1xDP11") == "TP10xDP11"


def test_a_handoff_under_way_shows_its_stage_its_bytes_and_the_time_left():
    now = datetime(2026, 1, 1, 0, 0, 30, tzinfo=UTC)
    assert handoff_text(HANDOFF, now=now) == "handoff TP2xPP2 -> PP3 preparing, 90 s to the deadline"
    moved = HANDOFF | {"bytes_moved": 24_400_000}
    assert handoff_text(moved, now=now) == "handoff TP2xPP2 -> PP3 preparing, 24.4 MB moved, 90 s to the deadline"
    assert handoff_text(None) == ""


def test_lines_carry_the_time_and_what_changes_quickly_is_not_repeated(capsys: pytest.CaptureFixture):
    display = PlainDisplay()
    display.act("First")
    display.say("a fact")
    display.note("changes")
    display.note("changes again")
    lines = capsys.readouterr().out.splitlines()
    assert [line.split("] ")[1] for line in lines] == ["== First", "   a fact"]


@pytest.fixture
def report() -> dict:
    handoff = {
        "from": "TP2xPP2xDP1", "to": "TP1xPP3xDP1", "cause": "notice", "notice_to_safe_s": 3.5, "pause_s": 0.2,
        "pause_steps": 0.7, "lost_s": 0.4, "bytes_moved": 24_400_000, "bytes_lower_bound": 24_400_000,
        "certificate": "a650461ebc1f69a7",
    }  # fmt: skip
    return {
        "handoffs": [handoff],
        "ratios": {"as_today_over_pause": 60.0, "as_today_over_lost": 30.0, "at_best_over_lost": None},
        "restart_baseline": {
            "as_today": {"downtime_s": 12.0, "phases_s": {"save": 1.0}},
            "at_best": {"downtime_s": 2.0, "phases_s": {"save": 0.5}},
        },
        "undisturbed": {
            "max_abs_loss_diff_before": 0.0,
            "max_abs_loss_diff_after": 1e-6,
            "abs_loss_diff_right_after": 1e-6,
            "layout_noise": 2e-6,
            "routing_noise": 0.0,
        },
        "steps": 100,
        "sample_digest": "same",
        "sample_digest_undisturbed": "same",
        "took_s": 200.0,
        "device": {"cores": 2, "cpu": "a processor", "load_average_1_min": 0.5},
    }


def test_the_table_at_the_end_names_every_bound_that_is_broken(report: dict, capsys: pytest.CaptureFixture):
    print_summary(report, broken=["a bound [with brackets]"])
    text = capsys.readouterr().out
    for part in ("TP2xPP2", "PP3", "0.2 s", "60.0 x", "BROKEN: a bound [with brackets]", "samples equal"):
        assert part in text


def test_tables_fit_80_columns_with_every_layout_and_every_figure_whole(
    report: dict, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(summary, "terminal_width", lambda: 80)
    wide = report["handoffs"][0] | {"from": "TP8xPP16xDP128", "to": "TP8xPP8xDP256", "lost_s": -0.4123}
    print_summary(report | {"handoffs": [*report["handoffs"], wide]}, broken=["a bound that is told at length " * 5])
    lines = re.sub(r"\x1b\[[0-9;]*m", "", capsys.readouterr().out).splitlines()
    assert max(map(len, lines)) <= 80
    row = next(line for line in lines if line.startswith("TP8xPP16xDP128"))
    assert row.split("  ")[1].strip() == "TP8xPP8xDP256" and "-0.412 s" in row and "24.4 MB" in row
    assert sum(line == "  least 24.4 MB, certificate a650461ebc1f69a7" for line in lines) == 2
