"""Loops that claim rows, decide by pure rules and apply guarded by their claim."""
