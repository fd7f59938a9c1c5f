"""Processes of the relay's own machine: whose memory it reads, what they may say to it, and what they leave behind."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import socket
import struct
import subprocess
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import psutil
import pytest

from liver_core.transport.relay.local import LocalRelay, NoRelay
from liver_core.transport.relay.memory import Block, ProcessMemory, UnreadableMemory
from liver_core.transport.relay.messages import Request, Status
from liver_core.transport.relay.rank_user import RankUser
from liver_core.transport.relay.sockets import dial, receive_local
from tests.liver_core.transport.relays import MYSELF, RelayProcess
from tests.liver_core.transport.test_relay import KEY, Fortress, ask

GROWTH_BYTES_MAX = 192 << 20


def _in_a_thread(act: Callable[[], object]) -> str:
    """What a thread of its own made of it: the text of what it could not read, or nothing."""
    with ThreadPoolExecutor(1) as pool:
        try:
            pool.submit(act).result()
        except UnreadableMemory as error:
            return str(error)
    return ""


@contextlib.contextmanager
def _process_of(user: RankUser | None) -> Iterator[tuple[int, int]]:
    """A process with that user's rights, or this one's: its number, and the address of a word of its memory."""
    (ready, told), (stays, held) = os.pipe(), os.pipe()
    word = np.array([8], dtype=np.int64)
    if not (pid := os.fork()):
        if user is not None:
            os.setgroups([])
            os.setresgid(user.gid, user.gid, user.gid)
            os.setresuid(user.uid, user.uid, user.uid)
            ctypes.CDLL(None).prctl(4, 1, 0, 0, 0)  # PR_SET_DUMPABLE, as agents set it for ranks.
        os.close(held)
        os.write(told, b"x")
        os.read(stays, 1)  # Until the test is over.
        os._exit(0)
    try:
        os.read(ready, 1)
        yield pid, word.ctypes.data
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        for each in (ready, told, stays, held):
            os.close(each)


@pytest.mark.real
@pytest.mark.skipif(os.geteuid() != 0, reason="only root's relay reads for another user")
def test_a_relay_of_root_reads_processes_of_the_ranks_user_and_no_other_whatever_their_numbers_were():
    nobody = RankUser(65_534, 65_534)
    with _process_of(nobody) as (pid, address):
        assert _in_a_thread(lambda: ProcessMemory(pid, nobody).word(address, Block())) == ""
    with _process_of(None) as (pid, address):
        assert _in_a_thread(lambda: ProcessMemory(pid, MYSELF).word(address, Block())) == ""
        why = _in_a_thread(lambda: ProcessMemory(pid, nobody).word(address, Block()))
        assert "Operation not permitted" in why and "user 65534" in why


@pytest.mark.real
def test_what_a_rank_has_forked_keeps_neither_its_memory_readable_nor_the_relay_busy():
    fortress = Fortress()
    with RelayProcess() as relay, contextlib.ExitStack() as children:
        with fortress.register(relay):
            children.enter_context(_process_of(None))  # A worker, which has the rank's connection too.
        with dial("127.0.0.1", relay.port, "127.0.0.1", [KEY], time.monotonic() + 10) as reader:
            answer, why = ask(reader, Request(1, "rank", "state", np.array([[0, 8]])))
        assert answer.status is Status.REFUSED and "its rank has ended, or never was" in why.decode()


@pytest.mark.real
def test_hostile_processes_of_this_machine_are_refused_in_words_and_cost_no_memory():
    with RelayProcess() as relay, contextlib.ExitStack() as stack:
        process, nested = psutil.Process(relay.process.pid), b"[" * 100_000
        pieces = {"register": "x", "tokens": [], "allocations": [], "regions": {"a": [[1, 1]] * 200_000}}
        odd: tuple[tuple[dict[str, Any] | bytes, str], ...] = (
            (nested, "a message is JSON"),
            (b"{}", "registers or dials"),
            (b"[]", "an object"),
            ({"dial": ["127.0.0.1", 10**30], "seconds": 1}, "a host, a port"),
            ({"dial": ["x" * 300, 1], "seconds": 1}, "a host, a port"),
            ({"dial": ["127.0.0.1", 1], "seconds": float("nan")}, "some seconds"),
            (pieces | {"regions": {"a": 3}}, "not the pieces of a region"),
            (pieces, ""),
        )
        said: dict[str, Any] = {}
        for number, (message, why) in enumerate(odd * 8):
            connection = stack.enter_context(contextlib.closing(socket.socket(socket.AF_UNIX)))
            connection.connect(f"\0{relay.local}")
            connection.settimeout(10)
            if isinstance(message, dict):
                message = json.dumps(message | ({"register": f"x{number}"} if "register" in message else {})).encode()
            connection.sendall(struct.pack("<I", len(message)) + message)
            said, _ = receive_local(connection)
            assert why in said.get("error", ""), said
        assert "more than 1048576 pieces" in said["error"]
        assert process.memory_info().rss < GROWTH_BYTES_MAX
        relay._log.seek(0)
        assert "Traceback" not in relay._log.read()


@pytest.mark.real
def test_a_relay_whose_ranks_only_read_stays_until_they_have_ended_and_a_dead_rank_does_not_keep_it():
    with (
        RelayProcess(lonely_s=0.5) as relay,
        RelayProcess() as other,
        contextlib.closing(LocalRelay(relay.local)) as rank,
    ):
        rank.dial("127.0.0.1", other.port, 5).close()
        with pytest.raises(subprocess.TimeoutExpired):
            relay.process.wait(3.0)
        rank.dial("127.0.0.1", other.port, 5).close()
        stays, held = os.pipe()
        if not (pid := os.fork()):
            os.close(held)
            keeper = LocalRelay(relay.local)
            with contextlib.suppress(NoRelay):
                keeper.dial("127.0.0.1", other.port, 5)
            if not os.fork():
                os.read(stays, 1)  # A worker of the dead rank, which has its connection.
            os._exit(0)
        os.waitpid(pid, 0)
        rank.close()
        assert relay.process.wait(10) == 0
        os.close(stays)
        os.close(held)
