"""Which layout a job should run on, and where. Pure."""
