"""Brings the schema to the shipped revision at start, under an advisory lock so that replicas take turns."""

from collections.abc import Sequence
from functools import cache
from pathlib import Path

from alembic import command
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from psycopg.errors import InsufficientPrivilege
from sqlalchemy import Engine, text
from sqlalchemy.exc import ProgrammingError

import migrations
from service.db.engine import StartError

LOCK_KEY = 0x11FE_0001
"""Any fixed number; it only has to be the same in every replica."""


def upgrade(engine: Engine, *, revision: str = "head") -> None:
    """Run the migrations that are missing, in one transaction. Raises StartError if the schema is newer than all, and
    where the database user lacks rights."""
    try:
        _upgrade(engine, revision)
    except ProgrammingError as error:
        if not isinstance(error.orig, InsufficientPrivilege):
            raise
        raise StartError(
            f"the database user {engine.url.username} lacks rights: {error.orig.diag.message_primary}; it needs to own "
            f"the database {engine.url.database}, or all rights in its schema public and on the tables there"
        ) from error


def _upgrade(engine: Engine, revision: str) -> None:
    with engine.begin() as connection:
        connection.execute(text("SET LOCAL lock_timeout = '60s'"))
        connection.execute(text("SELECT pg_advisory_xact_lock(:key)"), {"key": LOCK_KEY})
        scripts = _scripts()
        found = MigrationContext.configure(connection).get_current_heads()
        _check_known(found, scripts)
        if revision == "head" and found == tuple(scripts.get_heads()):
            return
        configuration = alembic_config()
        configuration.attributes["connection"] = connection
        if revision == "base":
            command.downgrade(configuration, revision)
        else:
            command.upgrade(configuration, revision)


@cache
def _scripts() -> ScriptDirectory:
    return ScriptDirectory.from_config(alembic_config())


def _check_known(found: Sequence[str], scripts: ScriptDirectory) -> None:
    """Raises StartError for a schema that a newer program has made."""
    known = {script.revision for script in scripts.walk_revisions()}
    for revision in found:
        if revision not in known:
            raise StartError(
                f"the database has schema revision {revision}, and this program knows those up to "
                f"{scripts.get_current_head()}: a newer liver has used it; install that release, or restore a backup "
                "from before"
            )


def alembic_config() -> Config:
    """Alembic's configuration, built in code: the scripts lie in the installed package `migrations`."""
    configuration = Config()
    configuration.set_main_option("script_location", str(Path(migrations.__file__).parent))
    return configuration
