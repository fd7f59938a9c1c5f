"""The service's HTTP surface, fuzzed by schemathesis from its own description. `python -m tests.fuzz.run --help`."""
