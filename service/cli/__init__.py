"""The `liver` command: a client of the REST API, `liver serve` and `liver demo`."""
