"""What `liver jobs watch` shows: a line for each change, or a display of 80 columns that stays in place."""

import io
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from rich.console import Console

from service.cli.watching import Lines, Screen

OPENED = datetime(2026, 1, 1, 12, 0, 0, tzinfo=UTC)


def handoff(state: str, after_s: float, **more: Any) -> dict[str, Any]:
    values = {
        "handoff_id": "2f1c9a52-8f5e-4d6b-9d53-0b6f5c6d7e8f", "from": "TP2xPP2xDP1", "to": "TP1xPP3xDP1",
        "state": state, "cause": "notice", "rung": "live", "reason": "node-d goes", "phases_s": {},
        "pause_s": None, "lost_s": None, "bytes_moved": None, "opened_at": OPENED.isoformat(),
        "changed_at": (OPENED + timedelta(seconds=after_s)).isoformat(),
        "deadline_at": (OPENED + timedelta(seconds=120)).isoformat(),
    }  # fmt: skip
    return values | more


def event(step: int, *, attempt: dict | None = None, state: str = "running", steps_per_s: float | None = 2.0) -> dict:
    job = {
        "job_id": "gpt-small-1a2b3c4d", "state": state, "reason": "every rank did its first step",
        "layout": "TP2xPP2xDP1", "nodes": ["a", "b", "c", "d"], "active_generation": 3, "last_step": step,
        "stop_steps": 500, "standstill": None,
    }  # fmt: skip
    remaining_s = (500 - step) / steps_per_s if steps_per_s else None
    return {
        "job": job,
        "pace": {"steps_per_s": steps_per_s, "remaining_s": remaining_s},
        "steps": [{"step": step, "loss": 4.125, "seconds": 0.5}] if step else [],
        "handoff": attempt,
    }


EVENTS = [
    event(0, state="starting", steps_per_s=None),
    event(100),
    event(101, attempt=handoff("preparing", 0.0)),
    event(102, attempt=handoff("preparing", 0.0)),
    event(103, attempt=handoff("streaming", 1.5, phases_s={"hello": 0.12, "build": 1.3})),
    event(104, attempt=handoff("ready", 3.2, phases_s={"hello": 0.12, "build": 1.3, "stream": 1.6})),
    event(
        105,
        attempt=handoff(
            "active", 3.6, pause_s=0.2154, lost_s=0.4, bytes_moved=24_400_000,
            phases_s={"hello": 0.12, "build": 1.3, "stream": 1.6} | {f"part_{at}": at / 100 for at in range(9)},
        ),
    ),
    event(500, state="finished", steps_per_s=None),
]  # fmt: skip


def test_that_no_step_is_made_is_said_once_and_with_each_progress(capsys: pytest.CaptureFixture):
    view = Lines()
    since = (datetime.now(UTC) - timedelta(seconds=181)).isoformat()
    still = event(100, steps_per_s=None)
    still["job"]["standstill"] = {"since": since, "because": "rank 1 on b stands in samples (j.py:3)", "hook": ""}
    for each in (still, {**still, "steps": []}):
        view.show(each)
    text = "no step for 3 min: rank 1 on b stands in samples (j.py:3)"
    assert capsys.readouterr().out.splitlines() == [
        "job      running: every rank did its first step",
        f"job      running: {text}",
        f"step     100 of 500 (20 %), loss 4.1250, 0.5 s a step, {text}, TP2xPP2 on 4 nodes",
    ]


