"""Runs the rank processes of one node: launches them through the zygote, adopts, watches and ends them.

It knows nothing of handoffs: the driver gets every event from here and decides what a rank does.
"""

import asyncio
import contextlib
import hashlib
import logging
import os
import signal
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from agent.journal import Journal, Table
from agent.protocol.process_end import ProcessEnd
from agent.protocol.rank import (
    FACTS,
    Failed,
    Finished,
    Hello,
    RankEvent,
    StageReport,
    StepReport,
    Stop,
    WhereaboutsReport,
    WhereQuery,
)
from agent.protocol.secret_values import NO_SECRETS, SecretPlaces, environment_of
from agent.protocol.values import Message
from agent.protocol.worker import RankSpec
from agent.supervisor.logs import read_last_line, read_last_said
from agent.supervisor.process import UNKNOWN, ProcessIdentity, is_stopped, listener_of, open_pidfd, send_signal
from agent.supervisor.rank_link import RankLink
from agent.supervisor.records import RankRecord, RankState, SlotKey
from agent.supervisor.watchdog import RankPulse
from agent.supervisor.zygote_client import Exited, ForkRequest, ZygoteError
from agent.supervisor.zygote_host import ZygoteHost
from liver_core.gpu_environment import check_environment, check_job_environment, rank_environment
from liver_core.handoff import FailedPart, FailureCause, RankStage, Reason
from liver_core.layout import from_json, to_json
from liver_core.layout.limits import fitting

EXIT_WAIT_S = 0.5
TERMINATE_S = 5.0
KILL_S = 10.0
EXITS_MAX = 4_096
LOGS_PER_JOB_MAX = 64
FORKED_WITHIN_S, FORKED_LOOK_S = 2.0, 0.05
"""The zygote may still have the request of an agent that was killed. Nothing else is done yet where that is so."""
_log = logging.getLogger(__name__)
NEVER = -1.0
"""Start time of a process that never was; what is said of it needs some pid."""


@dataclass(frozen=True, slots=True)
class SupervisorSettings:
    """Directories, the entry point of a rank, and the node's GPUs in slot order. `socket_dir` is short: a socket's path
    has at most 107 bytes."""

    run_dir: Path
    socket_dir: Path
    rank_entry: str = "agent.worker.rank_process:run"
    secret_places: SecretPlaces = NO_SECRETS
    gpus: tuple[str, ...] = ()


