"""What an agent makes of the answers of its zygote, spoken to by a thread of the test."""

import asyncio
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from agent.supervisor.process import own_identity, read_start_time
from agent.supervisor.zygote_client import Exited, ForkRequest, ZygoteClient, ZygoteError
from tests.agent.waiting import quick_directory

LIMIT_S, STANDS_STILL_S = 0.2, 0.5


@pytest.mark.parametrize(
    ("told", "known"),
    [
        ({"last_step": [2, 7]}, (2, 7)),
        ({"last_step": None}, None),
        ({}, None),  # A zygote that was started before they told it.
        ({"last_step": [2, 2**64 - 1]}, None),
        ({"last_step": [2**64 - 1, 7]}, None),
    ],
)
def test_the_last_step_of_a_rank_is_what_a_step_can_be_whatever_its_job_wrote_there(told: Any, known: Any) -> None:
    assert Exited.from_json({"pid": 1, "start_time": 2.0, "code": -9, **told}).last_step == known


@pytest.fixture
def path() -> Iterator[str]:
    folder = quick_directory()
    yield str(folder / "zygote.sock")
    shutil.rmtree(Path(folder))


def serve(listener: socket.socket, *, answers: bool) -> None:
    """A hello, then an answer to each request until the client is gone."""
    connection, _ = listener.accept()
    with connection, connection.makefile("rw") as stream:
        print(json.dumps({"op": "hello"}), file=stream, flush=True)
        for line in stream:
            if answers:
                print(json.dumps({"op": "done", "request": json.loads(line)["request"]}), file=stream, flush=True)


async def ask(path: str, *, stands_still: bool) -> None:
    client = ZygoteClient(path, on_exit=lambda exited: None)
    await client.connect(own_identity(), timeout_s=10.0)
    try:
        if stands_still:
            # As SIGSTOP does it: the request is on its way, and nothing runs here until the limit is over.
            asyncio.get_running_loop().call_soon(threading.Event().wait, STANDS_STILL_S)
        await client._ask({"op": "forget", "pids": [os.getpid()]}, LIMIT_S)
    finally:
        await client.close()


@pytest.mark.parametrize("stands_still", [True, False])
def test_an_agent_that_stood_still_past_the_limit_reads_the_answer_that_came_meanwhile(path: str, stands_still: bool):
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen(1)
        thread = threading.Thread(target=serve, args=(listener,), kwargs={"answers": True}, daemon=True)
        thread.start()
        asyncio.run(ask(path, stands_still=stands_still))
        thread.join(5)


def test_a_zygote_that_does_not_answer_is_given_up_after_the_limit(path: str):
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen(1)
        threading.Thread(target=serve, args=(listener,), kwargs={"answers": False}, daemon=True).start()
        with pytest.raises(ZygoteError, match=r"did not answer forget in 0.2 s"):
            asyncio.run(ask(path, stands_still=False))


def serve_late(listener: socket.socket, late: threading.Event, pid: int, answers: int) -> None:
    """A hello, and after `late` the answer to so many requests to fork: always the same process."""
    connection, _ = listener.accept()
    with connection, connection.makefile("rw") as stream:
        print(json.dumps({"op": "hello"}), file=stream, flush=True)
        asked = [json.loads(stream.readline())["request"] for _ in range(answers)]
        late.wait(20)
        identity = {"pid": pid, "start_time": read_start_time(pid)}
        for request in asked:
            print(json.dumps({"op": "forked", "request": request, **identity}), file=stream, flush=True)
        stream.readline()


@pytest.mark.parametrize("again", [False, True], ids=["given up", "asked for again"])
def test_a_process_that_is_forked_after_its_start_was_given_up_is_ended_and_leaves_no_socket(path: str, again: bool):
    late, answers = threading.Event(), 2 if again else 1
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    left = Path(path).with_name("rank.sock")
    left.touch()
    wanted = ForkRequest("rank", "x:y", {}, "log", str(left), {}, None)

    async def run() -> None:
        client = ZygoteClient(path, on_exit=lambda exited: None)
        await client.connect(own_identity(), timeout_s=10.0)
        with pytest.raises(ZygoteError, match="did not answer fork"):
            await client.fork(wanted, LIMIT_S)
        if again:
            asked = asyncio.create_task(client.fork(wanted, 20.0))
            await asyncio.sleep(0)
            late.set()
            assert (await asked).pid == child.pid
        else:
            late.set()
            assert await asyncio.to_thread(child.wait, 20) == -signal.SIGKILL
        await client.close()

    try:
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(path)
            listener.listen(1)
            thread = threading.Thread(target=serve_late, args=(listener, late, child.pid, answers), daemon=True)
            thread.start()
            asyncio.run(run())
            thread.join(5)
        assert left.exists() is again and (child.poll() is None) is again
    finally:
        child.kill()
        child.wait()
