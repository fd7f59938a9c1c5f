"""A rank that could not be started leaves its slot as the end of a process does: free, for what was to follow."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from agent.driver.job_driver import JobDriver
from agent.driver.rank_host import Launch
from agent.journal import JournalError
from agent.supervisor.records import SlotKey
from agent.supervisor.zygote_client import ZygoteError
from liver_core.handoff import Reason
from tests.agent.driver.test_notice_response import Scene
from tests.agent.stub_service import JOB_ID, StubService, roster_of
from tests.agent.waiting import fake_job

NODES = ("a", "b")


class Failing:
    """Forks fail for generation 4, once `may_answer` is set, with `error`."""

    def __init__(self) -> None:
        self.error: Exception = ZygoteError("planted: no memory for a process")
        self.states: dict[SlotKey, Any] = {}
        self.may_answer = asyncio.Event()
        self.launched: list[int] = []
        self.stopped: list[int] = []

    async def launch(self, spec: Any, origin: str) -> None:
        if spec.order.generation == 4:
            await self.may_answer.wait()
            raise self.error
        self.launched.append(spec.order.generation)
        self.states[SlotKey(JOB_ID, spec.slot)] = spec

    async def stop(self, key: SlotKey, reason: str, grace_s: float) -> None:
        if key in self.states:
            self.stopped.append(self.states[key].order.generation)


def launch_of(generation: int) -> Launch:
    order = SimpleNamespace(generation=generation)
    return Launch(cast(Any, SimpleNamespace(slot=0, rank=0, order=order)), "origin")


class Job:
    """The driver of one job on node a, whose slot 0 is in a world. `died`: what its participant was told."""

    def __init__(self, directory: Path) -> None:
        scene = Scene(StubService(fake_job(directory), NODES).order(), "a")
        self.supervisor = Failing()
        cast(Any, scene.node).supervisor = self.supervisor
        self.driver = JobDriver(scene.node, JOB_ID)
        self.host = self.driver._host
        self.died: list[str] = []
        record = SimpleNamespace(active=roster_of(5, NODES), order=None)
        self.driver.slots.participants[0] = cast(Any, SimpleNamespace(record=record))
        self.driver.slots.take_death = cast(Any, self._take_death)

    async def _take_death(self, slot: int, reason: Reason) -> None:
        self.died.append(reason.text)

    async def fail(self) -> None:
        """The fork that is under way fails, and the driver has its turn."""
        self.supervisor.may_answer.set()
        async with asyncio.timeout(5):
            await (await self.driver._inbox.get())()
        await settled()


async def settled() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


@pytest.fixture
def run(tmp_path: Path) -> Callable[[Callable[[Job], Awaitable[None]]], Job]:
    def run_it(scenario: Callable[[Job], Awaitable[None]]) -> Job:
        async def whole() -> Job:
            job = Job(tmp_path)
            job.host.launch(launch_of(4))
            await settled()
            await scenario(job)
            await job.host.close()
            return job

        return asyncio.run(whole())

    return run_it


def test_what_waits_for_a_process_that_was_to_end_is_started_where_that_process_never_came(run: Any) -> None:
    async def scenario(job: Job) -> None:
        job.host.end(0, "generation 5 starts", 0.0)
        job.host.launch(launch_of(5))
        await job.fail()

    job = run(scenario)
    assert job.supervisor.launched == [5] and job.supervisor.stopped == []
    assert job.died == [] and job.driver._lost == {}, "the rank of generation 5 has not died"
    assert not job.host.is_condemned(0)


@pytest.mark.parametrize("told", ["to end", "to abort"])
def test_the_next_process_of_a_slot_is_not_taken_for_one_that_was_told_to_end_and_never_came(
    run: Any, told: str
) -> None:
    async def scenario(job: Job) -> None:
        if told == "to end":
            job.host.end(0, "the older world is over", 0.0)
        else:
            job.host.condemn(0)
        await job.fail()
        assert job.died == ["the rank could not be started: planted: no memory for a process"]
        assert not job.host.is_busy(0)
        job.host.launch(launch_of(5))
        await settled()

    job = run(scenario)
    assert job.supervisor.launched == [5] and job.supervisor.stopped == []
    assert not job.host.is_condemned(0)
    assert job.driver._lost == {}, "it was to end"


def test_what_comes_between_a_failed_start_and_the_drivers_turn_waits_for_that(run: Any) -> None:
    async def scenario(job: Job) -> None:
        job.supervisor.may_answer.set()
        await settled()
        assert job.host.is_busy(0)
        job.host.launch(launch_of(5))
        await settled()
        assert job.supervisor.launched == []
        await job.fail()

    job = run(scenario)
    assert job.supervisor.launched == [5] and job.died == []


@pytest.mark.parametrize("error", [KeyError("pid"), RuntimeError("planted"), AssertionError("planted")])
def test_a_start_that_fails_in_a_way_that_nobody_expected_frees_its_slot_and_says_how(
    run: Any, error: Exception
) -> None:
    async def scenario(job: Job) -> None:
        job.supervisor.error = error
        await job.fail()
        assert job.died == [f"the rank could not be started: {type(error).__name__}: {error}"]
        assert job.driver._lost[0].reason is not None and job.driver._lost[0].reason.text == job.died[0]
        assert not job.host.is_busy(0)
        job.host.launch(launch_of(5))
        await settled()

    assert run(scenario).supervisor.launched == [5]


def test_what_could_not_be_persisted_while_a_rank_was_started_is_told_to_nobody(run: Any) -> None:
    async def scenario(job: Job) -> None:
        job.supervisor.error = JournalError("planted: the disk is full")
        job.supervisor.may_answer.set()
        await settled()
        assert job.driver._inbox.empty() and job.died == []
        assert job.host.is_busy(0), "the agent ends, and the next one looks at what runs"

    run(scenario)
