"""Starts, watches and ends the rank processes: the zygote that forks them, the links to them, their logs."""
