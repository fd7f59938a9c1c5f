"""An append-only file of JSON lines, each with its checksum, folded into tables of keyed records.

One line is one change: `crc32 {"t": table, "k": key, "v": value}`; a null value deletes the record. A change is on disk
(fsync) when `put` returns. A torn last line is what a crash leaves and is dropped; damage before it is an error, since
going on would forget a promise. Grown lines are compacted into a new file that replaces the old one by rename.
"""

import contextlib
import fcntl
import json
import logging
import os
import threading
import zlib
from collections.abc import Callable, Mapping
from enum import StrEnum
from pathlib import Path
from typing import Any

FORMAT = 4
"""Of what the records hold. Raised when an older agent wrote something else under the same names, and with the version
of the protocol: records hold orders, and name ranks that speak it."""
FORMAT_KEY = "version"
LINE_BYTES_MAX = 8 * 1024 * 1024
COMPACT_ABOVE_LINES = 512
COMPACT_RATIO = 4
FILE_NAME = "journal.jsonl"
LOCK_NAME = "agent.lock"
_log = logging.getLogger(__name__)


class Table(StrEnum):
    """What is kept, and by which key."""

    FORMAT = "format"  # "version": what every record of this file is written in
    INCARNATION = "incarnation"  # "last": start count, uuid and peer port of the last agent
    PARTICIPANT = "participant"  # job/slot: the participant machine's record
    PROPOSER = "proposer"  # job: the proposer machine's record, with the highest generation burned
    HANDOFF = "handoff"  # handoff id: the mirror of a handoff this agent leads or led
    RANK = "rank"  # job/slot: pid, start time, socket and log of a rank process
    STORE = "store"  # job/generation: pid, start time, socket and address of a store child
    ZYGOTE = "zygote"  # "zygote": pid, start time, the job user that its children become
    ORDERS = "orders"  # job: the last JobOrder, so that peers and standing plans outlive the service
    NOTICE = "notice"  # node/kind/source/event: what is known of a notice that this node heard of itself


class JournalError(Exception):
    """The journal cannot be used; the text names the file and the rule."""


class RunDirectoryError(JournalError):
    """The directory cannot be written, or another agent holds it."""


