"""Scenarios of the handoff as text: commands and what must come out, one file per row of the failure table."""