class Supervisor:
    """`on_event` is called with each message of a rank, `on_exit` with the cause and last state when one ends."""

    def __init__(
        self,
        settings: SupervisorSettings,
        journal: Journal,
        zygote: ZygoteHost,
        *,
        on_event: Callable[[SlotKey, RankEvent], None],
        on_exit: Callable[[SlotKey, Reason, RankState], None],
    ) -> None:
        self._settings = settings
        self._journal = journal
        self._zygote = zygote
        self._on_event = on_event
        self._on_exit = on_exit
        self._states: dict[SlotKey, RankState] = {}
        self._links: dict[SlotKey, RankLink] = {}
        self._tasks: dict[SlotKey, asyncio.Task[None]] = {}
        self._ended: dict[SlotKey, asyncio.Event] = {}
        self._exits: dict[ProcessIdentity, Exited] = {}
        self._exit_known = asyncio.Event()

    def note_exit(self, exited: Exited) -> None:
        """Called by the zygote host: store how a process ended. The pidfd reports the end itself."""
        while len(self._exits) >= EXITS_MAX:
            self._exits.pop(next(iter(self._exits)))
        self._exits[exited.identity] = exited
        self._exit_known.set()
        self._exit_known = asyncio.Event()

    def adopt(self) -> None:
        """Watch the ranks in the journal. One that has ended since is reported by `on_exit`, and so is one of which the
        last agent had just asked for the fork, if nothing came of it."""
        until = time.monotonic() + FORKED_WITHIN_S
        for text, data in self._journal.items(Table.RANK):
            record = from_json(RankRecord, data)
            if record.process != UNKNOWN:
                self._watch(SlotKey.parse(text), record)
                continue
            while (process := listener_of(record.socket_path)) is None and time.monotonic() < until:
                time.sleep(FORKED_LOOK_S)
            record = replace(record, process=process or ProcessIdentity(os.getpid(), NEVER))
            state = self._watch(SlotKey.parse(text), record)
            if process is None:
                state.reason = Reason("its agent was killed as it started it", "start", record.rank)
            else:
                self._journal.put(Table.RANK, text, to_json(record))

    @property
    def states(self) -> Mapping[SlotKey, RankState]:
        """Every rank process of this node."""
        return self._states

    async def launch(self, spec: RankSpec, origin: str) -> RankState:
        """Start the rank, journal it, begin to watch it. The slot must not have a live process. Raises SecretError, and
        GpuRefused for a setting with which it must not run on this node's GPUs."""
        key = SlotKey(spec.order.job_id, spec.slot)
        environment = await asyncio.to_thread(environment_of, spec.spec, self._settings.secret_places, os.environ)
        if self._settings.gpus:
            check_job_environment(environment)
            environment = rank_environment(spec.slot, self._settings.gpus) | environment
            check_environment({**os.environ, **environment})
        assert key not in self._states, f"slot {key} still has a process"
        log_path = self._log_path(spec)
        in_use = {state.record.log_path for state in self._states.values()}
        await asyncio.to_thread(log_path.parent.mkdir, parents=True, exist_ok=True, mode=0o700)
        await asyncio.to_thread(_drop_old_logs, log_path.parent, in_use)
        request = ForkRequest(
            name=f"rank/{key}/{spec.order.generation}/{origin}",
            entry=self._settings.rank_entry,
            spec=spec.model_dump(mode="json", by_alias=True),
            log_path=str(log_path),
            socket_path=spec.socket_path,
            environment=environment,
            workdir=spec.spec.workdir,
        )
        record = RankRecord(UNKNOWN, spec.socket_path, str(log_path), spec.order.generation, spec.rank, origin)
        await asyncio.to_thread(self._journal.put, Table.RANK, str(key), to_json(record))
        try:
            process = await self._zygote.fork(request)
        except (ZygoteError, OSError):
            if (late := await asyncio.to_thread(listener_of, spec.socket_path)) is not None:
                send_signal(late, signal.SIGKILL)  # Nobody would ever know of it.
            await asyncio.to_thread(self._journal.delete, Table.RANK, str(key))
            raise
        record = replace(record, process=process)
        await asyncio.to_thread(self._journal.put, Table.RANK, str(key), to_json(record))
        return self._watch(key, record)

    async def send(self, key: SlotKey, command: Message) -> bool:
        """Whether the command could be sent now."""
        link = self._links.get(key)
        return link is not None and await link.send(command)

    async def stop(self, key: SlotKey, reason: str, grace_s: float) -> None:
        """Ask the rank to stop. If it still runs after `grace_s`, terminate it, then kill it. A process that is stopped
        is killed at once: it would terminate when it goes on."""
        state = self._states.get(key)
        if state is None:
            return
        ended = self._ended[key]
        if grace_s > 0 and await self.send(key, Stop(reason=fitting(reason))) and await _happens(ended, grace_s):
            return
        harder = ((signal.SIGTERM, TERMINATE_S), (signal.SIGKILL, KILL_S))
        for number, wait_s in harder[is_stopped(state.record.process) :]:
            send_signal(state.record.process, number)
            if await _happens(ended, wait_s):
                return

    def kill(self, key: SlotKey, text: str) -> None:
        """Kill the rank, which does not hear us; `text` says why it died."""
        state = self._states[key]
        state.reason = Reason(text, str(state.stage), state.rank)
        _log.warning("rank %s: %s", key, text)
        send_signal(state.record.process, signal.SIGKILL)

    async def stop_all(self, reason: str, grace_s: float) -> None:
        """End every rank of this node."""
        await asyncio.gather(*(self.stop(key, reason, grace_s) for key in tuple(self._states)))

    def check_pulses(self) -> tuple[tuple[SlotKey, str], ...]:
        """The ranks that hang since the last call, and why. Call about once a second."""
        found: list[tuple[SlotKey, str]] = []
        for key, state in self._states.items():
            is_news = state.look(time.monotonic(), stopped=is_stopped(state.record.process))
            if is_news and state.hang is not None:
                found.append((key, state.hang.text))
        return tuple(found)

    async def ask_silent(self) -> None:
        """Ask ranks that have said nothing for a while where they are. Call about once a second."""
        for key, state in tuple(self._states.items()):
            if state.pulse.asks(time.monotonic()):
                await self.send(key, WhereQuery())

    async def close(self) -> None:
        """Stop watching; the ranks keep running."""
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)

    def socket_path(self, kind: str, job_id: str, number: str) -> str:
        """A short path, the same for the same process."""
        job = hashlib.sha256(job_id.encode()).hexdigest()[:8]
        return str(self._settings.socket_dir / f"{kind}-{job}-{number}.sock")

    def _log_path(self, spec: RankSpec) -> Path:
        name = f"g{spec.order.generation}-r{spec.rank}-s{spec.slot}.log"
        return self._settings.run_dir / "logs" / spec.order.job_id / name

    def _watch(self, key: SlotKey, record: RankRecord) -> RankState:
        state = RankState(record, RankPulse(time.monotonic()), record.generation, record.rank)
        self._states[key] = state
        self._ended[key] = asyncio.Event()
        self._links[key] = RankLink(
            record.socket_path,
            record.process,
            on_event=lambda event: self._take_event(key, state, event),
            on_malformed=lambda reason: self._take_malformed(state, reason),
        )
        self._tasks[key] = asyncio.create_task(self._follow(key, state))
        return state

    async def _follow(self, key: SlotKey, state: RankState) -> None:
        """Watch one process from its start or adoption to its end."""
        link = asyncio.create_task(self._links[key].run())
        try:
            await wait_process_end(state.record.process)
            # The rank's last message may still be in the socket, and it often gives the reason of the end.
            await asyncio.wait([link], timeout=EXIT_WAIT_S)
        finally:
            link.cancel()
            await asyncio.gather(link, return_exceptions=True)
        for event in await asyncio.to_thread(read_last_said, Path(state.record.log_path)):
            self._take_event(key, state, event)
        exited = await self._exit_of(state.record.process)
        state.note_last_step(exited.last_step)
        code = exited.code
        last_line = ""
        if code and state.reason is None:
            last_line = await asyncio.to_thread(read_last_line, Path(state.record.log_path))
        await asyncio.to_thread(self._journal.delete, Table.RANK, str(key))
        with contextlib.suppress(OSError):
            os.unlink(state.record.socket_path)
        del self._states[key], self._links[key], self._tasks[key]
        self._ended.pop(key).set()
        state.ended = _end_of(state, code, last_line)
        cause = state.ended.cause(state.reason.as_felt().cause if state.reason is not None else None)
        self._on_exit(key, Reason(str(state.ended), str(state.stage), state.rank, cause=cause), state)

    async def _exit_of(self, process: ProcessIdentity) -> Exited:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(EXIT_WAIT_S):
                while process not in self._exits:
                    await self._exit_known.wait()
        return self._exits.pop(process, Exited(process, None))

    def _take_event(self, key: SlotKey, state: RankState, event: RankEvent) -> None:
        now = time.monotonic()
        if isinstance(event, FACTS):
            if state.heard.get(type(event)) == event:
                return
            state.heard[type(event)] = event
        event = _with_own_stop(event, state, now)
        match event:
            case Hello():
                state.hello_received = True
                state.generation, state.rank, state.stage = event.generation, event.rank, event.stage
                state.pulse.step = event.step
                state.handoff_id = str(event.handoff_id or "")
                state.pulse.beat(now)
            case StageReport() if state.stage is RankStage.FAILED:
                state.reason = state.reason or event.reason  # Nothing that comes after its end is news of it.
            case StageReport():
                state.stage, state.reason = event.stage, event.reason
                state.handoff_id = str(event.handoff_id)
                if event.stage is RankStage.ACTIVE:
                    state.generation, state.rank = event.generation, event.rank
                state.pulse.beat(now)
            case StepReport():
                state.generation, state.loss = event.generation, event.loss
                if state.stage in (RankStage.STARTING, RankStage.ACTIVE, RankStage.ABORTED):
                    state.stage = RankStage.TRAINING
                state.pulse.stepped(now, event.step, event.seconds)
            case Finished():
                state.stage, state.reason = RankStage.FINISHED, event.failed
                state.pulse.beat(now)
            case WhereaboutsReport():
                state.where, state.where_at = event.where, now
            case Failed():
                state.stage, state.reason = RankStage.FAILED, event.reason
            case _:
                state.pulse.beat(now)
        self._on_event(key, event)

    @staticmethod
    def _take_malformed(state: RankState, reason: str) -> None:
        state.reason = Reason(f"sent a message that breaks the protocol: {reason}", str(state.stage), state.rank)


