"""Runs LiveR on machines. `demo` runs all of it on this one."""
