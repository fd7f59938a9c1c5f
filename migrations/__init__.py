"""Schema revisions of the service's database, run by Alembic at start and shipped in the wheel."""
