"""Capacity: machines that were asked for, and machines that there are, each with its provider's name for it."""
