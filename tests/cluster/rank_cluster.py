"""A job of real rank processes for tests, commanded from the test as an agent would, but without agents.

Each process runs `RankLoop` in its main thread; commands and events travel over a pipe. The store lives in a process of
its own. `Cluster.handoff` plays the proposer: prepare on all, wait, permit, wait, retire.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import queue
import signal
import threading
import time
import uuid
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any, Self

from liver_core.handoff.messages import CutoverDeadlines, LaterCheckpoints, Reason, Rung, StoreAddress, start_order
from liver_core.layout import Member, ParallelLayout, Roster
from tests.cluster.net_islands import HUB
from tests.cluster.real_ranks import PRELOAD, serve_store
from tests.cluster.real_ranks_process import Fault, RankSetup, rank_process

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(PRELOAD)


@dataclass
class Rank:
    """One process as the test sees it."""

    member: Member
    process: Any
    pipe: Any
    events: list[tuple] = field(default_factory=list)
    result: dict[str, Any] | None = None
    error: str | None = None
    listener: threading.Thread | None = None

    def is_silent(self) -> bool:
        """It has ended, and all that it said has been read."""
        return self.listener is None or not self.listener.is_alive()


class Cluster:
    """Rank processes of one job. `close` (or leaving the context) kills what is left, by pid."""

    def __init__(self, setup: RankSetup) -> None:
        self.setup = setup
        self.ranks: dict[Member, Rank] = {}
        self.all_ranks: list[Rank] = []
        self.stores: list[Any] = []
        self.roster: Roster | None = None
        self.generation = 0
        self.faults: dict[str, tuple[Fault, ...]] = {}
        self._news: queue.Queue[None] = queue.Queue()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # Starting and handing over.

    def launch(
        self,
        layout: str,
        nodes: Iterable[str],
        *,
        checkpoint: str | None = None,
        later: LaterCheckpoints | None = None,
        timeout_s: float = 60,
    ) -> Roster:
        """Start a first world (or one from a checkpoint) and wait until it trains."""
        roster = self.next_roster(layout, nodes)
        request = self.request(None, roster, checkpoint=checkpoint, later=later)
        for member in roster.members:
            self.start(member, request)
        self.await_stage(roster.members, request, "prepared", timeout_s)
        self.command(roster.members, "permit", request.handoff_id, 1)
        self.await_stage(roster.members, request, "active", timeout_s)
        self.command(roster.members, "retire", request.handoff_id)
        self.roster = roster
        return roster

    def handoff(
        self,
        layout: str,
        nodes: Iterable[str],
        *,
        timeout_s: float = 60,
        deadline_s: float = 60,
        rung: Rung = Rung.STOP_AND_COPY,
    ) -> Any:
        """Hand the job over to another layout and members; returns the order. Raises AssertionError with reasons."""
        request = self.open(layout, nodes, deadline_s=deadline_s, rung=rung)
        self.await_stage(self.members(request), request, "prepared", timeout_s)
        self.complete(request, timeout_s=timeout_s)
        return request

    def complete(self, request: Any, *, timeout_s: float = 60) -> None:
        """Everybody is prepared: permit, wait until the next world trains, retire the old one."""
        self.command(self.members(request), "permit", request.handoff_id, request.plan_revision)
        self.await_stage(request.target.members, request, "active", timeout_s)
        self.command(self.members(request), "retire", request.handoff_id)
        self.roster = request.target

    def open(
        self,
        layout: str,
        nodes: Iterable[str],
        *,
        deadline_s: float = 60,
        cutover: Any = None,
        rung: Rung = Rung.STOP_AND_COPY,
    ) -> Any:
        """Begin a handoff: newcomers are started, survivors and leavers are told to prepare."""
        roster = self.next_roster(layout, nodes)
        request = self.request(self.roster, roster, deadline_s=deadline_s, cutover=cutover, rung=rung)
        assert self.roster is not None
        for member in roster.members:
            if member not in self.roster.members:
                self.start(member, request)
        self.command(self.roster.members, "prepare", request)
        return request

    def amend(self, request: Any, layout: str, nodes: Iterable[str], *, deadline_s: float | None = None) -> Any:
        """A newer plan revision of an open handoff; `deadline_s` from now on, else as before. Returns the new order.

        Who is new is started, who has no part any more is told so, all others are told to prepare.
        """
        members = tuple(Member(node, 0) for node in nodes)
        target = Roster("job", request.generation, ParallelLayout.parse(layout), members)
        revision = request.plan_revision + 1
        newer = replace(
            request,
            plan_revision=revision,
            target=target,
            target_revision=request.target_revision if target == request.target else revision,
            deadline_utc=request.deadline_utc if deadline_s is None else time.time() + deadline_s,
        )
        before, after = self.members(request), self.members(newer)
        reason = Reason("no part in the amended plan", "amend")
        self.command([member for member in before if member not in after], "abort", request.handoff_id, reason)
        for member in after:
            if member not in before:
                self.start(member, newer)
        self.command([member for member in after if member in before], "prepare", newer)
        return newer

    def members(self, request: Any) -> tuple[Member, ...]:
        """Everybody who has a part in a handoff."""
        return tuple(dict.fromkeys((*request.source.members, *request.target.members)))

    def next_roster(self, layout: str, nodes: Iterable[str]) -> Roster:
        self.generation += 1
        members = tuple(Member(node, 0) for node in nodes)
        return Roster("job", self.generation, ParallelLayout.parse(layout), members)

    def request(
        self,
        source: Roster | None,
        target: Roster,
        *,
        deadline_s: float = 60,
        cutover: Any = None,
        checkpoint: str | None = None,
        later: LaterCheckpoints | None = None,
        rung: Rung = Rung.STOP_AND_COPY,
    ) -> Any:
        now = time.time()
        store = StoreAddress(self.setup.host_of(HUB), self.new_store())
        first = start_order(
            target,
            store,
            str(uuid.uuid4()),
            deadline_utc=now + deadline_s,
            issued_at=now,
            proposer_id="test",
            checkpoint=checkpoint or "",
            later=later,
        )
        if source is None:
            return first
        deadlines = cutover or CutoverDeadlines()
        return replace(first, parent=source.generation, source=source, cutover=deadlines, rung=rung, cause="request")

    def new_store(self) -> int:
        ours, theirs = _context.Pipe()
        prefix = self.setup.islands[0] if self.setup.islands is not None else None
        process = _context.Process(target=serve_store, args=(theirs, prefix), daemon=True)
        process.start()
        self.stores.append(process)
        if not ours.poll(30):
            raise AssertionError("a store process did not start within 30 s")
        return ours.recv()

    def kill_store(self, with_signal: int = signal.SIGKILL) -> None:
        """End the newest store, by pid, or send it another signal."""
        os.kill(self.stores[-1].pid, with_signal)
        if with_signal == signal.SIGKILL:
            self.stores[-1].join(5)

    def start(self, member: Member, request: Any) -> None:
        faults = self.faults.get(member.node_id, ())
        ours, theirs = _context.Pipe()
        process = _context.Process(target=rank_process, args=(theirs, member, request, self.setup, faults), daemon=True)
        process.start()
        theirs.close()
        rank = Rank(member, process, ours)
        self.ranks[member] = rank
        self.all_ranks.append(rank)
        rank.listener = threading.Thread(target=self._listen, args=(rank,), daemon=True)
        rank.listener.start()

    def command(self, members: Iterable[Member], name: str, *arguments: Any) -> None:
        for member in members:
            rank = self.ranks[member]
            if rank.process.is_alive() and rank.result is None:
                with contextlib.suppress(BrokenPipeError):
                    rank.pipe.send((name, arguments))

    def kill(self, member: Member, with_signal: int = signal.SIGKILL) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.ranks[member].process.pid, with_signal)

    def arm(self, member: Member, point: str, action: str, nth: int = 1) -> None:
        """Order a fault of a living rank, and wait until it has it; `faults` by node id does so for ranks that are
        still to be started."""
        fault = Fault(point, action, nth)
        self.command([member], "arm", fault)
        events = self.ranks[member].events
        self.wait_for(lambda: ("armed", fault) in list(events), 30, f"{member} to be armed with {fault}")
        events.remove(("armed", fault))

    def await_passage(self, member: Member, point: str, timeout_s: float = 30) -> None:
        """Wait until a rank said that it passed, or is held at, a probe point."""
        events = self.ranks[member].events
        wanted = (("held", point), ("passed", point))
        self.wait_for(lambda: any(event in wanted for event in list(events)), timeout_s, f"{point} on {member}")

    def await_death(self, member: Member, timeout_s: float = 30) -> None:
        process = self.ranks[member].process
        self.wait_for(lambda: not process.is_alive(), timeout_s, f"death of {member}")

    # Watching.

    def stages(self, member: Member, handoff_id: str, plan_revision: int | None = None) -> list[tuple[str, Any, dict]]:
        """(stage, reason, measures) of one rank in one handoff, oldest first; of one plan revision, or of all."""
        said = [event for event in list(self.ranks[member].events) if event[0] == "stage" and event[1] == handoff_id]
        return [event[2:5] for event in said if plan_revision in (None, event[6])]

    def verdict(self, member: Member, request: Any, timeout_s: float = 20) -> tuple[str, str]:
        """Rung and reason that the ranks of a prepared handoff agreed on, as one of them says."""
        rank = self.ranks[member]
        self.command([member], "tell_verdict")

        def said() -> list[tuple[str, str]]:
            return [event[2:] for event in list(rank.events) if event[:2] == ("verdict", request.handoff_id)]

        self.wait_for(lambda: bool(said()), timeout_s, f"verdict of {member}")
        return said()[-1]

    def steps(self, member: Member) -> list[tuple[int, int, float, int, int]]:
        """(generation, step, loss, consumed samples, digest) reported by one rank."""
        return [event[1:] for event in list(self.ranks[member].events) if event[0] == "step"]

    def await_stage(self, members: Iterable[Member], request: Any, stage: str, timeout_s: float) -> None:
        members = tuple(members)

        def there() -> bool:
            heard = {member: self.stages(member, request.handoff_id, request.plan_revision) for member in members}
            seen = {member: [name for name, *_ in said] for member, said in heard.items()}
            for member, names in seen.items():
                bad = {"aborted", "broken"} & set(names) - {stage}
                if bad:
                    raise AssertionError(f"{member}: {heard[member][-1]}")
            return all(stage in names for names in seen.values())

        self.wait_for(there, timeout_s, f"{stage} on {[member.node_id for member in members]}")

    def await_step(self, member: Member, step: int, timeout_s: float = 60) -> None:
        """Wait until a rank has reported optimizer step `step`; no rank pauses before it."""
        self.command(self.ranks, "hurry", step)
        self.wait_for(lambda: any(row[1] >= step for row in self.steps(member)), timeout_s, f"step {step} on {member}")

    def wait_for(self, condition: Callable[[], bool], timeout_s: float, what: str) -> None:
        deadline = time.monotonic() + timeout_s
        while not condition():
            for rank in self.ranks.values():
                if rank.error is not None:
                    raise AssertionError(f"{rank.member} while waiting for {what}:\n{rank.error}")
            if time.monotonic() > deadline:
                tails = {rank.member.node_id: rank.events[-2:] for rank in self.ranks.values()}
                ended = {rank.member.node_id: rank.process.exitcode for rank in self.ranks.values() if rank.is_silent()}
                raise AssertionError(f"no {what} within {timeout_s} s; ended: {ended}; last events {tails}")
            try:
                self._news.get(timeout=0.2)
            except queue.Empty:
                continue

    def finish(self, timeout_s: float = 60) -> dict[Member, dict[str, Any]]:
        """Wait until every living process has ended by itself; their results."""
        # What one said at its end may be in the pipe long after it: reading it may have to import torch here.
        self.wait_for(
            lambda: all(rank.result is not None or rank.error or rank.is_silent() for rank in self.ranks.values()),
            timeout_s,
            "end of all ranks",
        )
        return {rank.member: rank.result for rank in self.ranks.values() if rank.result is not None}

    def stop(self, timeout_s: float = 60) -> dict[Member, dict[str, Any]]:
        """Tell the active world to stop at its next boundary and wait for it."""
        assert self.roster is not None
        self.command(self.roster.members, "stop", "test is over")
        return self.finish(timeout_s)

    def close(self) -> None:
        for process in [*(rank.process for rank in self.all_ranks), *self.stores]:
            with contextlib.suppress(ProcessLookupError):
                if process.is_alive():
                    os.kill(process.pid, signal.SIGKILL)
            process.join(5)

    def _listen(self, rank: Rank) -> None:
        while True:
            try:
                event = rank.pipe.recv()
            except (EOFError, OSError):
                self._news.put(None)
                return
            if event[0] == "result":
                rank.result = event[1]
            elif event[0] == "error":
                rank.error = event[1]
            else:
                rank.events.append(event)
            self._news.put(None)
