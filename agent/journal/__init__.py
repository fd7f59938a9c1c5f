"""What an agent must still know after it was killed: a durable table of records in one append-only file."""

from agent.journal.journal import Journal, JournalError, RunDirectoryError, Table

__all__ = ["Journal", "JournalError", "RunDirectoryError", "Table"]