def test_in_a_pipe_each_change_is_a_line_with_progress_pace_and_the_time_left(capsys: pytest.CaptureFixture):
    view = Lines()
    for each in EVENTS:
        view.show(each)
    view.close()
    assert capsys.readouterr().out.splitlines() == [
        "job      starting: every rank did its first step",
        "job      running: every rank did its first step",
        "step     100 of 500 (20 %), loss 4.1250, 0.5 s a step, 2 steps/s, 3 min left, TP2xPP2 on 4 nodes",
        "handoff  2f1c9a52 TP2xPP2 -> PP3 preparing (notice, live), node-d goes",
        "step     101 of 500 (20 %), loss 4.1250, 0.5 s a step, 2 steps/s, 3 min left, TP2xPP2 on 4 nodes",
        "step     102 of 500 (20 %), loss 4.1250, 0.5 s a step, 2 steps/s, 3 min left, TP2xPP2 on 4 nodes",
        "handoff  2f1c9a52 streaming, after 1.5 s; build 1.3 s, hello 0.12 s",
        "step     103 of 500 (21 %), loss 4.1250, 0.5 s a step, 2 steps/s, 3 min left, TP2xPP2 on 4 nodes",
        "handoff  2f1c9a52 ready, after 3.2 s; stream 1.6 s",
        "step     104 of 500 (21 %), loss 4.1250, 0.5 s a step, 2 steps/s, 3 min left, TP2xPP2 on 4 nodes",
        "handoff  2f1c9a52 active, after 3.6 s, pause 0.215 s, lost 0.4 s, moved 24.4 MB; part_8 0.08 s, "
        "part_7 0.07 s, part_6 0.06 s, part_5 0.05 s, part_4 0.04 s, part_3 0.03 s, "
        "3 more in liver handoffs show 2f1c9a52",
        "step     105 of 500 (21 %), loss 4.1250, 0.5 s a step, 2 steps/s, 3 min left, TP2xPP2 on 4 nodes",
        "job      finished: every rank did its first step",
        "step     500 of 500 (100 %), loss 4.1250, 0.5 s a step, TP2xPP2 on 4 nodes",
    ]


def test_a_handoff_that_failed_says_why_and_a_second_one_is_told_apart(capsys: pytest.CaptureFixture):
    view = Lines()
    other = handoff("proposed", 0.0, handoff_id="aaaaaaaa-8f5e-4d6b-9d53-0b6f5c6d7e8f")
    view.show(event(1, attempt=handoff("preparing", 0.0)))
    view.show(event(2, attempt=handoff("aborted", 2.0, reason="rank 3 on node c: no memory")))
    view.show(event(3, attempt=other))
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("handoff")]
    assert lines == [
        "handoff  2f1c9a52 TP2xPP2 -> PP3 preparing (notice, live), node-d goes",
        "handoff  2f1c9a52 aborted, after 2.0 s, rank 3 on node c: no memory",
        "handoff  aaaaaaaa TP2xPP2 -> PP3 proposed (notice), node-d goes",
    ]


def test_on_a_terminal_progress_and_the_phases_of_a_handoff_stay_in_place():
    console = Console(file=io.StringIO(), width=80, force_terminal=True, color_system=None)
    screen = Screen(console, now=lambda: OPENED + timedelta(seconds=35))
    try:
        for each in EVENTS[:6]:
            screen.show(each)
        plain = Console(file=io.StringIO(), width=80, color_system=None)
        with plain.capture() as captured:
            plain.print(screen._render())
    finally:
        screen.close()
    shown = [line.rstrip() for line in captured.get().splitlines()]
    end = (OPENED + timedelta(seconds=35 + 198)).astimezone()
    assert shown == [
        "gpt-small-1a2b3c4d  running  TP2xPP2 on 4 nodes, generation 3",
        "█" * 12 + "░" * 48,
        f"104 of 500 (21 %), loss 4.1250, 0.5 s a step, 2 steps/s, 3 min left, until {end:%H:%M}",
        "handoff 2f1c9a52 TP2xPP2 -> PP3 ready (notice, live), for 35.0 s, 85 s to the",
        "deadline",
        "  proposed > preparing > streaming > ready > cutting_over > active",
        "  stream 1.6 s, build 1.3 s, hello 0.12 s",
    ]


def test_the_display_ends_with_the_last_figures_and_every_change_above_it():
    output = io.StringIO()
    screen = Screen(Console(file=output, width=80, force_terminal=True, color_system=None), now=lambda: OPENED)
    for each in EVENTS:
        screen.show(each)
    screen.say("the service is back")
    screen.close()
    text = output.getvalue()
    assert "job      finished: every rank did its first step" in text
    assert "handoff  2f1c9a52 active, after 3.6 s, pause 0.215 s" in text
    assert "the service is back" in text
    assert text.rstrip().endswith("step     500 of 500 (100 %), loss 4.1250, 0.5 s a step")
