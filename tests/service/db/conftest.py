"""These tests alter their database, cut it off, or count its connections: each has one of its own."""

import pytest
from sqlalchemy import URL


@pytest.fixture(autouse=True)
def database_of_its_own(database_url: URL) -> URL:
    return database_url
