"""What a job should run on next, and what it is worth: utility, hazard, prices, and two plain policies to compare with.

`types` says what goes in and what comes out, `utility` scores one option, `choosing` is LiveR's own policy,
`plain_policies` are the two that it is compared with. Everything here is pure: no clock, no database, no chance.
"""