class Journal:
    """The tables of one run directory. Safe to call from several threads; one process at a time holds the directory.

    A change that cannot be written ends the journal: `on_failure` is called, in the thread that wrote, and every later
    change is refused. What an agent cannot keep it must not promise.
    """

    def __init__(self, directory: Path, on_failure: Callable[[JournalError], None] = lambda error: None) -> None:
        self.on_failure = on_failure
        self._directory = directory
        self._path = directory / FILE_NAME
        self._tables: dict[Table, dict[str, Any]] = {table: {} for table in Table}
        self._lines = 0
        self._compact_above = COMPACT_ABOVE_LINES
        self._failure: JournalError | None = None
        self._file: int | None = None
        self._lock_file: int | None = None
        self._lock = threading.Lock()

    def open(self) -> "Journal":
        """Take the directory and read the file. Raises JournalError when another agent holds it, or when the file is
        damaged or of another format."""
        self._take_directory()
        self._file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
        good_bytes = self._replay()
        if good_bytes != os.fstat(self._file).st_size:
            os.ftruncate(self._file, good_bytes)
            os.fsync(self._file)
        _sync_directory(self._directory)
        self._check_format()
        return self

    def close(self) -> None:
        """Let the directory go."""
        with self._lock:
            for descriptor in (self._file, self._lock_file):
                if descriptor is not None:
                    os.close(descriptor)
            self._file = self._lock_file = None

    def put(self, table: Table, key: str, value: Mapping[str, Any]) -> None:
        """Keep `value` under `key`; it is on disk when this returns."""
        self._change(table, key, dict(value))

    def delete(self, table: Table, key: str) -> None:
        """Forget `key`; nothing happens when there is none."""
        if key in self._tables[table]:
            self._change(table, key, None)

    def get(self, table: Table, key: str) -> dict[str, Any] | None:
        """The record, or None."""
        return self._tables[table].get(key)

    def items(self, table: Table) -> tuple[tuple[str, dict[str, Any]], ...]:
        """All records of a table, oldest first."""
        return tuple(self._tables[table].items())

    def _change(self, table: Table, key: str, value: dict[str, Any] | None) -> None:
        line = _line(table, key, value)
        if len(line) > LINE_BYTES_MAX:
            raise JournalError(f"{self._path}: a record of {table} has {len(line)} bytes, at most {LINE_BYTES_MAX}")
        with self._lock:
            if self._file is None:
                raise JournalError(f"{self._path}: is not open")
            if self._failure is not None:
                raise self._failure
            try:
                _write_all(self._file, line, self._path)
                self._apply(table, key, value)
                self._lines += 1
                live = sum(len(records) for records in self._tables.values())
                if self._lines > max(self._compact_above, COMPACT_RATIO * live):
                    self._compact()
            except JournalError as error:
                self._failure = error
                self.on_failure(error)
                raise

    def _apply(self, table: Table, key: str, value: dict[str, Any] | None) -> None:
        if value is None:
            self._tables[table].pop(key, None)
        else:
            self._tables[table][key] = value

    def _replay(self) -> int:
        """Fold the file into the tables; returns the number of bytes that are whole lines."""
        data = self._path.read_bytes()
        position = 0
        while position < len(data):
            end = data.find(b"\n", position)
            line = data[position : end if end >= 0 else len(data)]
            change = _parse(line) if end >= 0 else None
            if change is None:
                if data.find(b"\n", end + 1) >= 0 and end >= 0:
                    raise JournalError(
                        f"{self._path}: line {self._lines + 1} is damaged and is not the last one; "
                        "the promises in it cannot be known: move the file away only when no rank of this node runs"
                    )
                return position
            self._apply(*change)
            self._lines += 1
            position = end + 1
        return position

    def _check_format(self) -> None:
        """A new file begins with its format; one without it was written by an agent that knew only the first."""
        if not self._lines:
            self.put(Table.FORMAT, FORMAT_KEY, {"number": FORMAT})
        number = (self.get(Table.FORMAT, FORMAT_KEY) or {"number": 1})["number"]
        if number != FORMAT:
            self.close()
            raise JournalError(
                f"{self._path}: is a journal of format {number}, this agent reads format {FORMAT}: end the ranks of "
                f"this node with the release that wrote it (liver-agent --stop-ranks --run-dir {self._directory}), "
                "then move the file away"
            )

    def _compact(self) -> None:
        """Write the live records to a new file and put it in the place of the old one. If it cannot be written, the old
        one stays, with all that it holds."""
        fresh = self._path.with_suffix(".new")
        lines = [_line(table, key, value) for table, records in self._tables.items() for key, value in records.items()]
        descriptor = None
        try:
            descriptor = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND, 0o600)
            _write_all(descriptor, b"".join(lines), fresh)
            os.rename(fresh, self._path)
        except (OSError, JournalError) as error:
            _log.warning("the journal is not made smaller, it is tried again later: %s", error)
            self._compact_above = self._lines + COMPACT_ABOVE_LINES
            if descriptor is not None:
                os.close(descriptor)
            return
        if self._file is not None:
            os.close(self._file)
        self._file = descriptor
        self._lines, self._compact_above = len(lines), COMPACT_ABOVE_LINES
        try:
            _sync_directory(self._directory)
        except OSError as error:
            # After a crash the old file may be back, without what is written from now on.
            raise JournalError(f"{self._path}: cannot be written: {error.strerror}") from error

    def _take_directory(self) -> None:
        try:
            self._directory.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._lock_file = os.open(self._directory / LOCK_NAME, os.O_RDWR | os.O_CREAT, 0o600)
        except OSError as error:
            raise RunDirectoryError(f"run directory {self._directory} cannot be written: {error.strerror}") from error
        try:
            fcntl.flock(self._lock_file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(self._lock_file)
            self._lock_file = None
            raise RunDirectoryError(f"run directory {self._directory} is in use by another agent") from None


def _line(table: Table, key: str, value: dict[str, Any] | None) -> bytes:
    body = json.dumps({"t": table, "k": key, "v": value}, separators=(",", ":")).encode()
    return b"%08x %s\n" % (zlib.crc32(body), body)


def _parse(line: bytes) -> tuple[Table, str, dict[str, Any] | None] | None:
    checksum, _, body = line.partition(b" ")
    try:
        if int(checksum, 16) != zlib.crc32(body):
            return None
        data = json.loads(body)
        return Table(data["t"]), data["k"], data["v"]
    except (ValueError, KeyError, TypeError):
        return None


def _write_all(descriptor: int, data: bytes, path: Path) -> None:
    """Append and sync. A half-written line on a full disk must not stay, or the next line would follow it and look like
    damage; if it cannot be taken away either, it is the last line, which the next agent drops."""
    start = os.fstat(descriptor).st_size
    try:
        view = memoryview(data)
        while view:
            view = view[os.write(descriptor, view) :]
        os.fsync(descriptor)
    except OSError as error:
        with contextlib.suppress(OSError):
            os.ftruncate(descriptor, start)
        raise JournalError(f"{path}: cannot be written: {error.strerror}") from error


def _sync_directory(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
