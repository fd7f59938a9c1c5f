"""Log files of bounded size, and reading them in pieces.

A process appends to its own file, so its output survives agent and zygote. The zygote empties a file that is too large
and counts the dropped bytes and characters in a sidecar file, so that offsets stay valid.
"""

import contextlib
import json
import os
from dataclasses import dataclass
from pathlib import Path

from agent.protocol.rank import FACTS, LAST_SAID, RankEvent, decode_event

LOG_BYTES_MAX = 16 * 1024 * 1024
LAST_LINE_BYTES_MAX = 4_096
LAST_SAID_BYTES_MAX = 64 * 1024
CUT_NOTE = b"[liver: the log above this line was dropped, it had grown over its limit]\n"


@dataclass(frozen=True, slots=True)
class CutFromLog:
    """How much was dropped from the front of a log since its beginning."""

    bytes: int = 0
    chars: int = 0


@dataclass(frozen=True, slots=True)
class LogPosition:
    """A place in a log, counted from the first byte and character ever written."""

    byte: int = 0
    char: int = 0


def cut_if_grown(path: Path, bytes_max: int = LOG_BYTES_MAX) -> bool:
    """Empty a log that is larger than its limit. The writer keeps appending to the same file.

    Lines that the writer adds between reading and truncating are lost: at most a few of a log that overflows.
    """
    try:
        size = path.stat().st_size
    except OSError:
        return False
    if size <= bytes_max:
        return False
    dropped = read_dropped(path)
    data = path.read_bytes()
    _write_dropped(path, CutFromLog(dropped.bytes + len(data), dropped.chars + len(_decode(data))))
    os.truncate(path, 0)
    with path.open("ab") as file:
        file.write(CUT_NOTE)
    return True


def read_dropped(path: Path) -> CutFromLog:
    """The content of the sidecar; nothing dropped if there is none."""
    try:
        data = json.loads(_sidecar(path).read_text())
        return CutFromLog(int(data["bytes"]), int(data["chars"]))
    except (OSError, ValueError, KeyError, TypeError):
        return CutFromLog()


def read_chunk(path: Path, position: LogPosition, bytes_max: int) -> tuple[LogPosition, str, LogPosition] | None:
    """The next piece: where it starts (after any dropped part), its text, where the next starts. None if there is none.

    A piece ends between characters; bytes that are no UTF-8 become replacement characters.
    """
    dropped = read_dropped(path)
    if position.byte < dropped.bytes:
        position = LogPosition(dropped.bytes, dropped.chars)
    try:
        with path.open("rb") as file:
            file.seek(position.byte - dropped.bytes)
            data = file.read(bytes_max)
    except OSError:
        return None
    if read_dropped(path) != dropped:
        return None
    data = _whole_characters(data, full=len(data) == bytes_max)
    if not data:
        return None
    text = _decode(data)
    return position, text, LogPosition(position.byte + len(data), position.char + len(text))


def read_last_line(path: Path) -> str:
    """The last line that is not empty, as of a traceback; empty if the log is, or cannot be read."""
    lines = _last_lines(path, LAST_LINE_BYTES_MAX)
    return next((line.strip() for line in reversed(lines) if line.strip()), "")


def read_last_said(path: Path) -> list[RankEvent]:
    """The facts that a rank ended with, from the last lines of its log. A line that is none, such as one that the
    user's code wrote, is left out."""
    found: list[RankEvent] = []
    for line in _last_lines(path, LAST_SAID_BYTES_MAX):
        if line.startswith(LAST_SAID):
            with contextlib.suppress(ValueError):
                event = decode_event(line.removeprefix(LAST_SAID).encode())
                found += [event] if isinstance(event, FACTS) else []
    return found


def _last_lines(path: Path, bytes_max: int) -> list[str]:
    """The lines in the last bytes of a log, the first perhaps in part; none if it cannot be read."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - bytes_max))
            return _decode(file.read()).split("\n")
    except OSError:
        return []


def _whole_characters(data: bytes, *, full: bool) -> bytes:
    """The data without an incomplete last character, unless there is nothing else."""
    for back in range(1, min(4, len(data)) + 1):
        byte = data[-back]
        if byte & 0xC0 == 0x80:
            continue
        length = 1 if byte < 0x80 else 2 if byte >> 5 == 0b110 else 3 if byte >> 4 == 0b1110 else 4
        unfinished = length > back and byte >= 0xC0
        return data[:-back] if unfinished and (full or len(data) > back) else data
    return data


def _decode(data: bytes) -> str:
    return data.decode("utf-8", errors="replace").replace("\x00", "\ufffd")


def _sidecar(path: Path) -> Path:
    return path.with_name(path.name + ".dropped")


def _write_dropped(path: Path, dropped: CutFromLog) -> None:
    fresh = path.with_name(path.name + ".dropped.new")
    fresh.write_text(json.dumps({"bytes": dropped.bytes, "chars": dropped.chars}))
    fresh.rename(_sidecar(path))
