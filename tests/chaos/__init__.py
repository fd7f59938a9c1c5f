"""Trials with real processes in which something is killed or stopped at a random moment: `make chaos`.

`plan` draws a trial from its seed, `trial` plays it, `judge` makes its record, `report` merges records by seed.
"""
