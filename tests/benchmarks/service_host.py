"""A real `liver serve` for the service benchmark, and what it has used: processor time, memory, log, SQL statements.

Run as a module it is that service: all that is added is a count of the statements that its requests send.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import re
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import psycopg
from sqlalchemy import Engine, event

from service.server import serve
from service.settings import ServiceSettings
from tests.cluster.real_service import RealService, real_service, service_folder

WORKERS = "AnyIO worker thread"
"""How anyio names the threads that requests run in."""
COUNT_BYTES = 8
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class Used:
    """What the service and its database have used since they began. `statements`: of requests, not of reconcilers; 0
    where the service is not the one of this module, and counts none."""

    service_cpu_s: float
    database_cpu_s: float
    statements: int
    wal_bytes: int
    at_s: float


@dataclass(frozen=True, slots=True)
class Host(RealService):
    """A service that runs."""

    def connect(self) -> psycopg.Connection:
        """A connection to its database."""
        lines = self._postmaster().read_text().splitlines()
        return psycopg.connect(host=lines[4], port=lines[3], user="postgres", dbname="postgres", autocommit=True)

    def used(self) -> Used:
        """Up to now."""
        with self.connect() as connection:
            row = connection.execute("SELECT pg_wal_lsn_diff(pg_current_wal_insert_lsn(), '0/0')").fetchone()
        kept = self.folder / "statements"
        count = int.from_bytes(kept.read_bytes()[:COUNT_BYTES], "little") if kept.exists() else 0
        return Used(
            service_cpu_s=_cpu_s(self.process.pid),
            database_cpu_s=_database_cpu_s(int(self._postmaster().read_text().splitlines()[0])),
            statements=count,
            wal_bytes=int(row[0]) if row else 0,
            at_s=time.monotonic(),
        )

    def database_pids(self) -> list[int]:
        """The embedded PostgreSQL and its processes."""
        postmaster = int(self._postmaster().read_text().splitlines()[0])
        return [postmaster, *_children(postmaster)]

    def rss_mb(self) -> float:
        """Memory of the service, without its database."""
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        found = re.search(r"VmRSS:\s+(\d+) kB", status)
        return int(found[1]) / 1024 if found else 0.0

    def _postmaster(self) -> Path:
        return self.folder / "postgres" / "postmaster.pid"


@contextlib.contextmanager
def host(settings: Mapping[str, str]) -> Iterator[Host]:
    """Starts and ends a service. `settings`: LIVER_SERVICE_* by the rest of the name."""
    with service_folder() as folder:
        (folder / "statements").write_bytes(bytes(COUNT_BYTES))
        with real_service(Host, folder, ("-m", __name__), settings) as service:
            yield service


def _cpu_s(pid: int, *, with_ended: bool = False) -> float:
    # The name in brackets may hold spaces.
    values = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return sum(map(int, values[11 : 15 if with_ended else 13])) / _TICKS_PER_S


def _database_cpu_s(postmaster: int) -> float:
    """Of the server, its processes, and those that have ended."""
    total_s = _cpu_s(postmaster, with_ended=True)
    for pid in _children(postmaster):
        with contextlib.suppress(OSError):
            total_s += _cpu_s(pid)
    return total_s


def _children(pid: int) -> list[int]:
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            if int(stat.read_text().rpartition(")")[2].split()[1]) == pid:
                found.append(int(stat.parent.name))
    return found


def _count_statements(path: Path) -> None:
    lock = threading.Lock()
    file = path.open("r+b")
    shared, count = mmap.mmap(file.fileno(), COUNT_BYTES), 0

    @event.listens_for(Engine, "before_cursor_execute")
    def more(*_: object) -> None:
        nonlocal count
        if threading.current_thread().name == WORKERS:
            with lock:
                count += 1
                shared[:COUNT_BYTES] = count.to_bytes(COUNT_BYTES, "little")


def main() -> None:
    settings = ServiceSettings()
    _count_statements(settings.resolved_data_dir() / "statements")
    serve(settings, say=print)


if __name__ == "__main__":
    main()
