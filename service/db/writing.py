"""Whether the database takes changes, and whether its disk has room: for `/readyz`, asked at most every few seconds."""

import shutil
import threading
import uuid
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from time import monotonic

from sqlalchemy.exc import DBAPIError
from sqlalchemy.orm import Session, sessionmaker

from service.db.outage import is_outage
from service.repeats.tables import AnswerRow

ASK_AGAIN_S = 2.0
FREE_BYTES_MIN = 64 * 1024 * 1024
"""Of the disk of an embedded PostgreSQL: its log grows by 16 MB at a time, and it ends where it cannot write that."""
_DISK_FULL, _READ_ONLY = "53100", "25006"


class WriteCheck:
    """`trouble` may be asked by anybody and often. `data_dir`: of the embedded server; None: the server is given."""

    def __init__(
        self, sessions: sessionmaker[Session], data_dir: Path | None, *, now_s: Callable[[], float] = monotonic
    ) -> None:
        self._sessions = sessions
        self._data_dir = data_dir
        self._now_s = now_s
        self._lock = threading.Lock()
        self._asked_at: float | None = None
        self._trouble = ""

    def trouble(self) -> str:
        """Why nothing can be stored; empty: it can. Raises what says that the database is away. While somebody else
        asks, what was known before."""
        if self._lock.acquire(blocking=False):
            try:
                if self._asked_at is None or self._now_s() - self._asked_at >= ASK_AGAIN_S:
                    self._trouble = self._no_room() or self._no_change()
                    self._asked_at = self._now_s()
            finally:
                self._lock.release()
        return self._trouble

    def _no_room(self) -> str:
        if self._data_dir is None:
            return ""
        free = shutil.disk_usage(self._data_dir).free
        if free >= FREE_BYTES_MIN:
            return ""
        return (
            f"the disk of {self._data_dir} has {free // 1024**2} MiB free, "
            f"at least {FREE_BYTES_MIN // 1024**2} MiB are needed: make room"
        )

    def _no_change(self) -> str:
        """A row is written and taken back: nothing stays, but the database has to do the work."""
        row = AnswerRow(
            token_id="readyz", key_sha256=uuid.uuid4().hex, request_sha256="", answered_at=datetime.now(UTC)
        )
        try:
            with self._sessions() as session:
                session.add(row)
                session.flush()
                session.rollback()
        except DBAPIError as error:
            if is_outage(error):
                raise
            state = getattr(error.orig, "sqlstate", None)
            if state == _DISK_FULL:
                return "the database's disk is full: make room on it"
            if state == _READ_ONLY:
                return "the database takes no changes: it is read-only, or a standby"
            first = str(error.orig or error).strip().splitlines()[0]
            return f"the database cannot be written: {first}"
        return ""
