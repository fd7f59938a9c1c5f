"""Loops that claim rows, decide by pure rules, and apply the decision if the claim is still theirs."""
