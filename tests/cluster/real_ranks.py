"""Real rank processes for tests: forked from one server that imported torch and Megatron once, killed by pid.

`run_ranks` starts one process a rank, gives each the port of a fresh TCPStore, and returns what the entries returned.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import time
import traceback
from collections.abc import Callable, Sequence
from typing import Any

from tests.cluster.net_islands import HUB, enter

PRELOAD = ["tests.cluster.real_ranks_preload"]
_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(PRELOAD)


class RankDied(AssertionError):
    """A rank raised or was killed; the text is its traceback."""


def run_ranks(entry: Callable[..., Any], ranks: int, *args: Any, timeout_s: float = 90.0) -> list[Any]:
    """Run `entry(rank, port, *args)` in `ranks` processes; return their results in rank order.

    Raises RankDied with the first traceback; no process outlives the call.
    """
    return start_ranks(entry, [(rank, *args) for rank in range(ranks)], timeout_s=timeout_s).join()


def start_ranks(entry: Callable[..., Any], arguments: Sequence[tuple], *, timeout_s: float = 90.0) -> RunningRanks:
    """Start one process for each argument tuple and return at once; `entry(first, port, *rest)`."""
    store = _context.Process(target=serve_store, args=((pipe := _context.Pipe())[1],), daemon=True)
    store.start()
    port = pipe[0].recv()
    started = []
    for first, *rest in arguments:
        ours, theirs = _context.Pipe()
        process = _context.Process(target=_run, args=(theirs, entry, first, port, rest), daemon=True)
        process.start()
        theirs.close()
        started.append((process, ours))
    return RunningRanks(store, started, time.monotonic() + timeout_s, port)


class RunningRanks:
    """Processes of one test; `join` collects results, `kill` ends one of them by pid."""

    def __init__(self, store: Any, started: list[tuple[Any, Any]], deadline: float, port: int) -> None:
        self.store = store
        self.started = started
        self.deadline = deadline
        self.port = port
        self.killed: set[int] = set()

    def kill(self, index: int, with_signal: int = signal.SIGKILL) -> None:
        """Send a signal to one process by its pid; SIGKILL marks it as expected to die."""
        process, _ = self.started[index]
        if with_signal == signal.SIGKILL:
            self.killed.add(index)
        os.kill(process.pid, with_signal)

    def join(self) -> list[Any]:
        """Results in order; None for a process that was killed on purpose."""
        try:
            return [self._result(index) for index in range(len(self.started))]
        finally:
            self.close()

    def _result(self, index: int) -> Any:
        process, pipe = self.started[index]
        if index in self.killed:
            return None
        if not pipe.poll(max(0.0, self.deadline - time.monotonic())):
            raise RankDied(f"process {index} (pid {process.pid}) did not finish in time")
        try:
            ok, value = pipe.recv()
        except EOFError:
            process.join(1)
            raise RankDied(f"process {index} died with exit code {process.exitcode}") from None
        if not ok:
            raise RankDied(f"process {index}:\n{value}")
        return value

    def close(self) -> None:
        """Kill what is left, by pid."""
        for process, pipe in [*self.started, (self.store, None)]:
            with contextlib.suppress(ProcessLookupError):
                if process.is_alive():
                    os.kill(process.pid, signal.SIGKILL)
            process.join(5)
            if pipe is not None:
                pipe.close()


def serve_store(pipe: Any, prefix: str | None = None) -> None:
    """Entry of a store process: serve on a free port of loopback, tell the port, stay. With `prefix` in the hub of
    `net_islands`, whose address it can be reached at."""
    from torch.distributed import TCPStore

    if prefix is not None:
        enter(prefix, HUB)
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    pipe.send(store.port)
    signal.pause()


def _run(pipe: Any, entry: Callable[..., Any], first: Any, port: int, rest: Sequence[Any]) -> None:
    try:
        pipe.send((True, entry(first, port, *rest)))
    except BaseException:
        pipe.send((False, traceback.format_exc()))
    finally:
        pipe.close()
        os._exit(0)


def run_alone(entry: Callable[..., Any], *args: Any, timeout_s: float = 90.0) -> Any:
    """Run `entry(*args)` in one process that has torch and Megatron imported; return its result."""
    ours, theirs = _context.Pipe()
    process = _context.Process(target=_run_alone, args=(theirs, entry, args), daemon=True)
    process.start()
    theirs.close()
    try:
        if not ours.poll(timeout_s):
            raise RankDied(f"{entry.__name__} did not finish within {timeout_s} s")
        ok, value = ours.recv()
    except EOFError:
        raise RankDied(f"{entry.__name__} died with exit code {process.exitcode}") from None
    finally:
        if process.is_alive():
            process.join(1)
        with contextlib.suppress(ProcessLookupError):
            if process.is_alive() and process.pid is not None:
                os.kill(process.pid, signal.SIGKILL)
    if not ok:
        raise RankDied(value)
    return value


def _run_alone(pipe: Any, entry: Callable[..., Any], args: tuple) -> None:
    try:
        pipe.send((True, entry(*args)))
    except BaseException:
        pipe.send((False, traceback.format_exc()))
    finally:
        pipe.close()
        os._exit(0)
