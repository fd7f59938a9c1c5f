"""The arithmetic of the certificate, as numbers: how position and bits of an element are mixed."""

from __future__ import annotations

from collections.abc import Mapping

MASK = 2**64 - 1
WEYL = 0x9E3779B97F4A7C15
ROUNDS = ((0xBF58476D1CE4E5B9, 32), (0x94D049BB133111EB, 29))
"""What a word is multiplied by, and by how much it is then shifted to be mixed with itself.
Constants of splitmix64 (Steele, Lea, Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014)."""
PAIR_BYTES = 8
"""Bytes of a word of two elements."""


def chained_sums(sums: Mapping[int, int]) -> int:
    """One number over the sums of several steps, each weighted by its number: which step had which sum counts.

    Linear modulo 2^64, so that the parts of several ranks add up to the whole.
    """
    return sum((step * WEYL | 1) * part for step, part in sums.items()) & MASK
