"""One rank process: its training loop, and what it does in each phase of a handoff, a folder each."""
