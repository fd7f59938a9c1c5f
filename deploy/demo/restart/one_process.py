"""Runs a job without agents: one world after the other, ranks forked from this process, which has imported everything.

For undisturbed reference runs and for the best case of the restart baseline. Every rank writes events with wall clock
times as JSON lines to its own file. Nothing here is on the live path.

    python -m deploy.demo.restart.one_process plan.json
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import signal
import sys
import threading
import time
import traceback
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

from liver_core.gpu_environment import rank_environment, visible_gpus
from liver_core.handoff.messages import Order, RankStage, StoreAddress, start_order
from liver_core.layout import Member, ParallelLayout, Roster

LAUNCH_FILE = "launch.json"
_HOST = "127.0.0.1"
_POLL_S = 0.005


@dataclass(frozen=True, slots=True, kw_only=True)
class JobSpec:
    """The part of a job file that concerns the training itself."""

    entrypoint: str
    args: dict[str, Any]
    global_batch: int
    micro_batch: int
    seed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class WorldSpec:
    """One world from its start to its end. `checkpoint`: start from it; `save_to`: write `save_to/step-N` at the end.

    `events` is the folder in which rank r writes `rank-r.jsonl`.
    """

    layout: str
    last_step: int
    events: str
    timeout_s: float
    checkpoint: str | None = None
    save_to: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class WorldsPlan:
    """Worlds to run one after the other."""

    job: JobSpec
    worlds: tuple[WorldSpec, ...]

    def to_json(self) -> str:
        """For the command line of another process."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> WorldsPlan:
        """Raises TypeError or KeyError for anything that `to_json` did not write."""
        data = json.loads(text)
        return cls(job=JobSpec(**data["job"]), worlds=tuple(WorldSpec(**world) for world in data["worlds"]))


class RankFailed(RuntimeError):
    """A rank failed or did not end in time; the text names it and its log."""


def warm() -> None:
    """Import once what ranks need, as an agent's zygote does; starts no thread, so that forking stays safe."""
    from agent.supervisor.zygote_host import DEFAULT_ENVIRONMENT

    for name, value in DEFAULT_ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    importlib.import_module("agent.worker.preload")


def run_worlds(plan: WorldsPlan) -> None:
    """Run every world of the plan. Raises RankFailed; no process outlives the call."""
    for world in plan.worlds:
        run_world(plan.job, world)


def run_world(job: JobSpec, world: WorldSpec) -> None:
    """Fork the ranks of one world and wait for their end. Raises RankFailed."""
    folder = Path(world.events)
    folder.mkdir(parents=True, exist_ok=True)
    note_launch(folder)
    children: dict[int, str] = {}
    deadline = time.monotonic() + world.timeout_s
    try:
        store, port = _fork_store()
        children[store] = "store"
        for rank in range(ParallelLayout.parse(world.layout).world_size):
            pid = _fork(lambda rank=rank: _run_rank(job, world, rank, port), folder / f"rank-{rank}.log")
            children[pid] = f"rank {rank}"
        _wait(children, store, deadline, folder)
    finally:
        _end(children)


def note_launch(folder: Path) -> None:
    """Record the time just before a world's processes are started."""
    (folder / LAUNCH_FILE).write_text(json.dumps({"at": time.time()}))


def read_events(folder: str | Path) -> dict[int, list[dict[str, Any]]]:
    """rank -> its events, in order."""
    found = {}
    for path in sorted(Path(folder).glob("rank-*.jsonl")):
        rank = int(path.stem.removeprefix("rank-"))
        found[rank] = [json.loads(line) for line in path.read_text().splitlines()]
    return found


# Processes.


def _fork(entry: Callable[[], int], log: Path) -> int:
    """Fork a child that runs `entry` with its output in `log`; returns its pid."""
    sys.stdout.flush()
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        os.dup2(output, 1)
        os.dup2(output, 2)
        code = entry()
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _fork_store() -> tuple[int, int]:
    """A process that serves a store on loopback. Returns its pid and port."""
    reading, writing = os.pipe()

    def serve() -> int:
        from torch.distributed import TCPStore

        store = TCPStore(_HOST, 0, is_master=True, wait_for_workers=False)
        os.write(writing, f"{store.port}\n".encode())
        signal.pause()
        return 0

    pid = _fork(serve, Path(os.devnull))
    os.close(writing)
    with os.fdopen(reading) as answer:
        line = answer.readline()
    if not line:
        os.waitpid(pid, 0)
        raise RankFailed("the store process ended before it listened")
    return pid, int(line)


