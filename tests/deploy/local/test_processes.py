"""What a demo starts it also ends, by pid, whatever a process did to outlive its parent."""

import os
import select
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from deploy.local.processes import DemoFailed, Processes

ORPHAN = """
import os, sys, time
if os.fork():
    sys.exit(0)
os.setsid()
print(os.getpid(), flush=True)
time.sleep(60)
"""
SLEEP = "import time; time.sleep(60)"
STUBBORN = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(60)"


@pytest.fixture
def processes(tmp_path: Path) -> Iterator[Processes]:
    made = Processes(tmp_path / "logs")
    yield made
    made.close()


def python(program: str) -> list[str]:
    return [sys.executable, "-c", program]


def test_a_child_that_left_its_parent_and_session_is_ended_with_its_group(processes: Processes):
    started = processes.start("node", "orphan", python(ORPHAN))
    processes.finish(started, 20)
    orphans = processes.marked("node")
    assert len(orphans) == 1
    processes.end("node")
    assert _is_gone(orphans[0])
    assert processes.marked("node") == []


def test_ending_a_group_leaves_other_groups_and_other_demos_alone(processes: Processes, tmp_path: Path):
    other_demo = Processes(tmp_path / "other")
    try:
        stranger = other_demo.start("node-a", "sleeper", python(SLEEP))
        neighbour = processes.start("node-b", "sleeper-b", python(SLEEP))
        ended = processes.start("node-a", "sleeper-a", python(SLEEP))
        processes.end("node-a")
        assert ended.process.poll() is not None
        assert stranger.process.poll() is None and neighbour.process.poll() is None
    finally:
        other_demo.close()
    assert stranger.process.poll() is not None


def test_a_group_that_is_killed_gets_no_word_before(processes: Processes, tmp_path: Path):
    told = tmp_path / "told"
    program = f"import signal, time; signal.signal(signal.SIGTERM, lambda *_: open({str(told)!r}, 'w')); time.sleep(60)"
    started = [processes.start("node", "polite", python(program)), processes.start("node", "orphan", python(ORPHAN))]
    processes.finish(started[1], 20)
    processes.kill("node")
    assert started[0].process.poll() == -signal.SIGKILL
    assert processes.marked("node") == [] and not told.exists()


def test_close_ends_everything(processes: Processes):
    started = [processes.start(f"node-{number}", f"sleeper-{number}", python(SLEEP)) for number in range(3)]
    processes.close()
    assert all(item.process.poll() is not None for item in started)


def test_a_process_that_will_not_end_is_killed(processes: Processes, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("deploy.local.processes.TERMINATE_S", 0.2)
    started = processes.start("node", "stubborn", python(STUBBORN))
    processes.end("node")
    assert started.process.poll() is not None


def test_a_process_that_fails_is_named_with_the_end_of_its_log(processes: Processes):
    started = processes.start("corpus", "corpus", python("raise SystemExit('the disk is full')"))
    with pytest.raises(DemoFailed, match="corpus ended with status 1: the disk is full"):
        processes.finish(started, 20)
    with pytest.raises(DemoFailed, match="the disk is full"):
        started.check()


def test_a_process_that_takes_too_long_is_named_with_its_log(processes: Processes):
    started = processes.start("corpus", "slow", python(SLEEP))
    with pytest.raises(DemoFailed, match=r"slow did not end within 0 s .*slow\.log"):
        processes.finish(started, 0.05)


def test_settings_of_the_product_in_the_environment_do_not_reach_the_demo(
    processes: Processes, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("LIVER_SERVICE_DATABASE_URL", "postgresql://somewhere/production")
    started = processes.start(
        "one", "environment", python("import os; print(sorted(os.environ))"), {"LIVER_GIVEN": "1"}
    )
    processes.finish(started, 20)
    said = started.log.read_text()
    assert "LIVER_SERVICE_DATABASE_URL" not in said and "LIVER_GIVEN" in said


def _is_gone(pid: int) -> bool:
    """Ended within a moment, though perhaps not yet reaped by whoever has taken it over."""
    try:
        process = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([process], [], [], 5.0)[0])
    finally:
        os.close(process)


def test_a_group_that_gives_way_does_so_for_every_session_too(processes: Processes):
    started = processes.start("service", "sleep", python(SLEEP))
    processes.lower_priority("service", 15)
    pid = started.process.pid
    assert os.getpriority(os.PRIO_PROCESS, pid) == 15
    autogroup = Path(f"/proc/{pid}/autogroup")
    if autogroup.is_file():
        assert autogroup.read_text().split()[-1] == "15"
