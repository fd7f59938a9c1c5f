"""Numbers of a job by step: built in, and the job's own."""
