"""The zygote, the supervisor and the store child, all with real processes."""

import asyncio
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from uuid import UUID

import psutil
import pytest

from agent.journal import Journal, JournalError, Table
from agent.protocol.rank import Hello, RankEvent, StepReport
from agent.protocol.secret_values import NO_SECRETS, SecretPlaces
from agent.protocol.worker import RankSpec
from agent.supervisor.job_user import JobUser
from agent.supervisor.process import (
    UNKNOWN,
    ProcessIdentity,
    is_alive,
    is_stopped,
    read_start_time,
    send_signal,
    wait_end,
)
from agent.supervisor.records import RankRecord, SlotKey, StoreKey, StoreRecord
from agent.supervisor.stores import StoreError, Stores
from agent.supervisor.supervisor import TERMINATE_S, Supervisor, SupervisorSettings
from agent.supervisor.watchdog import ASKED_AFTER_S
from agent.supervisor.zygote_client import ForkRequest, ZygoteError
from agent.supervisor.zygote_host import ZygoteHost
from liver_core.handoff import FailedPart, FailureCause, RankStage, Reason, StoreAddress, start_order
from liver_core.layout import Member, ParallelLayout, Roster, from_json, to_json
from liver_core.steady_clock import PROCESS_CLOCK
from tests.agent.fake_rank import IN_DATA
from tests.agent.waiting import eventually, fake_job, quick_directory

KEY = SlotKey("fake", 0)


class Node:
    """One node's supervision, with what it heard."""

    def __init__(
        self,
        run_dir: Path,
        entry: str,
        preload: str,
        job_user: JobUser | None = None,
        places: SecretPlaces = NO_SECRETS,
    ) -> None:
        self.run_dir = run_dir
        self.events: list[tuple[SlotKey, RankEvent]] = []
        self.exits: list[tuple[SlotKey, Reason]] = []
        self.store_exits: list[StoreKey] = []
        self.journal = Journal(run_dir).open()
        self.zygote = ZygoteHost(
            self.journal,
            run_dir=run_dir,
            socket_path=str(run_dir / "z.sock"),
            preload=preload,
            environment={},
            job_user=job_user,
            on_exit=lambda exited: self.supervisor.note_exit(exited),
        )
        self.supervisor = Supervisor(
            SupervisorSettings(run_dir, run_dir, entry, places),
            self.journal,
            self.zygote,
            on_event=lambda key, event: self.events.append((key, event)),
            on_exit=lambda key, reason, state: self.exits.append((key, reason)),
        )
        self.stores = Stores(
            self.journal,
            self.zygote,
            self.supervisor,
            log_path=str(run_dir / "stores.log"),
            on_exit=self.store_exits.append,
        )

    def spec(self) -> RankSpec:
        now = datetime.now(UTC).timestamp()
        target = Roster("fake", 1, ParallelLayout(), (Member("a", 0),))
        store = StoreAddress("127.0.0.1", 1)
        return RankSpec(
            node_id="a",
            slot=0,
            order=start_order(target, store, str(UUID(int=1)), deadline_utc=now + 60.0, issued_at=now, proposer_id="a"),
            spec=fake_job(self.run_dir),
            private_address="127.0.0.1",
            socket_path=self.supervisor.socket_path("r", "fake", "0"),
            clock_zero=PROCESS_CLOCK.zero,
        )

    async def leave(self) -> None:
        """As an agent that exits: everything lives on."""
        await self.supervisor.close()
        await self.stores.close()
        await self.zygote.close()
        self.journal.close()

    async def end(self) -> None:
        await self.supervisor.stop_all("the test is over", grace_s=0.0)
        await self.stores.retire_all()
        await self.zygote.end()
        await self.leave()


@pytest.fixture
def run_dir() -> Iterator[Path]:
    path = quick_directory()
    yield path
    shutil.rmtree(path)


@asynccontextmanager
async def node(
    run_dir: Path, entry: str = "tests.agent.fake_rank:run", preload: str = "json", places: SecretPlaces = NO_SECRETS
) -> AsyncIterator[Node]:
    this = Node(run_dir, entry, preload, places=places)
    this.supervisor.adopt()
    this.stores.adopt()
    try:
        yield this
    finally:
        await this.end()


