"""A rank whose process is stopped, by a signal or a debugger: its agent sees that, and nobody else can."""

import asyncio
import signal
import subprocess
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from uuid import UUID

import pytest

from agent.protocol.process_end import STOPPED
from agent.protocol.rank import Failed, StageReport, StepReport, WhereaboutsReport
from agent.protocol.rank_status import Whereabouts
from agent.supervisor.process import ProcessIdentity, is_stopped, read_start_time
from agent.supervisor.records import RankRecord, RankState, SlotKey
from agent.supervisor.supervisor import Supervisor
from agent.supervisor.watchdog import LEAST_S, STOP_COUNTS_S, STOP_SHOWS_S, STOPPED_LEAST_S, RankPulse
from liver_core.handoff import FailedPart, FailureCause, RankStage, Reason
from tests.agent.waiting import eventually

KEY = SlotKey("job", 0)
MISSES = Reason("no answer from a peer", "training", 2, cause=FailureCause(FailedPart.PEER))
KILLED = Reason("rank 1 is dead", "training", 1, node="b", cause=FailureCause(FailedPart.RANK, "SIGKILL"))


def test_a_process_is_seen_to_be_stopped_and_to_go_on() -> None:
    child = subprocess.Popen(["sleep", "60"])
    started = read_start_time(child.pid)
    assert started is not None
    identity = ProcessIdentity(child.pid, started)

    async def run() -> None:
        child.send_signal(signal.SIGSTOP)
        await eventually(lambda: is_stopped(identity), "it is stopped")
        assert not is_stopped(ProcessIdentity(child.pid, started + 1.0)), "another process has this pid now"
        child.send_signal(signal.SIGCONT)
        await eventually(lambda: not is_stopped(identity), "it goes on")

    try:
        assert not is_stopped(identity)
        asyncio.run(run())
    finally:
        child.kill()
        child.wait()
    assert not is_stopped(identity)


def test_time_in_which_the_agent_itself_stood_still_does_not_count_against_its_ranks() -> None:
    pulse = RankPulse(started_at=0.0)
    for step in range(1, 5):
        pulse.stepped(float(step), step, 1.0)
        pulse.look(float(step), stopped=False)
    assert pulse.limit_s() == LEAST_S
    pulse.look(5.0 + LEAST_S, stopped=False)
    assert pulse.hang_reason(5.0 + LEAST_S) == "", (
        "the agent comes back after 31 s, and has not read what the rank said"
    )
    for second in range(int(LEAST_S) + 1):
        pulse.look(6.0 + LEAST_S + second, stopped=False)
    assert "no step after step 4" in pulse.hang_reason(6.0 + 2 * LEAST_S), "it says nothing from then on either"


def test_a_stop_counts_once_a_peer_could_have_missed_the_rank_and_until_its_next_step() -> None:
    pulse = RankPulse(started_at=0.0)
    pulse.stepped(9.0, 4, 1.0)
    pulse.look(10.0, stopped=True)
    pulse.look(11.0, stopped=True)
    assert pulse.is_stopped and pulse.stopped_s(10.0 + STOPPED_LEAST_S - 0.1) == 0.0 and not pulse.stop_reason(12.0)
    assert pulse.stopped_s(31.0) == 21.0
    assert pulse.stop_reason(31.0) == "its process has been stopped for 21 s, by a signal or a debugger"
    pulse.look(32.0, stopped=False)
    pulse.look(33.0, stopped=False)
    assert not pulse.is_stopped and pulse.stopped_s(40.0) == 22.0
    assert pulse.stop_reason(34.0) == "its process was stopped for 22 s, by a signal or a debugger"
    assert pulse.stop_reason(32.0 + STOP_SHOWS_S + 0.1) == ""
    assert pulse.stopped_s(32.0 + STOP_COUNTS_S + 0.1) == 0.0, "nobody waits for so long"
    pulse.stepped(41.0, 5, 1.0)
    assert pulse.stopped_s(41.0) == 0.0
    pulse.look(42.0, stopped=True)
    pulse.stepped(48.0, 6, 1.0)
    pulse.look(49.0, stopped=True)
    assert pulse.stopped_s(50.0) == 0.0, "it was seen stopped twice, and stepped in between"
    pulse.look(50.0, stopped=False)
    pulse.look(51.0, stopped=True)
    assert pulse.stopped_s(57.0) == 6.0, "a second stop counts from its own beginning"