def _with_own_stop(event: RankEvent, state: RankState, now: float) -> RankEvent:
    """The same; of a rank that misses others after its own process was stopped, with that as the reason: it is the one
    that they have missed."""
    if not isinstance(event, StageReport | Failed) or event.reason is None:
        return event
    cause, stopped_s = event.reason.cause, state.pulse.stopped_s(now)
    if cause is None or cause.what is not FailedPart.PEER or not stopped_s:
        return event
    text = f"its process was stopped for {stopped_s:.0f} s, by a signal or a debugger; then it reported: {event.reason}"
    reason = Reason(text, event.reason.phase, state.rank, cause=FailureCause(FailedPart.RANK))
    return event.model_copy(update={"reason": reason})


async def wait_process_end(process: ProcessIdentity) -> None:
    """Return when exactly this process has ended."""
    descriptor = open_pidfd(process)
    if descriptor is None:
        return
    loop = asyncio.get_running_loop()
    ended = asyncio.Event()
    loop.add_reader(descriptor, ended.set)
    try:
        await ended.wait()
    finally:
        loop.remove_reader(descriptor)
        os.close(descriptor)


async def _happens(event: asyncio.Event, timeout_s: float) -> bool:
    try:
        async with asyncio.timeout(timeout_s):
            await event.wait()
    except TimeoutError:
        return False
    return True


def _end_of(state: RankState, code: int | None, last_line: str) -> ProcessEnd:
    """How the process ended, with the last reason that the rank itself reported, or else with the end of its log."""
    return ProcessEnd(
        pid=state.record.process.pid,
        signal=_signal_name(-code) if code is not None and code < 0 else None,
        exit_code=code if code is not None and code >= 0 else None,
        step=state.pulse.step,
        reported=state.reason.text if state.reason is not None else "",
        logged=last_line,
    )


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _drop_old_logs(directory: Path, in_use: set[str]) -> None:
    """Each process has its own log. Delete the oldest logs of processes that have ended."""
    logs = sorted((path for path in directory.glob("*.log") if str(path) not in in_use), key=_changed_at)
    for path in logs[:-LOGS_PER_JOB_MAX]:
        for name in (path, path.with_name(path.name + ".dropped")):
            with contextlib.suppress(OSError):
                name.unlink()


def _changed_at(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0
