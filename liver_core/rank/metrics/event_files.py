"""TensorBoard's event files of a job: one run, though one rank after another writes it.

Each generation writes a file of its own, which its number sorts behind those before it. The file begins with a mark
that has readers drop what older files have from its first step on: no step is shown twice, and none goes back.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tensorboardX.proto import event_pb2, summary_pb2
from tensorboardX.record_writer import RecordWriter

from liver_core.steady_clock import utc_now

# Their classes are made at import, where no type checker sees them.
_events: Any = event_pb2
_summaries: Any = summary_pb2
WAITING_MAX = 4_096
WRITE_EVERY_S = 2.0
RETRY_S = 60.0
"""How long after an error of the disk the next file is begun."""


@dataclass(frozen=True, slots=True)
class EventFolder:
    """The files lie in `path/run`. `allowed`: the folder that this must be inside of, wherever links lead."""

    path: str
    run: str
    allowed: str

    def resolved(self) -> Path:
        """Raises ValueError if a link leads out of the allowed folder."""
        folder, allowed = (Path(os.path.realpath(path)) for path in (os.path.join(self.path, self.run), self.allowed))
        if allowed not in folder.parents:
            raise ValueError(f"tensorboard: must be a folder inside checkpoint.path, {allowed}, but leads to {folder}")
        return folder


@dataclass(frozen=True, slots=True)
class StepValues:
    """What is written of one step; None for NaN and infinity."""

    generation: int
    step: int
    values: Mapping[str, float | None]
    at: float


class EventFiles:
    """`put` takes the steps of one rank and never waits; a thread of its own writes. `failed` gets the reason where it
    cannot: training goes on without."""

    def __init__(
        self, folder: EventFolder, failed: Callable[[str], object], *, write_every_s: float = WRITE_EVERY_S
    ) -> None:
        """Raises ValueError if the folder is not allowed."""
        self._folder = folder.resolved()
        self._failed = failed
        self._write_every_s = write_every_s
        self._waiting: deque[StepValues] = deque(maxlen=WAITING_MAX)
        self._closing = False
        self._wake = threading.Event()
        self._thread: threading.Thread | None = None
        self._file: _EventFile | None = None
        self._retry_at = 0.0

    def put(self, generation: int, step: int, values: Mapping[str, float | None]) -> None:
        """Have a step written. Where the disk is so slow that too many wait, the oldest are left out."""
        self._waiting.append(StepValues(generation, step, values, utc_now()))
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="event files", daemon=True)
            self._thread.start()

    def soon(self) -> None:
        """Write what there is without waiting for more of it."""
        self._wake.set()

    def close(self, timeout_s: float) -> None:
        """Wait until everything is written, or the time is over. No step may be put afterwards."""
        self._closing = True
        self._wake.set()
        if self._thread is not None:
            self._thread.join(timeout_s)

    def _run(self) -> None:
        ends = False
        while not ends:
            self._wake.wait(self._write_every_s)
            self._wake.clear()
            ends = self._closing
            if self._waiting and (ends or time.monotonic() >= self._retry_at):
                self._write()

    def _write(self) -> None:
        try:
            while self._waiting:
                self._append(self._waiting.popleft())
            if self._file is not None:
                self._file.flush()
        except OSError as error:
            self._failed(f"TensorBoard's event files in {self._folder}: {error}")
            self._file, self._retry_at = None, time.monotonic() + RETRY_S

    def _append(self, item: StepValues) -> None:
        if self._file is None or self._file.generation != item.generation:
            self._folder.mkdir(parents=True, exist_ok=True)
            if self._file is not None:
                self._file.close()
            self._file = _EventFile(self._folder, item)
        self._file.write(item)


class _EventFile:
    """One file. Readers know it by `tfevents` in its name, and read the files of a folder in the order of names."""

    def __init__(self, folder: Path, first: StepValues) -> None:
        self.generation = first.generation
        name = f"events.out.tfevents.{first.generation:016d}.{first.step:016d}.liver"
        self._records = RecordWriter(str(folder / name))
        self._add(_events.Event(wall_time=first.at, file_version="brain.Event:2"))
        mark = _events.SessionLog(status=_events.SessionLog.START)
        self._add(_events.Event(wall_time=first.at, step=first.step, session_log=mark))

    def write(self, item: StepValues) -> None:
        values = [
            _summaries.Summary.Value(tag=name, simple_value=float("nan") if value is None else value)
            for name, value in item.values.items()
        ]
        self._add(_events.Event(wall_time=item.at, step=item.step, summary=_summaries.Summary(value=values)))

    def flush(self) -> None:
        self._records.flush()

    def close(self) -> None:
        self._records.close()

    def _add(self, event: Any) -> None:
        self._records.write(event.SerializeToString())