def test_a_forked_rank_says_hello_and_steps_and_its_end_is_heard_with_its_cause(run_dir: Path) -> None:
    async def scenario() -> None:
        async with node(run_dir) as this:
            state = await this.supervisor.launch(this.spec(), "o")
            await eventually(lambda: state.pulse.step > 3, "steps")
            hello = next(event for _, event in this.events if isinstance(event, Hello))
            assert (hello.pid, hello.start_time) == (state.record.process.pid, state.record.process.start_time)
            assert any(isinstance(event, StepReport) for _, event in this.events)
            assert psutil.Process(hello.pid).name() == "liver-rank"
            os.kill(state.record.process.pid, signal.SIGKILL)
            await eventually(lambda: this.exits, "the exit")
            reason = this.exits[0][1]
            assert "was killed by SIGKILL after step" in reason.text
            assert reason.cause == FailureCause(FailedPart.RANK, signal="SIGKILL", step=state.pulse.step)
            assert this.journal.get(Table.RANK, str(KEY)) is None

    asyncio.run(scenario())


def test_a_rank_is_asked_to_stop_before_it_is_killed(run_dir: Path) -> None:
    async def scenario() -> None:
        async with node(run_dir) as this:
            state = await this.supervisor.launch(this.spec(), "o")
            await eventually(lambda: state.hello_received, "the hello")
            await this.supervisor.stop(KEY, "it is enough", grace_s=5.0)
            await eventually(lambda: this.exits, "the exit")
            assert "exit code 0" in this.exits[0][1].text
            assert "stopped: it is enough" in text_of(state.record.log_path)

    asyncio.run(scenario())


def test_a_rank_whose_process_is_stopped_is_killed_without_waiting_for_it_to_terminate(run_dir: Path) -> None:
    async def scenario() -> None:
        async with node(run_dir) as here:
            state = await here.supervisor.launch(here.spec(), "origin")
            await eventually(lambda: state.hello_received, "hello")
            send_signal(state.record.process, signal.SIGSTOP)
            await eventually(lambda: is_stopped(state.record.process), "the stop")
            async with asyncio.timeout(TERMINATE_S / 2):
                await here.supervisor.stop(KEY, "a newer start", grace_s=0.0)
            assert not is_alive(state.record.process)

    asyncio.run(scenario())


def test_a_rank_that_is_killed_ends_for_the_reason_that_was_given_and_where_it_is_can_be_asked(run_dir: Path) -> None:
    async def scenario() -> None:
        async with node(run_dir) as here:
            state = await here.supervisor.launch(here.spec(), "origin")
            await eventually(lambda: state.hello_received, "hello")
            state.pulse.beat_at = state.pulse.started_at = time.monotonic() - ASKED_AFTER_S
            await here.supervisor.ask_silent()
            await eventually(lambda: state.where is not None, "the answer")
            assert state.where == IN_DATA
            send_signal(state.record.process, signal.SIGSTOP)
            here.supervisor.kill(KEY, "it was stopped on a node that goes")
            await eventually(lambda: here.exits, "the exit")
            assert "SIGKILL" in here.exits[0][1].text and "stopped on a node that goes" in here.exits[0][1].text

    asyncio.run(scenario())


def test_a_crash_leaves_its_traceback_in_the_log_and_its_code_in_the_reason(run_dir: Path) -> None:
    async def scenario() -> None:
        async with node(run_dir, entry="tests.agent.fake_rank:crash") as this:
            state = await this.supervisor.launch(this.spec(), "o")
            await eventually(lambda: this.exits, "the exit")
            assert "exit code 1" in this.exits[0][1].text
            assert this.exits[0][1].cause == FailureCause(FailedPart.RANK, exit_code=1, step=0)
            log = text_of(state.record.log_path)
            assert "about to crash on a" in log
            assert "a bug in the user's code" in log

    asyncio.run(scenario())


def test_the_last_line_of_a_traceback_is_in_the_reason_where_the_rank_could_say_nothing(run_dir: Path) -> None:
    async def scenario() -> None:
        async with node(run_dir, entry="tests.agent.fake_rank:crash") as this:
            await this.supervisor.launch(this.spec(), "o")
            await eventually(lambda: this.exits, "the exit")
            spec = this.spec()
            elsewhere = spec.model_copy(update={"spec": spec.spec.model_copy(update={"workdir": "/no/such/folder"})})
            await this.supervisor.launch(elsewhere, "o2")
            await eventually(lambda: len(this.exits) == 2, "the second exit")
        bug, missing = (reason.text for _, reason in this.exits)
        assert bug.endswith("ended with exit code 1 after step 0; its log ends: RuntimeError: a bug in the user's code")
        assert missing.endswith("FileNotFoundError: [Errno 2] No such file or directory: '/no/such/folder'")

    asyncio.run(scenario())


