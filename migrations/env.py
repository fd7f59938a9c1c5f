"""Alembic's entry: runs on the connection that the service hands over (see service.db.upgrade), never on its own."""

from alembic import context

from service.db.schema import metadata

connection = context.config.attributes["connection"]
context.configure(connection=connection, target_metadata=metadata(), transaction_per_migration=False)
with context.begin_transaction():
    context.run_migrations()
