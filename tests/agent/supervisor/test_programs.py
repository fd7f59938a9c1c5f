"""Where a fork of the zygote could not be used, ranks and stores start as programs of their own, and all else is as
with forks."""

import asyncio
import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from agent.journal import Table
from agent.protocol.rank import Hello
from agent.supervisor.child_entry import PROGRAM
from agent.supervisor.forkable import CUDA_DEVICE, fork_problem, why_not_forked
from agent.supervisor.supervisor import SupervisorSettings
from liver_core.gpu_environment import GpuRefused
from tests.agent.supervisor.test_supervisor import Node
from tests.agent.waiting import eventually, quick_directory

THREAD = "tests.agent.supervisor.starts_thread"
GPUS = ("GPU-a", "GPU-b")


@pytest.fixture
def run_dir() -> Iterator[Path]:
    path = quick_directory()
    yield path
    shutil.rmtree(path)


def test_a_process_can_be_forked_until_something_in_it_starts_cuda_or_a_thread() -> None:
    quiet, started = (SimpleNamespace(cuda=SimpleNamespace(is_initialized=lambda v=v: v)) for v in (False, True))
    assert fork_problem(1, {}, ["/dev/null"]) == ""
    assert fork_problem(1, {"torch": quiet}, ["/dev/nvidiactl"]) == "", "NVML counts GPUs without starting CUDA"
    assert "started CUDA" in fork_problem(1, {"torch": started}, [])
    assert "started CUDA" in fork_problem(1, {"torch": quiet}, [CUDA_DEVICE]), "started beside torch"
    assert "has 3 threads" in fork_problem(3, {}, [])


def test_what_a_process_has_open_is_seen(tmp_path: Path) -> None:
    with (tmp_path / "uvm").open("w"):
        assert "started CUDA" not in why_not_forked()


def test_a_rank_is_a_program_with_its_environment_from_the_start_and_is_watched_as_any_other(run_dir: Path) -> None:
    async def scenario() -> None:
        this = Node(run_dir, "tests.agent.fake_rank:run", f"json,{THREAD}")
        try:
            this.supervisor._settings = SupervisorSettings(run_dir, run_dir, "tests.agent.fake_rank:run", gpus=GPUS)
            spec = this.spec()
            job = spec.spec.model_copy(update={"workdir": str(run_dir), "environment": {"OF_THE_JOB": "yes"}})
            state = await this.supervisor.launch(spec.model_copy(update={"spec": job}), "o")
            await eventually(lambda: state.pulse.step > 3, "steps", 30)
            hello = next(event for _, event in this.events if isinstance(event, Hello))
            assert (hello.pid, hello.start_time) == (state.record.process.pid, state.record.process.start_time)
            process = psutil.Process(hello.pid)
            assert PROGRAM in process.cmdline() and process.name() == "liver-rank"
            assert process.cwd() == str(run_dir)
            # What the program began with, and not what it has set since: CUDA reads it when it starts.
            began_with = process.environ()
            assert began_with["CUDA_VISIBLE_DEVICES"] == "GPU-a,GPU-b" and began_with["OF_THE_JOB"] == "yes"
            assert "OF_THE_JOB" not in " ".join(process.cmdline())
            assert "programs of their own: the zygote has 2 threads" in (run_dir / "zygote.log").read_text()
            os.kill(hello.pid, signal.SIGKILL)
            await eventually(lambda: this.exits, "the exit")
            assert "was killed by SIGKILL after step" in this.exits[0][1].text
            assert this.journal.get(Table.RANK, "fake/0") is None
        finally:
            await this.end()

    asyncio.run(scenario())


def test_the_exit_code_and_the_traceback_of_a_program_are_in_the_reason(run_dir: Path) -> None:
    async def scenario() -> None:
        this = Node(run_dir, "tests.agent.fake_rank:crash", THREAD)
        try:
            await this.supervisor.launch(this.spec(), "o")
            await eventually(lambda: this.exits, "the exit", 30)
            said = "ended with exit code 1 after step 0; its log ends: RuntimeError: a bug in the user's code"
            assert this.exits[0][1].text.endswith(said)
        finally:
            await this.end()

    asyncio.run(scenario())


def test_a_rank_is_not_started_with_a_setting_that_would_end_it_on_a_gpu(run_dir: Path) -> None:
    async def scenario() -> None:
        this = Node(run_dir, "tests.agent.fake_rank:run", "json")
        try:
            this.supervisor._settings = SupervisorSettings(run_dir, run_dir, gpus=GPUS)
            spec = this.spec()
            job = spec.spec.model_copy(update={"environment": {"CUDA_LAUNCH_BLOCKING": "1"}})
            with pytest.raises(GpuRefused, match="CUDA_LAUNCH_BLOCKING: is set"):
                await this.supervisor.launch(spec.model_copy(update={"spec": job}), "o")
            assert not this.supervisor.states
        finally:
            await this.end()

    asyncio.run(scenario())