def test_a_child_that_cannot_close_the_sockets_of_the_zygote_never_answers_in_its_place(run_dir: Path) -> None:
    program = (
        "import json, sys\n"
        "from agent.supervisor.zygote import Zygote, listen\n"
        "class Torn(Zygote):\n"
        "    def _close_in_child(self):\n"
        "        raise OSError('planted')\n"
        "zygote = Torn(listen(sys.argv[1] + '/torn.sock'), ())\n"
        "request = {'op': 'fork', 'name': 'rank', 'entry': 'json:loads', 'spec': '0'}\n"
        "request['log_path'], request['socket_path'] = sys.argv[1] + '/log', sys.argv[1] + '/s'\n"
        "answer = zygote._answer(json.dumps(request).encode())\n"
        "print(answer['op'], answer.get('reason', ''), flush=True)\n"
    )
    command = [sys.executable, "-c", program, str(run_dir)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.stdout.split() == ["forked"], done.stdout


def test_a_module_that_cannot_be_imported_is_named_when_a_rank_is_asked_for(run_dir: Path) -> None:
    async def scenario() -> None:
        async with node(run_dir, preload="no_such_module") as this:
            with pytest.raises(ZygoteError, match="cannot import no_such_module"):
                await this.supervisor.launch(this.spec(), "o")

    asyncio.run(scenario())


def test_a_repeated_fork_request_finds_the_process_of_the_first(run_dir: Path) -> None:
    async def scenario() -> None:
        async with node(run_dir) as this:
            state = await this.supervisor.launch(this.spec(), "o")
            spec = this.spec().model_dump(mode="json", by_alias=True)
            request = ForkRequest(f"rank/{KEY}/1/o", "tests.agent.fake_rank:run", spec, "unused", "unused", {})
            assert await this.zygote.fork(request) == state.record.process

    asyncio.run(scenario())


def test_a_next_agent_adopts_zygote_and_rank_and_goes_on(run_dir: Path) -> None:
    async def scenario() -> None:
        first = Node(run_dir, "tests.agent.fake_rank:run", "json")
        state = await first.supervisor.launch(first.spec(), "o")
        zygote = first.journal.get(Table.ZYGOTE, "zygote")
        await eventually(lambda: state.pulse.step > 2, "steps")
        await first.leave()
        async with node(run_dir) as second:
            adopted = second.supervisor.states[KEY]
            assert adopted.record == state.record
            await eventually(lambda: adopted.hello_received, "the hello to the second agent")
            assert adopted.pulse.step >= 2
            assert adopted.stage is RankStage.TRAINING
            assert (await second.zygote.ensure()).identity == ProcessIdentity.from_json(zygote or {})

    asyncio.run(scenario())


def test_a_rank_outlives_its_zygote_and_a_new_zygote_is_started_for_the_next(run_dir: Path) -> None:
    async def scenario() -> None:
        async with node(run_dir) as this:
            state = await this.supervisor.launch(this.spec(), "o")
            await eventually(lambda: state.hello_received, "the hello")
            old = (await this.zygote.ensure()).identity
            send_signal(old, signal.SIGKILL)
            assert wait_end(old, 5.0)
            step = state.pulse.step
            await eventually(lambda: state.pulse.step > step + 2, "further steps")
            await eventually(lambda: not is_alive(old), "the end of the zygote")
            await this.supervisor.stop(KEY, "stop", grace_s=5.0)
            again = await this.supervisor.launch(this.spec(), "o2")
            assert again.record.process != state.record.process
            assert (await this.zygote.ensure()).identity != old

    asyncio.run(scenario())


def test_a_rank_that_ended_while_no_agent_ran_is_told_as_an_exit_with_its_code(run_dir: Path) -> None:
    async def scenario() -> None:
        first = Node(run_dir, "tests.agent.fake_rank:end_with_seven", "json")
        state = await first.supervisor.launch(first.spec(), "o")
        await eventually(lambda: state.hello_received, "the hello")
        await first.leave()
        send_signal(state.record.process, signal.SIGTERM)
        assert wait_end(state.record.process, 5.0)
        async with node(run_dir) as second:
            await second.zygote.ensure()
            await eventually(lambda: second.exits, "the exit")
            assert second.exits[0][0] == KEY
            assert "exit code 7" in second.exits[0][1].text

    asyncio.run(scenario())


@pytest.mark.parametrize("starts", ["as a fork", "as a program"])
def test_the_steps_that_a_rank_made_until_its_end_while_no_agent_ran_are_known(run_dir: Path, starts: str) -> None:
    """Nor may its log tell of them: the disk may have been full."""
    steps, preload = 30, "json" if starts == "as a fork" else "tests.agent.supervisor.starts_thread"

    async def scenario() -> None:
        first = Node(run_dir, "tests.agent.fake_rank:run", preload)
        spec = first.spec()
        state = await first.supervisor.launch(spec.model_copy(update={"spec": fake_job(run_dir, steps=steps)}), "o")
        await eventually(lambda: state.hello_received, "the hello", 30)
        await first.leave()
        assert state.pulse.step < steps
        assert wait_end(state.record.process, 30.0)
        async with node(run_dir) as second:
            await second.zygote.ensure()
            await eventually(lambda: second.exits, "the exit")
            assert f"ended with exit code 0 after step {steps}" in second.exits[0][1].text

    asyncio.run(scenario())


def test_a_rank_whose_agent_was_killed_as_it_forked_it_is_found_by_its_socket(run_dir: Path) -> None:
    async def scenario() -> None:
        first = Node(run_dir, "tests.agent.fake_rank:run", "json")
        put = first.journal.put

        def killed(table: Table, key: str, value: Any) -> None:
            if table is Table.RANK and value["process"]["pid"]:
                raise JournalError("killed")
            put(table, key, value)

        first.journal.put = killed  # type: ignore[method-assign]
        with pytest.raises(JournalError, match="killed"):
            await first.supervisor.launch(first.spec(), "o")
        await first.leave()
        async with node(run_dir) as this:
            state = this.supervisor.states[KEY]
            await eventually(lambda: state.hello_received, "the hello")
            kept = from_json(RankRecord, this.journal.get(Table.RANK, str(KEY)))
            assert state.record == kept and is_alive(kept.process)
            await this.supervisor.stop(KEY, "stop", grace_s=5.0)
            paths.append(kept.socket_path)

    paths: list[str] = []
    asyncio.run(scenario())
    assert not os.path.exists(paths[0])


def test_a_rank_of_which_nothing_came_when_its_agent_was_killed_is_told_as_ended_at_once(run_dir: Path) -> None:
    async def scenario() -> None:
        first = Node(run_dir, "tests.agent.fake_rank:run", "json")
        record = RankRecord(UNKNOWN, str(run_dir / "r.sock"), str(run_dir / "r.log"), 1, 0, "o")
        first.journal.put(Table.RANK, str(KEY), to_json(record))
        await first.leave()
        async with node(run_dir) as this:
            await eventually(lambda: this.exits, "the exit", timeout_s=3.0)
            assert this.exits[0][1].text.startswith(f"rank process (pid {os.getpid()}) ended")
            assert this.exits[0][1].text.endswith("it reported: its agent was killed as it started it")
            assert this.journal.get(Table.RANK, str(KEY)) is None

    asyncio.run(scenario())


def test_ranks_live_on_when_their_agent_is_killed(run_dir: Path) -> None:
    program = (
        "import asyncio, sys, pathlib\n"
        "from tests.agent.supervisor.test_supervisor import Node\n"
        "async def main():\n"
        "    node = Node(pathlib.Path(sys.argv[1]), 'tests.agent.fake_rank:run', 'json')\n"
        "    state = await node.supervisor.launch(node.spec(), 'o')\n"
        "    print(state.record.process.pid, flush=True)\n"
        "    await asyncio.Event().wait()\n"
        "asyncio.run(main())\n"
    )
    with subprocess.Popen([sys.executable, "-c", program, str(run_dir)], stdout=subprocess.PIPE, text=True) as agent:
        assert agent.stdout is not None
        pid = int(agent.stdout.readline())
        agent.kill()
    assert read_start_time(pid) is not None

    async def scenario() -> None:
        async with node(run_dir) as this:
            adopted = this.supervisor.states[KEY]
            assert adopted.record.process.pid == pid
            await eventually(lambda: adopted.pulse.step > 0, "steps")

    asyncio.run(scenario())


def test_no_process_is_signalled_by_its_pid_alone() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        start_time = read_start_time(process.pid)
        assert start_time is not None
        assert not send_signal(ProcessIdentity(process.pid, start_time - 1), signal.SIGKILL)
        assert process.poll() is None
        assert send_signal(ProcessIdentity(process.pid, start_time), signal.SIGKILL)


@pytest.mark.real
@pytest.mark.timeout(120)
def test_a_store_child_serves_torch_and_is_found_again_and_ended(run_dir: Path) -> None:
    use_store = (
        "import sys\n"
        "from torch.distributed import TCPStore\n"
        "store = TCPStore('127.0.0.1', int(sys.argv[1]), is_master=False, wait_for_workers=False)\n"
        "print(store.compare_set('decision', '', 'GO').decode())\n"
    )

    async def scenario() -> None:
        key = StoreKey("fake", 2)
        first = Node(run_dir, "tests.agent.fake_rank:run", "torch")
        address = await first.stores.host(key, "127.0.0.1")
        assert await first.stores.host(key, "127.0.0.1") == address
        command = [sys.executable, "-c", use_store, str(address.port)]
        said = await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True, timeout=60)
        assert said.stdout.strip() == "GO", said.stderr
        await first.leave()
        async with node(run_dir, preload="torch") as second:
            assert second.stores.address(key) == address
            process = from_json(StoreRecord, second.journal.get(Table.STORE, str(key))).process
            assert _listens_only_on_loopback(process.pid, address.port)
            await second.stores.retire(key)
            assert not is_alive(process)
            assert second.stores.hosted == ()

    asyncio.run(scenario())