def _wait(children: dict[int, str], store: int, deadline: float, folder: Path) -> None:
    """Wait until only the store is left. Raises RankFailed for the first rank that fails, or at the deadline."""
    while set(children) != {store}:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid == 0:
            if time.monotonic() > deadline:
                raise RankFailed(f"{', '.join(children.values())} did not end in time; see {folder}")
            time.sleep(_POLL_S)
            continue
        name = children.pop(pid, "")
        if name and (code := os.waitstatus_to_exitcode(status)):
            raise RankFailed(f"{name} ended with status {code}; see {folder / name.replace(' ', '-')}.log")


def _end(children: dict[int, str]) -> None:
    for pid in children:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    children.clear()


# Inside a rank.


class EventFile:
    """The loop's listener: one JSON object per line, each with `at`, seconds of the wall clock."""

    def __init__(self, file: IO[str]) -> None:
        self._file = file
        self._lock = threading.Lock()

    def write(self, event: str, **content: Any) -> None:
        """Append one event."""
        with self._lock:
            self._file.write(json.dumps({"event": event, "at": time.time(), **content}) + "\n")
            self._file.flush()

    def stage(
        self, request: Order, stage: RankStage, *, reason: Any, measures: dict[str, float], certificate: str
    ) -> None:
        """A stage of the start."""
        self.write("stage", stage=stage, reason=None if reason is None else str(reason), measures=measures)

    def step(self, generation: int, progress: Any, totals: Any, seconds: float) -> None:
        """The end of an optimizer step."""
        digest = f"{progress.digest:016x}"
        self.write("step", step=progress.step, loss=totals.loss, seconds=seconds, sample_digest=digest)

    def metrics(self, generation: int, step: int, values: Mapping[str, float | None]) -> None:
        """Nobody reads them here."""

    def checkpointed(self, path: str, step: int, seconds: float, asked: int = 0) -> None:
        """A checkpoint is complete; reported by rank 0."""
        self.write("saved", path=path, step=step, seconds=seconds)

    def checkpoint_failed(self, path: str, step: int, text: str, asked: int = 0) -> None:
        """A checkpoint was not written."""
        self.write("save_failed", path=path, text=text)


@contextmanager
def event_file(folder: str, rank: int) -> Iterator[EventFile]:
    """The event file of one rank, emptied first."""
    with (Path(folder) / f"rank-{rank}.jsonl").open("w") as file:
        yield EventFile(file)


def _run_rank(job: JobSpec, world: WorldSpec, rank: int, port: int) -> int:
    from liver_core.rank.after_step import CheckpointPlan
    from liver_core.rank.loop import RankLoop
    from liver_core.rank.prepare.preparation import PrepareSettings
    from liver_core.training.entrypoint import load_job
    from liver_core.worlds.megatron import prepare_process

    with event_file(world.events, rank) as events:
        events.write("worker_started")
        # CUDA, which no process has started before the fork, finds its rank's own GPU first.
        os.environ.update(rank_environment(rank, visible_gpus(os.environ, ())))
        prepare_process()
        roster = start_roster(world.layout)
        now = time.time()
        order = start_order(
            roster,
            StoreAddress(_HOST, port),
            str(uuid.uuid5(uuid.NAMESPACE_OID, world.events)),
            deadline_utc=now + world.timeout_s,
            issued_at=now,
            proposer_id="solo",
            checkpoint=world.checkpoint or "",
        )
        rule = None if world.save_to is None else CheckpointPlan(world.save_to, world.last_step, 2)
        settings = PrepareSettings(host=_HOST, transport=_no_transport)
        loop = RankLoop(
            load_job(**asdict(job)), roster.members[rank], settings, events, last_step=world.last_step, checkpoints=rule
        )
        loop.permit(order.handoff_id, 1)
        ended = loop.run(order)
        events.write("ended", how=ended.how, reason=None if ended.reason is None else str(ended.reason))
    return 0 if ended.how == "finished" else 1


def start_roster(layout: str) -> Roster:
    """The members of a world without agents: each process has a node that is only a name."""
    parsed = ParallelLayout.parse(layout)
    return Roster("solo", 1, parsed, tuple(Member(f"solo-{rank}", 0) for rank in range(parsed.world_size)))


def _no_transport(name: str, store: StoreAddress) -> Any:
    raise AssertionError(f"{name} at {store}: a world without a source has nothing to read")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the plan in a file. The status is 1 when a rank failed, with the reason on standard error."""
    parser = argparse.ArgumentParser(prog="python -m deploy.demo.restart.one_process", description=__doc__)
    parser.add_argument("plan", help="a file with a WorldsPlan as JSON")
    options = parser.parse_args(arguments)
    plan = WorldsPlan.from_json(Path(options.plan).read_text())
    warm()
    try:
        run_worlds(plan)
    except RankFailed as error:
        sys.stderr.write(f"{error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
