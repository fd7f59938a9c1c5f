"""Handoffs: one row per attempt, opened here or mirrored from agents."""
