"""Orders of a job as the tests of the driver need them."""

from pathlib import Path

import pytest

from agent.protocol.sync import JobOrder
from tests.agent.driver.lead_scene import FOUR
from tests.agent.stub_service import StubService
from tests.agent.waiting import fake_job


@pytest.fixture
def order(tmp_path: Path) -> JobOrder:
    """Of a job on the nodes FOUR."""
    return StubService(fake_job(tmp_path), FOUR).order()