@pytest.fixture
def watched(tmp_path: Path) -> Any:
    """A supervisor with one rank, of which it is told that its process was stopped for so many seconds."""

    def watch(stopped_s: float) -> tuple[Supervisor, RankState, list[Any]]:
        events: list[Any] = []
        supervisor = Supervisor(
            cast(Any, None), cast(Any, SimpleNamespace()), cast(Any, None),
            on_event=lambda key, event: events.append(event), on_exit=lambda *_: None,
        )  # fmt: skip
        now = time.monotonic()
        record = RankRecord(ProcessIdentity(2**22, 1.0), str(tmp_path / "s"), str(tmp_path / "log"), 1, 2, "origin")
        state = RankState(record, RankPulse(now - 60.0), 1, 2)
        state.pulse.look(now - stopped_s, stopped=True)
        return supervisor, state, events

    return watch


def test_that_a_rank_says_where_it_is_is_no_progress(watched: Any) -> None:
    supervisor, state, events = watched(0.0)
    before = state.pulse.beat_at
    supervisor._take_event(KEY, state, WhereaboutsReport(where=Whereabouts(hook="validate")))
    assert state.pulse.beat_at == before and state.where == Whereabouts(hook="validate") and len(events) == 1


@pytest.mark.parametrize("kind", ["failed", "stage"])
def test_a_rank_that_misses_others_after_it_was_stopped_is_the_one_that_they_have_missed(
    watched: Any, kind: str
) -> None:
    supervisor, state, events = watched(21.0)
    event = Failed(reason=MISSES)
    if kind == "stage":
        event = StageReport(handoff_id=UUID(int=1), generation=1, rank=2, stage=RankStage.BROKEN, reason=MISSES)
    supervisor._take_event(KEY, state, event)
    assert state.reason == events[0].reason
    assert state.reason.cause == FailureCause(FailedPart.RANK) and state.reason.rank == 2
    assert state.reason.text == (
        "its process was stopped for 21 s, by a signal or a debugger; then it reported: "
        "rank 2, training: no answer from a peer"
    )


@pytest.mark.parametrize(("stopped_s", "reason"), [(STOPPED_LEAST_S - 1.0, MISSES), (21.0, KILLED)])
def test_a_short_stop_and_a_peer_whose_end_is_known_change_no_reason(
    watched: Any, stopped_s: float, reason: Reason
) -> None:
    supervisor, state, events = watched(stopped_s)
    supervisor._take_event(KEY, state, Failed(reason=reason))
    assert state.reason == events[0].reason == reason


def test_what_a_rank_said_of_its_end_stays_its_reason_whatever_comes_after_it(watched: Any) -> None:
    supervisor, state, _ = watched(0.0)
    supervisor._take_event(KEY, state, Failed(reason=MISSES))
    late = StageReport(handoff_id=UUID(int=1), generation=2, rank=2, stage=RankStage.PREPARED)
    supervisor._take_event(KEY, state, late)
    assert (state.stage, state.reason) == (RankStage.FAILED, MISSES)
    state.reason = None
    told = late.model_copy(update={"stage": RankStage.ABORTED, "reason": KILLED})
    supervisor._take_event(KEY, state, told)
    assert state.reason == KILLED, "an agent that was away hears of the end first, and then why"


def test_a_step_after_the_stop_clears_it(watched: Any) -> None:
    supervisor, state, _ = watched(21.0)
    state.pulse.look(time.monotonic() - 1.0, stopped=False)
    supervisor._take_event(KEY, state, StepReport(generation=1, step=5, seconds=0.1))
    supervisor._take_event(KEY, state, Failed(reason=MISSES))
    assert state.reason == MISSES


def test_the_stop_is_the_reason_that_is_shown_until_the_rank_tells_of_its_end(watched: Any) -> None:
    _, state, _ = watched(21.0)
    now = time.monotonic()
    assert (state.look(now, stopped=True), state.look(now, stopped=True)) == (True, False), "news once"
    assert state.shown_reason == Reason("its process has been stopped for 21 s, by a signal or a debugger", STOPPED, 2)
    state.look(now, stopped=False)
    assert state.shown_reason is not None and state.shown_reason.phase == STOPPED, "others may just be giving up"
    state.stage, state.reason = RankStage.FAILED, MISSES
    assert state.shown_reason == MISSES
    state.stage = RankStage.READY
    state.look(now + STOP_SHOWS_S + 1.0, stopped=False)
    assert (state.hang, state.shown_reason) == (None, MISSES)
