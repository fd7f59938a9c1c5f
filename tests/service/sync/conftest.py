"""A job on two fake agents, as most tests of a sync need it."""

import pytest

from service.reconcilers import jobs
from tests.service.fake_agent import JOB


@pytest.fixture
def running(client, context, make_agent, clock):
    """Two agents and a job whose first generation has been ordered."""
    agents = make_agent("a"), make_agent("b")
    job_id = client.post("/api/v1/jobs", json=JOB).json()["job_id"]
    for agent in agents:
        agent.sync()
    clock.advance(3)
    jobs.tick(context)
    for agent in agents:
        agent.sync()
        assert agent.job_order().generation == 1
    clock.advance(1)
    return job_id, *agents
