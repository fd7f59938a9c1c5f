"""The rank's socket: a slow agent slows no step, and the next agent gets what the last one did not."""

from __future__ import annotations

import json
import shutil
import socket
import time
from collections.abc import Iterator
from typing import Any
from uuid import UUID

import pytest

from agent.protocol.rank import Checkpointed, Finished, Hello, StageReport, StepReport
from agent.supervisor.zygote import listen
from agent.worker.control import ControlSocket
from liver_core.handoff.messages import RankStage
from tests.agent.waiting import quick_directory

STEPS = 3_000
"""Their lines are far more than a unix socket holds."""


@pytest.fixture
def control() -> Iterator[ControlSocket]:
    directory = quick_directory()
    made = ControlSocket(listen(str(directory / "rank.sock")), hello, lambda command: None)
    made.start()
    yield made
    shutil.rmtree(directory)


def hello() -> Hello:
    return Hello(
        job_id="job", generation=1, rank=0, pid=1, start_time=1.0, stage=RankStage.TRAINING, step=0, handoff_id=None
    )


def step(number: int) -> StepReport:
    return StepReport(
        generation=1, step=number, seconds=0.1, loss=1.0, consumed_samples=number, sample_digest="0", tokens=1
    )


def stage(name: RankStage) -> StageReport:
    return StageReport(handoff_id=UUID(int=7), generation=2, rank=0, stage=name)


def connect(control: ControlSocket) -> socket.socket:
    agent = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    agent.settimeout(10.0)
    agent.connect(control._listener.getsockname())
    return agent


def lines(agent: socket.socket, last_step: int) -> list[dict[str, Any]]:
    """Everything up to this step."""
    found: list[dict[str, Any]] = []
    with agent.makefile("rb") as stream:
        while not found or found[-1].get("step") != last_step:
            found.append(json.loads(stream.readline()))
    return found


def test_an_agent_that_stalls_does_not_stop_the_thread_that_trains(control: ControlSocket):
    with connect(control) as stalled:
        assert json.loads(stalled.makefile("rb").readline())["type"] == "hello"
        longest = 0.0
        for number in range(1, STEPS + 1):
            started = time.monotonic()
            control.say(step(number))
            longest = max(longest, time.monotonic() - started)
        assert longest < 2.0, "it waits for the agent"
        assert not control.flush(0.0), "the agent has everything: it does not stall"


def test_the_next_agent_gets_hello_the_last_stage_and_what_the_stalled_one_was_not_sent(control: ControlSocket):
    with connect(control) as stalled:
        assert json.loads(stalled.makefile("rb").readline())["type"] == "hello"
        for number in range(1, STEPS + 1):
            control.say(step(number))
        control.say(stage(RankStage.PREPARING))
        control.say(stage(RankStage.PREPARED))
        control.say(step(STEPS + 1))
        with connect(control) as agent:
            first, second, *others = lines(agent, STEPS + 1)
            assert (first["type"], second["stage"]) == ("hello", "prepared")
            numbers = [other["step"] for other in others]
            assert numbers == list(range(numbers[0], STEPS + 2)), "in order, none twice, none left out"
            assert control.flush(5.0)


def test_what_is_said_while_there_is_no_agent_waits_for_one(control: ControlSocket):
    control.say(step(1))
    control.say(stage(RankStage.PREPARED))
    assert not control.flush(5.0)
    with connect(control) as agent:
        kinds = [line["type"] for line in lines(agent, 1)]
    assert kinds == ["hello", "stage", "step"], "a stage is said once"


def saved(step: int) -> Checkpointed:
    return Checkpointed(path=f"/checkpoints/{step}", step=step)


def test_facts_are_told_again_to_each_agent_since_the_one_before_it_may_not_have_passed_them_on(control: ControlSocket):
    with connect(control) as agent:
        control.say(saved(5))
        control.say(saved(7))
        control.say(step(8))
        lines(agent, 8)
    with connect(control) as agent, agent.makefile("rb") as stream:
        again = [json.loads(stream.readline()) for _ in range(2)]
    assert [(line["type"], line["step"]) for line in again] == [("hello", 0), ("checkpointed", 7)]


def test_a_fact_that_waits_for_an_agent_is_told_once_in_its_place(control: ControlSocket):
    for message in (saved(5), step(6), saved(7), step(8)):
        control.say(message)
    with connect(control) as agent:
        told = [(line["type"], line["step"]) for line in lines(agent, 8)]
    assert told == [("hello", 0), ("checkpointed", 5), ("step", 6), ("checkpointed", 7), ("step", 8)]


def test_what_a_rank_ends_with_is_the_latest_fact_of_each_kind(control: ControlSocket):
    for message in (saved(5), step(6), saved(7), Finished(step=8)):
        control.say(message)
    assert control.facts() == (saved(7), Finished(step=8))
