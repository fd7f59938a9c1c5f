"""Brings the schema to the shipped revision at start, under an advisory lock so that replicas take turns."""

from pathlib import Path

from alembic import command
from alembic.config import Config
from sqlalchemy import Engine, text

import migrations

LOCK_KEY = 0x11FE_0001
"""Any fixed number; it only has to be the same in every replica."""


def upgrade(engine: Engine, *, revision: str = "head") -> None:
    """Run the migrations that are missing, in one transaction."""
    with engine.begin() as connection:
        connection.execute(text("SET LOCAL lock_timeout = '60s'"))
        connection.execute(text("SELECT pg_advisory_xact_lock(:key)"), {"key": LOCK_KEY})
        configuration = alembic_config()
        configuration.attributes["connection"] = connection
        if revision == "base":
            command.downgrade(configuration, revision)
        else:
            command.upgrade(configuration, revision)


def alembic_config() -> Config:
    """Alembic's configuration, built in code: the scripts lie in the installed package `migrations`."""
    configuration = Config()
    configuration.set_main_option("script_location", str(Path(migrations.__file__).parent))
    return configuration
