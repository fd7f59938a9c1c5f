"""Pairs that no run can give. Pure."""

from tests.simulation.coverage import Pair

IMPOSSIBLE: dict[Pair, str] = {}