@pytest.mark.real
@pytest.mark.timeout(120)
def test_a_store_that_died_is_told_and_never_started_again_for_its_generation(run_dir: Path) -> None:
    async def scenario() -> None:
        key = StoreKey("fake", 2)
        async with node(run_dir, preload="torch") as this:
            await this.stores.host(key, "127.0.0.1")
            record = from_json(StoreRecord, this.journal.get(Table.STORE, str(key)))
            send_signal(record.process, signal.SIGKILL)
            await eventually(lambda: this.store_exits, "the exit")
            with pytest.raises(StoreError, match="never started again"):
                await this.stores.host(key, "127.0.0.1")

    asyncio.run(scenario())
    assert not list(run_dir.glob("s-*.sock")), "nobody takes away the socket of one that was killed"


@pytest.mark.real
@pytest.mark.timeout(120)
@pytest.mark.parametrize("ends", ["by itself", "by the next call"])
def test_a_store_whose_end_was_interrupted_ends_and_is_not_taken_for_one_that_died(run_dir: Path, ends: str) -> None:
    """The job may be forgotten, or the agent may end, at any moment. A process that is stopped takes no notice yet."""

    async def scenario() -> None:
        key = StoreKey("fake", 2)
        async with node(run_dir, preload="torch") as this:
            await this.stores.host(key, "127.0.0.1")
            process = from_json(StoreRecord, this.journal.get(Table.STORE, str(key))).process
            send_signal(process, signal.SIGSTOP)
            first = asyncio.create_task(this.stores.retire(key))
            await asyncio.sleep(0)
            first.cancel()
            await asyncio.gather(first, return_exceptions=True)
            assert this.stores.hosted and this.journal.get(Table.STORE, str(key)) is not None
            with pytest.raises(StoreError, match="is being ended"):
                await this.stores.host(key, "127.0.0.1")
            send_signal(process, signal.SIGCONT)
            if ends == "by itself":
                assert wait_end(process, 20.0)
                await eventually(lambda: not this.stores.hosted, "the end is noticed")
            await this.stores.retire(key)
            assert not is_alive(process) and not this.stores.hosted
            assert this.journal.get(Table.STORE, str(key)) is None and not this.store_exits

    asyncio.run(scenario())
    assert not list(run_dir.glob("s-*.sock"))


def _listens_only_on_loopback(pid: int, port: int) -> bool:
    lines = [
        line.split() for name in ("tcp", "tcp6") for line in Path(f"/proc/{pid}/net/{name}").read_text().splitlines()
    ]
    listening = [fields[1] for fields in lines if fields[3] == "0A" and int(fields[1].split(":")[1], 16) == port]
    return listening == [f"0100007F:{port:04X}"]


def text_of(path: str) -> str:
    return Path(path).read_text()
