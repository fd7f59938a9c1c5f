"""The policy on public spot traces: goodput, dollars and regret, written as one report. `make bench-policy` runs it."""
