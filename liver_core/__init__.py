"""Live reconfiguration of one training job: move its state between parallel layouts while it trains.

The pure half (`layout`, `reshard`, `handoff`) needs the standard library only; the torch half (`tensors`,
`transport`, `worlds`, `training`) is imported by name. Importing this package imports neither.
"""

PACKAGES = ("agent", "deploy", "liver_core", "migrations", "service")
"""What an installation of LiveR puts on Python's path. Packages of a job need other names: ranks have these already."""
