"""Two nodes of an account that train, and facts about their machines."""

from datetime import timedelta
from typing import Any

import pytest

from agent.protocol.sync import Provider
from service.clouds.cloud_facts import CloudFact, FactKind
from service.clouds.operations import take_facts


@pytest.fixture
def tell(context, clock):
    """Takes one fact about a machine, said `ago_s` ago, with a deadline `in_s` from now; returns what became of it."""
    numbers = iter(range(1_000_000))

    def take(provider_id: str = "i-a", *, in_s: float | None = 120, ago_s: float = 0, **more: Any):
        now = clock()
        values: dict[str, Any] = {
            "provider": Provider.AWS,
            "provider_id": provider_id,
            "kind": FactKind.INTERRUPTION,
            "said_at": now - timedelta(seconds=ago_s),
            "deadline_at": None if in_s is None else now + timedelta(seconds=in_s),
            "channel": "aws-queue",
            "message_id": f"m-{next(numbers)}",
            "raw": '{"detail-type": "test"}',
        }
        with context.sessions.begin() as session:
            (taken,) = take_facts(session, [CloudFact(**(values | more))], now=now)
        return taken

    return take


@pytest.fixture
def on_machines(running):
    """The job of `running`, whose nodes a and b have said that they are machines i-a and i-b."""
    _, *agents = running
    for agent in agents:
        agent.provider_id = f"i-{agent.node_id}"
        agent.sync()
    return running
