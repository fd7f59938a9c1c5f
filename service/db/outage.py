"""Whether the database is away, and since when: logged once at its beginning and once at its end, whoever finds out."""

import logging
import threading
import time

from sqlalchemy.exc import DBAPIError
from sqlalchemy.exc import TimeoutError as PoolTimeoutError

_ENDED_BY_SERVER = ("57P", "08", "25P03", "25P04")
"""Classes of SQLSTATE, and two of them: the server shuts down or starts, the connection is lost; the server has closed
it, since this process let a transaction rest for too long."""
_log = logging.getLogger(__name__)


def is_outage(error: BaseException) -> bool:
    """Whether `error` says that the database cannot be reached, and not that it refused a statement."""
    if isinstance(error, DBAPIError):
        error = error.orig or error
    state = getattr(error, "sqlstate", "no error of PostgreSQL")
    return isinstance(error, PoolTimeoutError) or state is None or str(state).startswith(_ENDED_BY_SERVER)


def first_line(error: BaseException) -> str:
    """What the database said, in one line."""
    found = str(getattr(error, "orig", None) or error).strip().splitlines()
    return found[0] if found else type(error).__name__


class Outage:
    """One for each database."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._since: float | None = None

    @property
    def is_on(self) -> bool:
        """Whether nobody has reached the database since somebody could not."""
        return self._since is not None

    def begins(self, error: BaseException) -> None:
        """Somebody could not reach the database."""
        with self._lock:
            known, self._since = self._since is not None, self._since or time.monotonic()
        if not known:
            _log.error(
                "the database does not answer (%s); requests get status 503 and nothing is decided until it does",
                first_line(error),
            )

    def ends(self) -> None:
        """Somebody has reached the database."""
        if self._since is None:
            return
        with self._lock:
            since, self._since = self._since, None
        if since is not None:
            _log.warning("the database answers again, after %.1f s", time.monotonic() - since)
