"""Trials side by side, with programs that only write the report of a trial."""

from __future__ import annotations

import os
import signal
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from tests.chaos.side_by_side import play_side_by_side

PROGRAM = """
import json, pathlib, sys, time
folder, seed, report = pathlib.Path(sys.argv[1]), int(sys.argv[6]), pathlib.Path(sys.argv[8])
(folder / f"began-{seed}").touch()
print(f"seed {seed}: begins", flush=True)
print("    handed over", flush=True)
while len(list(folder.glob("began-*"))) < int(sys.argv[2]):
    time.sleep(0.01)
if seed != 13:
    report.write_text(json.dumps({"trials": [{"seed": seed}]}))
sys.exit(3 if seed == 13 else 0)
"""


def command(folder: Path, together: int) -> tuple[str, ...]:
    """Each trial ends when so many have begun."""
    return (sys.executable, "-c", PROGRAM, str(folder), str(together))


@pytest.mark.timeout(60)
def test_trials_are_played_at_the_same_time_and_each_leaves_its_record(tmp_path: Path):
    records: dict[int, dict[str, Any]] = {}
    said: list[str] = []
    failed = play_side_by_side(range(4), 2, command=command(tmp_path, 2), say=said.append, done=records.__setitem__)
    assert failed == []
    assert records == {seed: {"seed": seed} for seed in range(4)}
    assert "seed 2: handed over" in said


@pytest.mark.timeout(60)
def test_a_trial_that_leaves_no_record_is_named_and_the_others_go_on(tmp_path: Path):
    records: dict[int, dict[str, Any]] = {}
    said: list[str] = []
    failed = play_side_by_side((12, 13, 14), 1, command=command(tmp_path, 1), say=said.append, done=records.__setitem__)
    assert failed == [13]
    assert set(records) == {12, 14}
    assert "seed 13: no record, exit status 3" in said


@pytest.mark.timeout(60)
def test_an_interruption_ends_the_trials_under_way_and_begins_no_other(tmp_path: Path):
    def interrupt() -> None:
        pause = threading.Event()
        while len(list(tmp_path.glob("began-*"))) < 2:
            pause.wait(0.01)
        os.kill(os.getpid(), signal.SIGINT)

    # Where the tests run in the background of a shell, it has this signal ignored.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        threading.Thread(target=interrupt).start()
        with pytest.raises(KeyboardInterrupt):
            play_side_by_side(range(9), 2, command=command(tmp_path, 99), say=lambda _: None, done=lambda *_: None)
    finally:
        signal.signal(signal.SIGINT, before)
    assert len(list(tmp_path.glob("began-*"))) == 2
