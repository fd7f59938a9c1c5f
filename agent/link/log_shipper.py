"""Sends rank logs in pieces with the reports. Each file is read from where the service has acknowledged it.

The positions are stored in a small file beside the logs. If it is lost, pieces are sent again, which changes nothing.
"""

import json
import logging
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from agent.protocol.sync import LOG_CHUNK_CHARS_MAX, LogChunk
from agent.supervisor.logs import LogPosition, read_chunk

BYTES_PER_REPORT_MAX = 512 * 1024
CHUNKS_PER_REPORT_MAX = 48
FILE_NAME = "log-positions.json"
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LogFile:
    """One rank's log. `generation` and `rank`, which its next piece is sent under, are those of the process now."""

    path: str
    job_id: str
    generation: int
    rank: int


class LogShipper:
    """Blocking: call `pieces` and `acknowledge` from a thread."""

    def __init__(self, directory: Path) -> None:
        self._file = directory / FILE_NAME
        self._acknowledged = _read_positions(self._file)
        self._sent: dict[int, dict[str, LogPosition]] = {}

    def pieces(self, files: Iterable[LogFile], report_seq: int, share: float = 1.0) -> tuple[LogChunk, ...]:
        """The new text of these logs, bounded by that share of what a report may hold. It counts as sent with this
        report."""
        chunks: list[LogChunk] = []
        left = max(LOG_CHUNK_CHARS_MAX, round(BYTES_PER_REPORT_MAX * share))
        sent: dict[str, LogPosition] = {}
        for file in files:
            position = self._acknowledged.get(file.path, LogPosition())
            while left > 0 and len(chunks) < CHUNKS_PER_REPORT_MAX:
                found = read_chunk(Path(file.path), position, min(left, LOG_CHUNK_CHARS_MAX))
                if found is None:
                    break
                start, text, position = found
                left -= position.byte - start.byte
                chunks.append(
                    LogChunk(
                        job_id=file.job_id, generation=file.generation, rank=file.rank, offset=start.char, text=text
                    )
                )
                sent[file.path] = position
        # Keep only the newest report's positions: a late acknowledgement of an older report confirms less.
        self._sent = {report_seq: sent}
        return tuple(chunks)

    def acknowledge(self, report_seq: int) -> None:
        """The service has stored the pieces that were sent with this report."""
        positions = self._sent.pop(report_seq, None)
        if not positions:
            return
        self._acknowledged.update(positions)
        self._acknowledged = {path: at for path, at in self._acknowledged.items() if Path(path).exists()}
        fresh = self._file.with_suffix(".new")
        try:
            fresh.write_text(json.dumps({path: [at.byte, at.char] for path, at in self._acknowledged.items()}))
            fresh.rename(self._file)
        except OSError as error:
            _log.warning("log positions cannot be stored, a restarted agent sends pieces again: %s", error)


def _read_positions(path: Path) -> dict[str, LogPosition]:
    try:
        data = json.loads(path.read_text())
        return {str(name): LogPosition(int(at[0]), int(at[1])) for name, at in data.items()}
    except (OSError, ValueError, TypeError, IndexError, AttributeError):
        return {}
