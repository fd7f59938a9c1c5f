"""Options of the whole test suite."""

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--rewrite", action="store_true", help="write the output of scenario files anew")
    parser.addoption("--thorough", action="store_true", help="run the long random runs with real processes as well")
